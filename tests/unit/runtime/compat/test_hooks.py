"""The table of Megatron's names: what it catches, and that the installed Megatron fits it."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import pytest
from helpers.versions import patches_of

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.compat import hooks
from megatron_wlb.runtime.compat.source import MegatronSource

VERSION = MegatronSource.installed().version
INFO = "megatron/core/package_info.py"
P2P = "megatron/core/pipeline_parallel/p2p_communication.py"
SHAPES = "tensor_send_next, tensor_send_prev, recv_prev, recv_next"


def test_installed_megatron_fits() -> None:
    problems = hooks.problems(MegatronSource.installed())
    assert len(problems) > 100
    assert not any(problems.values()), problems
    hooks.check()


def test_tested_versions_have_patches() -> None:
    for version, known in hooks.VERSIONS.items():
        assert len(patches_of(version)) == (2 if known.tested else 0)


def edit(tree: Path, file: str, old: str, new: str) -> None:
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new))


def test_copied_tree_fits(tree: Path) -> None:
    hooks.check(source=MegatronSource.at(tree))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def _communicate_shapes", "def _exchange_shapes", "_communicate_shapes is missing"),
        (f"(self, {SHAPES})", "(self, sends, recv_prev, recv_next)", "lacks the parameter tensor_"),
        (f"(self, {SHAPES})", f"(self, {SHAPES}, vp_stage)", "asks for the parameter vp_stage too"),
        (
            f"(self, {SHAPES})",
            "(self, tensor_send_prev, tensor_send_next, recv_prev, recv_next)",
            "takes its parameters in another order than self, tensor_send_next",
        ),
        # Which would fail nothing at once, and may compute something else.
        (f"(self, {SHAPES})", f"(self, {SHAPES}, vp=True)", "has the new parameter vp=True;"),
    ],
)
def test_changed_target_is_refused(tree: Path, old: str, new: str, message: str) -> None:
    edit(tree, P2P, old, new)
    with pytest.raises(CompatibilityError, match=message) as caught:
        hooks.check(source=MegatronSource.at(tree))
    assert str(caught.value).startswith(
        f"megatron-core {VERSION}: megatron.core.pipeline_parallel."
    )
    assert "\n" not in str(caught.value)


ROPE = "megatron/core/models/common/embeddings/rope_utils.py"


def test_changed_default_is_refused_unless_allowed(
    tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(tree, ROPE, "mla_rotary_interleaved: bool = False", "mla_rotary_interleaved: bool = True")
    changed = "has the default mla_rotary_interleaved=True, not False"
    with pytest.raises(CompatibilityError, match=changed):
        hooks.check(source=MegatronSource.at(tree))
    with caplog.at_level(logging.WARNING):
        hooks.check(source=MegatronSource.at(tree), allow_untested=True)
    assert f"embeddings:apply_rotary_pos_emb {changed}" in caplog.text


def test_all_that_the_package_takes_from_megatron_is_checked() -> None:
    imported = importlib.import_module("megatron_signatures").imported
    source = MegatronSource.installed()
    known = {name for version in hooks.VERSIONS for name in hooks.expected_of(version)}
    missing = {n for n in imported(source) if n not in known and not n.startswith("megatron.train")}
    assert not missing, "add them with scripts/megatron_signatures.py"


def test_unknown_version_is_refused_unless_allowed(
    tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(tree, INFO, "MINOR = 19", "MINOR = 17")
    source = MegatronSource.at(tree)
    with pytest.raises(CompatibilityError, match="--wlb-allow-untested-megatron"):
        hooks.check(source=source)
    with caplog.at_level(logging.WARNING):
        hooks.check(source=source, allow_untested=True)
    assert "megatron-core 0.17.2 is unknown to megatron-wlb" in caplog.text
    # Allowed, but not blind.
    edit(tree, P2P, "def _communicate_shapes", "def _exchange_shapes")
    with pytest.raises(CompatibilityError, match="_communicate_shapes is missing"):
        hooks.check(source=MegatronSource.at(tree), allow_untested=True)


def test_known_but_less_tested_version_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "VERSIONS", {VERSION: hooks.Version(False, "", "")})
    with caplog.at_level(logging.WARNING):
        hooks.check()
    assert f"{VERSION}: names and signatures are checked, but" in caplog.text


def test_other_release_of_a_series_is_known(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(tree, INFO, "PATCH = 2", "PATCH = 9")
    with caplog.at_level(logging.WARNING):
        hooks.check(source=MegatronSource.at(tree))
    assert not caplog.text


@pytest.mark.parametrize(
    ("version", "table"),
    [
        ("0.17.1", "0.18.2"),
        ("0.18.0rc0", "0.18.2"),
        ("0.18.9", "0.18.2"),
        ("0.19.1", "0.19.2"),
        ("0.20.0rc1", "0.20.0"),
        ("1.0", "0.20.0"),
    ],
)
def test_unknown_version_is_held_against_the_table_below(version: str, table: str) -> None:
    assert hooks.version_of(version) is hooks.VERSIONS[table]

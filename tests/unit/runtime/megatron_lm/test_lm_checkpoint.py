"""What surrounds Megatron's own save."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_wlb.runtime.saving.resume import plan_settings, tell_changes
from megatron_wlb.settings.command_line import parse


def test_checkpoint_comes_behind_the_figures_of_its_steps() -> None:
    """A run that goes on from it would never write them."""
    from megatron_wlb.runtime.megatron_lm import checkpoint

    done: list[str] = []
    session: Any = SimpleNamespace(
        args=SimpleNamespace(save="ck", ckpt_format="torch"),
        config=SimpleNamespace(wlb=SimpleNamespace(wlb_no_checksums=True)),
        model=SimpleNamespace(groups=SimpleNamespace(dp_cp=None)),
        state=dict,
        catch_up=lambda: done.append("figures"),
    )
    with (
        mock.patch.object(checkpoint, "rng_state", dict),
        mock.patch.object(checkpoint, "of_all_ranks", lambda rng, _: [rng]),
    ):
        checkpoint.Hooks(session).save_checkpoint(lambda _: done.append("checkpoint"), 2)
    assert done == ["figures", "checkpoint"]


@pytest.mark.parametrize(
    ("packing", "told"), [("hold", False), ("hold --wlb-shape on", True), ("slim", True)]
)
def test_other_stages_are_told_where_steps_are_simulated(
    packing: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron_wlb.runtime.megatron_lm.session import Session

    flags = f"--wlb-packing {packing} --pipeline-model-parallel-size 2".split()
    saved = Session(parse(flags), args=Any, formula=Any)  # type: ignore[arg-type]
    now = Session(parse([*flags, "--decoder-last-pipeline-num-layers", "1"]), Any, Any)  # type: ignore[arg-type]
    tell_changes(now.config, plan_settings(saved.config, *saved.compared), None, *now.compared)
    said = "--decoder-last-pipeline-num-layers None there, 1 here"
    assert [said in message for message in caplog.messages] == [True] * told

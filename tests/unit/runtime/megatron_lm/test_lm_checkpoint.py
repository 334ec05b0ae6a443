"""What surrounds Megatron's own save."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.ranks import watchdog
from megatron_wlb.runtime.saving import state_file
from megatron_wlb.runtime.saving.newest import TRACKER, folder_of
from megatron_wlb.runtime.saving.resume import plan_settings, tell_changes
from megatron_wlb.settings.command_line import parse

# What Megatron's training loop says when imported without a GPU's libraries.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_checkpoint_comes_behind_the_figures_of_its_steps() -> None:
    """A run that goes on from it would never write them."""
    from megatron_wlb.runtime.megatron_lm import saved_plans

    session, done = mock.Mock(), mock.Mock()
    session.args = SimpleNamespace(save="ck", ckpt_format="torch")
    session.config.wlb.wlb_no_checksums = True
    session.state = dict
    done.attach_mock(session.catch_up, "figures")
    done.attach_mock(session.runner.compare_reads, "reads")
    done.attach_mock(session.ledger.sync, "ledger")
    with mock.patch.multiple(
        saved_plans, rng_state=dict, of_all_ranks=mock.Mock(), from_first_rank=done.state
    ):
        saved_plans.Hooks(session).save_checkpoint(done.checkpoint, 2)
        names = [name for name, *_ in done.mock_calls]
        assert names == ["figures", "reads", "ledger", "state", "checkpoint"]
        done.checkpoint.side_effect = torch.OutOfMemoryError("CUDA out of memory.")
        with pytest.raises(CheckpointError, match=r"CUDA out of memory.*; leave more of the dev"):
            saved_plans.Hooks(session).save_checkpoint(done.checkpoint, 2)


def test_settings_of_the_checkpoint_to_go_on_from_are_read(tmp_path: Path) -> None:
    """Of the step that Megatron loads; of a damaged one, whose load says so, or without one, there
    are none.
    """
    from megatron_wlb.runtime.megatron_lm import saved_plans

    def saved(root: Path, iteration: int, packing: str) -> Path:
        fields = "planner", "cost", "kernel", "totals", "layout"
        state = dict.fromkeys(fields) | {"settings": {"wlb_packing": packing}}
        state_file.write(folder_of(root, iteration), iteration, state)
        (root / TRACKER).write_text(f"{iteration}\n")
        return folder_of(root, iteration) / state_file.NAME

    def found(**others: Any) -> Any:
        args: Any = SimpleNamespace(
            load=str(tmp_path), finetune=False, ckpt_step=None, non_persistent_ckpt_type=None,
            non_persistent_global_ckpt_dir=None,
        )  # fmt: skip
        vars(args).update(others)
        return saved_plans.newest_settings(args).get("wlb_packing")

    assert found() is found(load=None) is None
    saved(tmp_path, 2, "hold")
    assert found() == "hold"
    newest = saved(tmp_path, 4, "slim")
    saved(tmp_path / "non_persistent", 6, "wlb")
    assert found() == "slim" and found(ckpt_step=2) == "hold"
    assert found(non_persistent_ckpt_type="global") == "wlb"
    assert found(finetune=True) is None
    newest.write_bytes(newest.read_bytes()[:100])
    assert found() is None


@pytest.mark.parametrize(("blocking", "waits"), [(True, True), (False, False)])
def test_watchdog_gives_a_checkpoint_time_that_a_run_waits_for_at_its_end(
    blocking: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_wlb.runtime.megatron_lm import saved_plans

    monkeypatch.setattr(watchdog, "_place", watchdog._Place(0.0, "step 3: its end"))
    given: list[tuple[Any, ...]] = []

    def finalize(*args: Any, **kwargs: Any) -> None:
        given.append((args, kwargs, watchdog._place.is_slow))

    saved_plans.Hooks(mock.Mock()).maybe_finalize_async_save(
        finalize, blocking=blocking, terminate=True
    )
    assert given == [((blocking,), {"terminate": True}, waits)]


LAST: Any = ("decoder-last-pipeline-num-layers", "1")
"""A setting of stages."""


@pytest.mark.parametrize(
    ("packing", "setting", "told"),
    [
        ("hold", LAST, False),
        ("hold --wlb-shape on", LAST, True),
        ("slim", LAST, True),
        ("hold", ("fp8-format", "hybrid"), True),  # which pads to other lengths
    ],
)
def test_settings_of_megatron_are_told_where_plans_depend_on_them(
    packing: str, setting: tuple[str, str], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron_wlb.runtime.megatron_lm.session import Session

    flags, (name, value) = f"--wlb-packing {packing}".split(), setting
    saved, now = (
        Session(parse([*flags, *more]), Any, Any)  # type: ignore[arg-type]
        for more in ([], [f"--{name}", value])
    )
    tell_changes(now.config, plan_settings(saved.config, *saved.compared), {}, *now.compared)
    said = f"--{name} None there, {value} here"
    assert [said in message for message in caplog.messages] == [True] * told

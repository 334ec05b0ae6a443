"""A ``Trainer`` that was saved goes on to the last bit, as it was told, from whole files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import WORKLOAD, Layout

from megatron_wlb.errors import CheckpointError
from megatron_wlb.settings.config import Config

CASES = {
    "pp2 vpp2": Layout("gpt2", 2, pp=2, vpp=2, extra="--hidden-dropout 0.1"),
    "dp2": Layout("llama", 2, dp=2, extra="--use-distributed-optimizer --attention-dropout 0.1"),
    "ep2": Layout("moe-aux", 2, dp=2, extra="--expert-model-parallel-size 2"),
}


def with_folders(config: Config, **folders: str) -> Config:
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **folders))


def train(config: Config, first: int, last: int) -> list[tuple[float, float]]:
    """Losses and norms of steps; what was loaded goes before them, and they are saved."""
    import torch
    from helpers.plans import scatter_for
    from helpers.ranks import build_trainer

    from megatron_wlb.runtime.saving import lock
    from megatron_wlb.runtime.trainer import checkpoint

    size, found = torch.distributed.get_world_size(), []
    try:
        checkpoint.check_folders(config)
        trainer = build_trainer(config, WORKLOAD)
        checkpoint.load(trainer)
        assert trainer.iteration == first
        for number in range(first, last):
            loss, norm, _ = trainer.step(scatter_for(config, WORKLOAD, size, number % 2))
            found.append((loss.mean, norm))
        if config.checkpoint.save is not None:
            checkpoint.save(trainer)
    finally:
        lock.release_all()
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_saved_trainer_goes_on_to_the_last_bit(
    gloo: GlooPool, tmp_path: Path, case: Layout
) -> None:
    folder = str(tmp_path / "ck")
    whole = gloo.run(2, train, case.config, 0, 3)
    first = gloo.run(2, train, with_folders(case.config, save=folder, load=folder), 0, 2)
    rest = gloo.run(2, train, with_folders(case.config, load=folder), 2, 3)
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole
    assert len({whole[0][0], whole[0][1], whole[0][2]}) == 3


def refused(gloo: GlooPool, layout: Layout, said: str, **folders: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        gloo.run(layout.world_size, train, with_folders(layout.config, **folders), 0, 1)


def test_other_settings_and_damage_are_refused(gloo: GlooPool, tmp_path: Path) -> None:
    folder, other = str(tmp_path / "ck"), str(tmp_path / "none")
    case = Layout("llama", 2, dp=2)
    gloo.run(2, train, with_folders(case.config, save=folder), 0, 1)
    refused(gloo, case, f"holds the checkpoints of a run; add --load {folder}", save=folder)
    refused(gloo, case, f"--load {other} does not exist", load=other)
    for changed, said in (
        (dataclasses.replace(case, extra="--lr 0.5"), "other settings: --lr 0.01 there, 0.5 here"),
        (Layout("llama", 2, pp=2), "--pipeline-model-parallel-size 1 there, 2 here"),
        (Layout("llama", 2), "processes 2 there, 1 here"),
    ):
        refused(gloo, changed, said, load=folder)
    (iteration,) = tmp_path.glob("ck/iter_*")
    shard = next(iteration.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    refused(gloo, case, f"{iteration} is damaged: {shard.name} has crc32", load=folder)
    (iteration / "wlb_checksums.txt").unlink()
    refused(gloo, case, "its wlb_checksums.txt is missing", load=folder)


def test_failed_save_leaves_the_checkpoint_before(gloo: GlooPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "ck")
    layout: Any = Layout("llama", 2)
    gloo.run(1, train, with_folders(layout.config, save=folder, load=folder), 0, 1)
    (tmp_path / "ck/iter_0000002").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot save .*iter_0000002"):
        gloo.run(1, train, with_folders(layout.config, save=folder, load=folder), 1, 2)
    assert (tmp_path / "ck/latest_checkpointed_iteration.txt").read_text() == "1\n"

"""The planner's state is read out of a checkpoint, and nothing else of it is made or run."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.saving.checksums import seal_state
from megatron_wlb.runtime.saving.saved_state import newest_state


class Weights:
    """Something whose loading runs code, beside what pickle makes of common containers."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> Any:
        return (Path.touch, (self.touched,), {"a": 1}, iter([1]), iter([("k", OrderedDict(x={3}))]))


def save(folder: Path, name: str, content: Any) -> None:
    path = folder / "iter_0000007" / name
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content))
    (folder / "latest_checkpointed_iteration.txt").write_text("7\n")


@pytest.mark.parametrize("name", ["common.pt", "mp_rank_00_000/model_optim_rng.pt"])
def test_saved_state_is_read_and_no_code_runs(name: str, tmp_path: Path) -> None:
    text = seal_state({"planner": {"step": 7}, "cost": {}})
    save(tmp_path, name, {"model": Weights(tmp_path / "touched"), "megatron_wlb": text})
    assert newest_state(tmp_path) == (7, {"step": 7})
    assert not (tmp_path / "touched").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_state_among_the_weights_is_read_and_no_code_runs(tmp_path: Path) -> None:
    """As megatron-core saves from 0.19 on."""
    import torch
    from torch.distributed import checkpoint

    text = seal_state({"planner": {"step": 7}, "cost": {}})
    state = {"megatron_wlb": text, "model": Weights(tmp_path / "touched")}
    everything = {"a": torch.ones(9), "rng/0": {"b": 1}, "common_state/shard_0_1": [state]}
    folder = tmp_path / "iter_0000007"
    planner = checkpoint.DefaultSavePlanner(flatten_state_dict=False)
    checkpoint.save(everything, checkpoint_id=folder, no_dist=True, planner=planner)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert newest_state(tmp_path) == (7, {"step": 7})
    assert not (tmp_path / "touched").exists()

    (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"\.metadata has no planner's state that can be"):
        newest_state(tmp_path)


def test_folder_without_a_checkpoint_has_no_state(tmp_path: Path) -> None:
    assert newest_state(tmp_path) is None


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "common.pt", {"megatron_wlb": seal_state({"planner": {}})[:-1] + "x"})
    with pytest.raises(CheckpointError, match="has no planner's state that can be read"):
        newest_state(tmp_path)
    (tmp_path / "iter_0000007" / "common.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has none of common\.pt"):
        newest_state(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    with pytest.raises(CheckpointError, match="not an iteration"):
        newest_state(tmp_path)

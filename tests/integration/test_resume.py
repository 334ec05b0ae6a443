"""A run that is killed and started again goes on as if nothing had happened, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_lm_runs import CP2, DP2, EXPERTS, PP2_VPP2, TP2_SP
from trainer_runs import (
    TRACKER,
    Flags,
    Run,
    finish,
    losses,
    num_lines,
    read_metrics,
    start,
    torchrun,
    tracked,
)

from megatron_wlb.runtime.saving.checksums import seal_state, unseal_state

NUM_STEPS = 9
BASE: Flags = {
    "train_iters": NUM_STEPS,
    "global_batch_size": 4,
    "seq_length": 1024,
    "hidden_size": 32,
    "num_layers": 4,
    "hidden_dropout": 0.1,
    "lr": 1e-2,
    # With `hold`, the default: documents of later steps are among the packer's state.
    "wlb_look_ahead": 2,
}
SAVING: Flags = {"save": "checkpoints", "load": "checkpoints", "save_interval": 2}

LAYOUTS: dict[str, Flags] = {
    "pp2-vpp2-hold-bf16": PP2_VPP2 | {"bf16": True},
    # Ranks of unequal lengths draw unequally many random numbers.
    "dp2-wlb": DP2 | {"wlb_packing": "wlb", "attention_dropout": 0.1},
    # Optimizer state is spread over context-parallel ranks too.
    "cp2-hybrid": DP2 | CP2 | {
        "wlb_cp_sharding": "hybrid", "wlb_cp_overlap_groups": 2,
        "group_query_attention": True, "num_query_groups": 2,
    },
    # Experts' biases move at each step, and a rank has half of the experts.
    "dp2-ep2-bf16": DP2 | EXPERTS | {"expert_model_parallel_size": 2, "bf16": True},
    "tp2-sp-original-sgd": TP2_SP | {"wlb_packing": "original", "optimizer": "sgd"},
}  # fmt: skip

Starter = Callable[[Path, int, Flags], Run]


def train(starter: Starter, folder: Path, num_processes: int, flags: Flags) -> dict[int, float]:
    """Losses of a run that nothing interrupts and that saves nothing."""
    finish(starter(folder, num_processes, flags | {"wlb_metrics": folder / "plain"}))
    result = losses(folder / "plain")
    assert list(result) == list(range(1, NUM_STEPS + 1))
    return result


def common_of(folder: Path, iteration: int) -> Path:
    return folder / "checkpoints" / f"iter_{iteration:07d}" / "common.pt"


def saved_planner(folder: Path, iteration: int) -> Any:
    content = torch.load(common_of(folder, iteration), weights_only=False)
    return unseal_state(content["common"]["planner"])["planner"]


def waiting(planner: Any) -> list[list[Any]]:
    """The packer's documents that have not run, in lists that are not empty."""
    return [value for value in planner["packer"].values() if isinstance(value, list) and value]


def go_on(starter: Starter, folder: Path, num_processes: int, flags: Flags) -> dict[int, float]:
    """Starts a killed run again; its losses from the first start on."""
    resumed = tracked(folder / "checkpoints")
    assert resumed, "killed before the first checkpoint: nothing is tested"
    if flags.get("wlb_packing") != "original":
        assert waiting(saved_planner(folder, resumed)), "no document waits: nothing to restore"
    finished = finish(starter(folder, num_processes, flags))
    assert f"resumed after iteration {resumed} from" in finished.output
    return losses(Path(flags["wlb_metrics"]))


def kill_at_random(
    starter: Starter, folder: Path, num_processes: int, flags: Flags, moment: random.Random
) -> None:
    """SIGKILL to all processes somewhere in or after a random step that is not the last one."""
    metrics = Path(flags["wlb_metrics"])
    ran = [line["iteration"] for line in read_metrics(metrics)] if metrics.exists() else []
    more = moment.randint(3, NUM_STEPS - 2 - tracked(folder / "checkpoints"))
    run = starter(folder, num_processes, flags)
    run.wait_until(lambda: num_lines(metrics) >= len(ran) + more)
    run.sleep(moment.uniform(0, 0.1))
    assert run.poll() is None, run.log.read_text()
    run.kill()
    assert max(losses(metrics)) < NUM_STEPS


@pytest.mark.long
def test_resume_under_torchrun_gives_bitwise_equal_losses(tmp_path: Path, corpus: Path) -> None:
    """PP=2, `hold`, dropout; killed twice: once in the middle of a save, once anywhere."""
    flags = BASE | {"data_path": corpus, "pipeline_model_parallel_size": 2}
    expected = train(start, tmp_path, 2, flags)

    flags |= SAVING | {"wlb_metrics": tmp_path / "killed"}
    run = torchrun(tmp_path, 2, flags)
    run.wait_until((tmp_path / "checkpoints" / "iter_0000004").exists)
    run.kill()
    assert tracked(tmp_path / "checkpoints") == 2, "the save was over already"
    kill_at_random(torchrun, tmp_path, 2, flags, random.Random(20))
    assert go_on(torchrun, tmp_path, 2, flags) == expected


@pytest.mark.long
def test_resume_takes_the_kernel_of_the_checkpoint(tmp_path: Path, corpus: Path) -> None:
    flags = BASE | {"data_path": corpus}
    slow: Flags = {"wlb_attention_kernel": "sdpa"}
    expected = train(start, tmp_path, 1, flags | slow)

    flags |= SAVING | {"wlb_metrics": tmp_path / "resumed"}
    finish(start(tmp_path, 1, flags | slow | {"exit_interval": 4}))
    finished = finish(start(tmp_path, 1, flags))
    assert "attention kernel: sdpa in place of torch-cpu, as in the checkpoint" in finished.output
    assert losses(tmp_path / "resumed") == expected


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_resume_gives_bitwise_equal_losses(name: str, tmp_path: Path, corpus: Path) -> None:
    flags = BASE | LAYOUTS[name] | {"data_path": corpus}
    expected = train(start, tmp_path, 2, flags)

    moment = random.Random(name)
    flags |= SAVING | {"wlb_metrics": tmp_path / "killed"}
    kill_at_random(start, tmp_path, 2, flags, moment)
    assert go_on(start, tmp_path, 2, flags) == expected


@pytest.mark.long
def test_resume_after_each_kill_in_a_save_uses_the_checkpoint_before(
    tmp_path: Path, corpus: Path
) -> None:
    """The new folder holds weights each time and must not be taken for a checkpoint."""
    flags = BASE | {"data_path": corpus}
    expected = train(start, tmp_path, 1, flags)

    flags |= SAVING | {"wlb_metrics": tmp_path / "killed"}
    for number in (2, 4):
        run = start(tmp_path, 1, flags)
        folder = tmp_path / "checkpoints" / f"iter_{number:07d}"
        run.wait_until(lambda folder=folder: any(folder.glob("*.distcp")))  # type: ignore[misc]
        run.kill()
        assert tracked(tmp_path / "checkpoints") == number - 2, "the save was over already"
        # As if it had been killed after the last step before this save.
        assert max(losses(tmp_path / "killed")) == number
        if number == 2:  # There is no checkpoint yet: this one starts from scratch.
            finish(start(tmp_path, 1, flags | {"exit_interval": 2}))
    assert go_on(start, tmp_path, 1, flags) == expected


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, Flags]:
    """A folder with a checkpoint after step 4 and the losses of all steps, and the flags."""
    folder = tmp_path_factory.mktemp("stopped")
    flags = BASE | {"data_path": corpus, "save": "checkpoints", "save_interval": 4}
    finish(start(folder, 1, flags | {"wlb_metrics": folder / "all"}))
    (folder / "checkpoints" / TRACKER).write_text("4\n")
    return folder, BASE | {"data_path": corpus, "load": "checkpoints"}


def drop_waiting(planner: Any) -> None:
    for documents in waiting(planner):
        documents.clear()


def skip_document(planner: Any) -> None:
    planner["stream"]["document"] += 1


def nothing(planner: Any) -> None: ...


@pytest.mark.parametrize("tamper", [nothing, drop_waiting, skip_document])
def test_resume_depends_on_the_saved_packing(
    tamper: Callable[[Any], None], stopped: tuple[Path, Flags]
) -> None:
    """Negative control: what is compared above differs if the planner's state is another."""
    folder, flags = stopped
    assert waiting(saved_planner(folder, 4))
    common = common_of(folder, 4)
    original = common.read_bytes()
    content = torch.load(common, weights_only=False)
    planner = unseal_state(content["common"]["planner"])
    tamper(planner["planner"])
    content["common"]["planner"] = seal_state(planner)
    torch.save(content, common)
    metrics = folder / tamper.__name__
    flags = flags | {"wlb_metrics": metrics, "wlb_no_checksums": True}
    try:
        finished = start(folder, 1, flags).wait()
    finally:
        common.write_bytes(original)
    assert finished.code == 0, finished.output
    expected = {k: v for k, v in losses(folder / "all").items() if k > 4}
    assert (losses(metrics) == expected) == (tamper is nothing)

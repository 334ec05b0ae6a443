"""A run of Megatron-LM that is killed goes on as if nothing had happened, to the last bit."""

from __future__ import annotations

import json
import random
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.layouts import some_of
from megatron_lm_runs import (
    BOTH,
    CP2,
    DP2,
    EXPERTS,
    LATENT,
    LAYOUTS,
    PP2,
    SLICES,
    TP2_SP,
    launch,
    logged,
)
from rank_runs import TRACKER, Flags, assert_refused, finish, losses, num_lines, tracked

from megatron_wlb.cli.main import main
from megatron_wlb.errors import CompatibilityError, ConfigError
from megatron_wlb.runtime.saving import state_file

pytestmark = pytest.mark.launcher

NUM_STEPS = 8
SMALL_DEEPSEEK = Path(__file__).parents[2] / "configs" / "small" / "deepseek.yaml"
RUNS: dict[str, tuple[int, Flags]] = {
    "pp2-vpp2-hold-torch_dist": (
        2, LAYOUTS["pp2-vpp2"][1] | {"wlb_packing": "hold", "wlb_look_ahead": 2},
    ),
    # Ranks of unequal lengths draw unequally many random numbers, which Megatron does not save.
    "dp2-wlb-torch": (2, {"wlb_packing": "wlb", "ckpt_format": "torch"}),
    "pp2-fp16-hold-torch_dist": (
        2, LAYOUTS["pp2"][1] | {"wlb_packing": "hold", "fp16": True, "initial_loss_scale": 2**16},
    ),
    "dp2-sharded-bf16-hold-torch_dist": (
        2, LAYOUTS["dp2"][1] | {"wlb_packing": "hold", "bf16": True},
    ),
    "dp2-sgd-torch_dist": (2, {"optimizer": "sgd", "wlb_packing": "hold"}),
    "dp2-fsdp2-sgd-torch_dist": (
        2, {
            "optimizer": "sgd", "wlb_packing": "hold", "use_torch_fsdp2": True,
            "untie_embeddings_and_output_weights": True,
        },
    ),
    # Context-parallel ranks drop other parts of attention, which Megatron does not save either.
    "cp2-hold-torch_dist": (
        2, LAYOUTS["cp2"][1] | {
            "wlb_packing": "hold", "attention_dropout": 0.1, "wlb_cp_sharding": "hybrid",
            "wlb_cp_overlap_groups": 2,
        },
    ),
    "tp2-sp-original-torch_dist": (2, TP2_SP | {"wlb_packing": "original"}),
}  # fmt: skip


KEPT = [name for name in RUNS if not re.search("-sgd|-fp16|cp2-|tp2-", name)]


@pytest.mark.parametrize("name", some_of(RUNS, *KEPT))
def test_resume_gives_bitwise_equal_losses(name: str, tmp_path: Path, corpus: Path) -> None:
    num_processes, layout = RUNS[name]
    flags = BOTH | layout | {"data_path": corpus, "train_iters": NUM_STEPS, "hidden_dropout": 0.1}
    finish(launch(tmp_path, num_processes, flags | {"wlb_metrics": "plain"}))
    expected = losses(tmp_path / "plain")
    assert list(expected) == list(range(1, NUM_STEPS + 1))

    flags |= {"save": "ck", "load": "ck", "save_interval": 2, "wlb_metrics": "killed"}
    metrics = tmp_path / "killed"
    run = launch(tmp_path, num_processes, flags)
    steps = random.Random(name).randint(3, 6)
    run.wait_until(lambda: tracked(tmp_path / "ck") > 0 and num_lines(metrics) >= steps)
    run.kill()
    assert max(losses(metrics)) < NUM_STEPS
    assert 2 <= tracked(tmp_path / "ck") < NUM_STEPS
    finish(launch(tmp_path, num_processes, flags))
    assert losses(metrics) == expected


HELD: Flags = {"wlb_packing": "hold"}
FURTHER: dict[str, tuple[int, Flags]] = {
    # Tied embeddings, over two stages: the last one's copy is saved and loaded once.
    "prediction": (2, BOTH | HELD | PP2 | {"mtp_num_layers": 2}),
    "prediction-slices": (2, BOTH | SLICES | PP2 | {"mtp_num_layers": 2}),
    "latents": (2, BOTH | HELD | CP2 | LATENT),
    # Slices that replicas run alike.
    "experts-slices": (
        4, BOTH | EXPERTS | SLICES | PP2 | DP2
        | {"expert_model_parallel_size": 2, "bf16": True, "wlb_units": None},
    ),
    "fsdp2-tp2-sp": (
        4, BOTH | HELD | TP2_SP | {
            "use_torch_fsdp2": True, "untie_embeddings_and_output_weights": True, "bf16": True,
            "hidden_dropout": 0.1,
        },
    ),
    # Latents, prediction and experts, over EP 2 × PP 2, in bf16.
    "small-deepseek": (
        4, PP2 | DP2 | {
            "wlb_config": SMALL_DEEPSEEK, "log_interval": 1, "global_batch_size": 8,
            "lr_decay_style": "constant", "split": "80,15,5",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", some_of(FURTHER, "prediction-slices", "latents"))
def test_features_go_on_to_the_bit(name: str, tmp_path: Path, corpus: Path) -> None:
    num_processes, flags = FURTHER[name]
    flags = flags | {"data_path": corpus, "train_iters": 4}
    saving: Flags = {"save": "ck", "save_interval": 2, "wlb_metrics": "plain"}
    plain = finish(launch(tmp_path, num_processes, flags | saving))
    again: Flags = {"load": "ck", "ckpt_step": 2, "wlb_metrics": "resumed"}
    resumed = finish(launch(tmp_path, num_processes, flags | again))
    expected = {step: loss for step, loss in losses(tmp_path / "plain").items() if step > 2}
    assert losses(tmp_path / "resumed") == expected and list(expected) == [3, 4]
    for figure in ("seq_load_balancing_loss", "mtp_1 loss"):
        # Megatron counts the first figure of a run in the second again.
        assert logged(resumed, figure)[:1] == logged(plain, figure)[2:3]


def test_resume_takes_the_kernel_of_the_checkpoint(tmp_path: Path, corpus: Path) -> None:
    flags = BOTH | DP2 | {"data_path": corpus, "train_iters": 4, "bf16": True}
    slow: Flags = {"wlb_attention_kernel": "sdpa"}
    finish(launch(tmp_path, 2, flags | slow | {"wlb_metrics": "plain"}))

    flags |= {"save": "ck", "load": "ck", "save_interval": 2, "wlb_metrics": "resumed"}
    finish(launch(tmp_path, 2, flags | slow | {"exit_interval": 2}))
    output = finish(launch(tmp_path, 2, flags)).output
    assert "attention kernel: sdpa in place of torch-cpu, as in the checkpoint" in output
    assert losses(tmp_path / "resumed") == losses(tmp_path / "plain")


def leave_torch_s_adam() -> None:
    """As on a GPU where there is neither TransformerEngine nor Apex."""
    from megatron.core.optimizer import distrib_optimizer

    distrib_optimizer.HAVE_APEX_OR_TE = False


@pytest.mark.parametrize(
    ("flags", "fault", "exit_code", "fragment"),
    [
        ({"ckpt_format": "torch"}, None, ConfigError.exit_code, "cannot load; add"),
        ({"bf16": True}, leave_torch_s_adam, CompatibilityError.exit_code, "nor Apex"),
    ],
    ids=["fp32-torch", "torch-s-adam"],
)
def test_checkpoints_that_could_not_be_loaded_are_refused_at_the_start(
    flags: Flags,
    fault: Callable[[], None] | None,
    exit_code: int,
    fragment: str,
    tmp_path: Path,
    corpus: Path,
) -> None:
    flags |= BOTH | DP2 | {"wlb_packing": "hold", "data_path": corpus, "train_iters": 2}
    flags |= {"save": "ck", "save_interval": 2}
    finished = launch(tmp_path, 2, flags, fault=fault).wait()
    assert_refused(finished, exit_code, "--use-distributed-optimizer", fragment)
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_weights_without_the_optimizer_s_state_need_no_fused_adam(
    ckpt_format: str, tmp_path: Path, corpus: Path
) -> None:
    flags = BOTH | DP2 | {"wlb_packing": "hold", "data_path": corpus, "ckpt_format": ckpt_format}
    flags |= {"save": "ck", "save_interval": 2, "no_save_optim": True, "train_iters": 2}
    finish(launch(tmp_path, 2, flags, fault=leave_torch_s_adam))
    flags |= {"load": "ck", "no_load_optim": True, "train_iters": 3, "wlb_metrics": "metrics"}
    flags |= {"override_opt_param_scheduler": True}
    finish(launch(tmp_path, 2, flags, fault=leave_torch_s_adam))
    assert list(losses(tmp_path / "metrics")) == [3]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, Flags]:
    """A folder with a checkpoint after step 2 of four, the losses of all, and the flags."""
    folder = tmp_path_factory.mktemp("stopped")
    flags = BOTH | HELD | {"data_path": corpus, "train_iters": 4}
    flags |= {"wlb_look_ahead": 2}  # documents of later steps are among the packer's state
    finish(launch(folder, 1, flags | {"save": "ck", "save_interval": 2, "wlb_metrics": "all"}))
    return folder, flags | {"load": "ck", "ckpt_step": 2}


def waiting(planner: Any) -> list[list[Any]]:
    """The packer's documents that have not run, in lists that are not empty."""
    return [value for value in planner["packer"].values() if isinstance(value, list) and value]


def drop_waiting(planner: Any) -> None:
    for documents in waiting(planner):
        documents.clear()


def skip_documents(planner: Any) -> None:
    planner["stream"]["document"] += 4  # one alone may be a long one that waits


def nothing(planner: Any) -> None: ...


@pytest.mark.parametrize("tamper", [nothing, drop_waiting, skip_documents])
def test_resume_depends_on_the_saved_packing(
    tamper: Callable[[Any], None], stopped: tuple[Path, Flags], tmp_path: Path
) -> None:
    """Negative control: what is compared above differs if the planner's state is another."""
    folder, flags = stopped
    shutil.copytree(folder / "ck", tmp_path / "ck")
    checkpoint = tmp_path / "ck" / "iter_0000002"
    state = state_file.state_of(checkpoint)
    assert waiting(state["planner"]), "no document waits: nothing to restore"
    tamper(state["planner"])
    state_file.write(checkpoint, 2, state)
    flags = flags | {"wlb_metrics": "resumed", "wlb_no_checksums": True}
    finish(launch(tmp_path, 1, flags))
    expected = {step: loss for step, loss in losses(folder / "all").items() if step > 2}
    assert (losses(tmp_path / "resumed") == expected) == (tamper is nothing)


def save_as_before() -> None:
    """The planner's state goes inside Megatron's own files, as releases before saved it."""
    from megatron_wlb.runtime.megatron_lm import saved_plans

    states: list[dict[str, Any]] = []
    state_file.write = lambda _folder, _iteration, state: states.append(state)
    hooks = saved_plans.Hooks
    generate = hooks.generate_state_dict

    def generate_as_before(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = generate(self, *args, **kwargs)
        if self._saving is not None:
            state = json.dumps({"version": 1, **self.session.state(), "checksums": False})
            found["megatron_wlb"] = f"crc32 {zlib.crc32(state.encode()):08x}\n{state}"
        return found

    hooks.generate_state_dict = generate_as_before  # type: ignore[method-assign]


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_checkpoint_of_before_the_state_file_goes_on_to_the_bit_and_is_told_once(
    ckpt_format: str, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = BOTH | DP2 | {"data_path": corpus, "train_iters": 4, "ckpt_format": ckpt_format}
    flags |= {"bf16": True, "save": "ck", "save_interval": 2, "wlb_metrics": "plain"}
    finish(launch(tmp_path, 2, flags | HELD, fault=save_as_before))
    assert not [*tmp_path.rglob(state_file.NAME)]
    assert main(["audit", str(tmp_path / "ck")]) == 0
    capsys.readouterr()
    (tmp_path / "ck" / TRACKER).write_text("2")
    again: Flags = {"load": "ck", "wlb_metrics": "resumed", "wlb_packing": "auto"}
    output = finish(launch(tmp_path, 2, flags | {"save": None} | again)).output
    assert output.count("where the next release does not look") == 1
    expected = {step: loss for step, loss in losses(tmp_path / "plain").items() if step > 2}
    assert losses(tmp_path / "resumed") == expected and list(expected) == [3, 4]

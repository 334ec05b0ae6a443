"""Megatron's own loop on plans: what it logs, saves and refuses, and that it is left alone without
our flags.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.texts import write_texts
from megatron_lm_runs import (
    BOTH,
    MEGATRON_LM,
    PP2,
    PP2_VPP2,
    SCRIPT,
    install_and_uninstall,
    launch,
    logged,
    run_without_launcher,
    validations,
)
from rank_runs import (
    Finished,
    Flags,
    assert_refused,
    command_line,
    finish,
    losses,
    read_metrics,
    spawn,
    start,
    tracked,
)

from megatron_wlb.errors import CheckpointError

pytestmark = pytest.mark.launcher

ROUNDING = 1e-6
"""Relative, of losses: fp32 sums of a thousand token losses, summed in another order. Up to 1e-7 is
seen; two documents exchanged between steps make 1e-3."""
NUM_STEPS = 12
SAVED = 2
"""How often it saves."""


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two corpora of short and long documents, 41,000 and 13,000 bytes."""
    folder = tmp_path_factory.mktemp("texts")
    return [write_texts(folder / "a"), write_texts(folder / "b", 100, seed=12)]


@pytest.fixture(scope="session")
def one_process(
    tmp_path_factory: pytest.TempPathFactory, texts: list[Path]
) -> tuple[Path, Finished]:
    """A run of one process with `hold` that saves, evaluates and logs; its folder and output."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "ck").mkdir()  # progress.txt is written there before the first save
    flags = holding(texts) | {"save": "ck", "save_interval": SAVED, "log_progress": True}
    flags |= {"eval_interval": 4, "eval_iters": 2, "tensorboard_dir": "board", "seed": 7}
    flags |= {"wlb_metrics": "metrics", "log_throughput": True, "log_timers_to_tensorboard": True}
    return folder, finish(launch(folder, 1, flags | {"tensorboard_log_interval": 1}))


def holding(texts: list[Path]) -> Flags:
    return BOTH | {"data_path": texts[0], "train_iters": NUM_STEPS, "wlb_packing": "hold"}


def test_fp16_trains_as_fp32_and_skips_steps_as_megatron_does(
    texts: list[Path], tmp_path: Path
) -> None:
    """A scale is for a mean over tokens: as Megatron's, it is too large from about 2^30 on."""
    flags = holding(texts) | {"seed": 7, "train_iters": 4, "wlb_packing": "slim"} | PP2
    finish(launch(tmp_path, 2, flags | {"wlb_metrics": "fp32"}))
    expected = losses(tmp_path / "fp32")
    half = flags | {"fp16": True, "hysteresis": 1}
    small = finish(
        launch(tmp_path, 2, half | {"initial_loss_scale": 2**16, "wlb_metrics": "small"})
    )
    assert losses(tmp_path / "small") == pytest.approx(expected, rel=2e-3)
    assert logged(small, "number of skipped iterations") == ["0"] * 4
    scale = 2.0**16 / 1024  # of 8 windows of 128 tokens
    assert [float(s) for s in logged(small, "loss scale")] == [scale] * 4
    large = finish(
        launch(tmp_path, 2, half | {"initial_loss_scale": 2**40, "wlb_metrics": "large"})
    )
    assert "0" not in logged(large, "number of skipped iterations")
    untrained = losses(tmp_path / "large")
    assert untrained[1] == losses(tmp_path / "small")[1]
    assert untrained[4] > 1.01 * expected[4]


def test_evaluations_are_of_the_same_documents(
    one_process: tuple[Path, Finished], texts: list[Path], tmp_path: Path
) -> None:
    found = [float(loss) for loss in validations(one_process[1])]
    assert len(found) == 5  # after 4, 8 and 12 steps, and of both splits at the end
    assert found[2] == found[3] < found[1] < found[0]
    assert "on test set" in one_process[1].output
    flags = holding(texts) | {"eval_iters": 2, "skip_train": True, "seed": 7}
    flags |= {"load": one_process[0] / "ck", "ckpt_step": 8}
    alone = finish(launch(tmp_path, 1, flags))
    assert float(validations(alone)[0]) == pytest.approx(found[1], rel=ROUNDING)


def test_tensorboard_and_progress_log_show_the_packing(
    one_process: tuple[Path, Finished],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, finished = one_process
    board = EventAccumulator(str(folder / "board"))
    board.Reload()
    metrics: list[dict[str, Any]] = list(read_metrics(folder / "metrics"))
    for name in (
        "tokens", "padding", "imbalance", "delay_steps", "waiting_documents", "waiting_tokens",
        "plan_wait_ms", "step_ms", "tflops_per_device",
    ):  # fmt: skip
        shown = [event.value for event in board.Scalars(f"wlb/{name}")]
        assert shown == pytest.approx([line[name] for line in metrics], rel=1e-6), name
    assert [event.step for event in board.Scalars("lm loss")] == list(range(1, NUM_STEPS + 1))
    assert finished.output.count(" wlb hold | tokens: ") == NUM_STEPS
    # A CPU is no H100, which is the hardware if none is named.
    assert not {"predicted_ms", "mfu"} & set(metrics[0])
    assert not re.search("MFU|predicted [0-9]", finished.output)

    lines = (folder / "ck" / "progress.txt").read_text().splitlines()
    ours = [line for line in lines if "Workload balance" in line]
    assert len(ours) == NUM_STEPS // SAVED
    assert f"Tokens trained: {sum(line['tokens'] for line in metrics)}\t" in ours[-1]


def stand_in_for_wandb() -> None:
    """Megatron's W&B writer, which is the module itself, prints what it is told."""
    from megatron.training import global_vars

    class Wandb:
        config = SimpleNamespace(update=lambda values: None)

        def log(self, values: dict[str, Any], step: int) -> None:
            numbers = {name: float(value) for name, value in values.items()}
            sys.stdout.write(f"\nwandb {json.dumps([step, numbers])}\n")

        def finish(self) -> None: ...

    def set_writer(_args: Any) -> None:
        global_vars._GLOBAL_WANDB_WRITER = Wandb()

    global_vars._set_wandb_writer = set_writer


def test_wandb_gets_the_figures_of_each_step(texts: list[Path], tmp_path: Path) -> None:
    flags = holding(texts) | {"train_iters": 3, "wlb_metrics": "metrics"}
    flags |= {"tensorboard_log_interval": 1, "wlb_hardware": "cpu"}
    finished = finish(launch(tmp_path, 1, flags, fault=stand_in_for_wandb))
    line = r", predicted \S+ \(.*original \S+ ×\) \| .* \| MFU \(of cpu\): "
    assert len(re.findall(line, finished.output)) == 3
    said = re.findall(r"^wandb (.*)$", finished.output, re.MULTILINE)
    shown = {step: values for step, values in map(json.loads, said) if "wlb/imbalance" in values}
    assert list(shown) == [1, 2, 3]
    for line in read_metrics(tmp_path / "metrics"):
        values = shown[line["iteration"]]
        for name in ("imbalance", "tokens", "delay_steps", "predicted_ms", "mfu",
                     "predicted_original_ms"):  # fmt: skip
            assert values[f"wlb/{name}"] == line[name]


def test_install_happens_once_and_uninstall_restores_every_name(tmp_path: Path) -> None:
    finish(start(tmp_path, 1, {}, program=install_and_uninstall))


def repair_the_mode_that_runs_steps_twice() -> None:
    """Megatron has two names for it, one in the flag; and its report raises."""
    from megatron.core import rerun_state_machine as rerun

    mode, iterator = rerun.RerunMode.REPORT_DETERMINISM_STATS, rerun.RerunDataIterator
    rerun.RerunMode._value2member_map_["report_stats"] = mode
    rerun.RerunStateMachine._maybe_report_stats = lambda self: None
    rewind = iterator.rewind

    def rewind_and_say(self: Any) -> None:
        sys.stdout.write("rewound\n")
        rewind(self)

    iterator.rewind = rewind_and_say


def test_a_step_that_runs_again_gets_the_same_plan(texts: list[Path], tmp_path: Path) -> None:
    """Megatron's rerun machinery, told to run every step twice, leaves queues and losses alone."""
    flags = holding(texts) | PP2_VPP2 | {"train_iters": 4}
    finish(launch(tmp_path, 2, flags | {"wlb_metrics": "once"}))
    again = flags | {"rerun_mode": "report_stats", "wlb_metrics": "twice"}
    fault = repair_the_mode_that_runs_steps_twice
    finished = finish(launch(tmp_path, 2, again, fault=fault))
    assert finished.output.count("rewound") >= 4
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")


def test_the_command_under_torchrun_trains_as_forked_ranks_do(
    one_process: tuple[Path, Finished], texts: list[Path], tmp_path: Path
) -> None:
    """The whole command line, in processes of its own; it saves in a worker process."""
    flags = MEGATRON_LM | holding(texts) | {"seed": 7, "exit_interval": 2, "wlb_metrics": "metrics"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m"]
    command += ["megatron_wlb.launch", *filter(None, [SCRIPT])]
    command += command_line(flags | {"save": "ck", "save_interval": 2})
    finish(spawn(tmp_path, command))
    expected = losses(one_process[0] / "metrics")
    assert losses(tmp_path / "metrics") == {step: expected[step] for step in (1, 2)}
    assert tracked(tmp_path / "ck") == 2


STOCK: Flags = {"train_iters": 3, "eval_interval": 2, "eval_iters": 1, "num_workers": 0}


def test_without_our_flags_the_script_trains_as_alone(texts: list[Path], tmp_path: Path) -> None:
    """Megatron's own packing, to every digit that it writes; `--wlb-device` asks for no plans."""
    flags = BOTH | PP2 | STOCK | {"data_path": texts[0], "data_cache_path": "cache"}
    alone = finish(run_without_launcher(tmp_path, 2, flags))
    launched = finish(launch(tmp_path, 2, flags | {"wlb_device": "cpu"}))
    for figure in ("lm loss", "grad norm", "learning rate"):
        assert len(logged(alone, figure)) == 3
        assert logged(launched, figure) == logged(alone, figure)
    assert len(validations(alone)) >= 3
    assert validations(launched) == validations(alone)
    # Warnings name files, and a clone's folder is called megatron-wlb.
    said = launched.output.replace(str(Path(__file__).parents[2]), "").replace(sys.prefix, "")
    assert "wlb" not in said.replace(str(SCRIPT), "")


PER_SPLIT: Flags = BOTH | {"train_iters": 2, "split": None, "eval_interval": 2, "eval_iters": 1}


def test_paths_per_split_train_and_evaluate_those(texts: list[Path], tmp_path: Path) -> None:
    """Training on one corpus alone is training on its whole split of 100 %."""
    flags = PER_SPLIT | {"wlb_packing": "hold", "valid_data_path": texts[1]}
    flags |= {"test_data_path": texts[1], "wlb_metrics": "split", "train_data_path": texts[0]}
    split = finish(launch(tmp_path, 1, flags))
    flags = BOTH | {"train_iters": 2, "data_path": texts[0], "split": "1", "wlb_packing": "hold"}
    finish(launch(tmp_path, 1, flags | {"wlb_metrics": "whole"}))
    assert losses(tmp_path / "split") == losses(tmp_path / "whole")
    assert len(validations(split)) == 3


OTHER_RUNS: dict[str, tuple[Flags, list[str]]] = {
    "n": ({"global_batch_size": 4}, ["8", "4", "resume with"]),
    "packing": ({"wlb_packing": "wlb"}, ["hold", "wlb"]),
    # Megatron would end in an assertion that counts samples.
    "longer": (
        {"train_iters": NUM_STEPS + 2, "override_opt_param_scheduler": False},
        [": --train-iters 12 there, 14 here; give --override-opt-param-scheduler"],
    ),
}


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_resume_of_another_run_is_one_line(
    name: str, one_process: tuple[Path, Finished], texts: list[Path], tmp_path: Path
) -> None:
    changed, fragments = OTHER_RUNS[name]
    flags = holding(texts) | {"load": one_process[0] / "ck", "seed": 7}
    flags |= {"override_opt_param_scheduler": True}
    finished = launch(tmp_path, 1, flags | changed).wait()
    assert_refused(finished, CheckpointError.exit_code, *fragments)


def test_resume_of_a_stock_checkpoint_is_one_line_and_its_weights_can_be_used(
    texts: list[Path], tmp_path: Path
) -> None:
    flags = BOTH | {"data_path": texts[0], "train_iters": 2, "data_cache_path": "cache"}
    finish(run_without_launcher(tmp_path, 1, flags | {"save": "ck", "save_interval": 2}))
    flags |= {"load": "ck", "wlb_packing": "hold"}
    finished = launch(tmp_path, 1, flags).wait()
    assert_refused(finished, CheckpointError.exit_code, "no packing state", "--finetune")
    finished = finish(launch(tmp_path, 1, flags | {"finetune": True, "wlb_metrics": "metrics"}))
    assert finished.output.count("are not verified: it has no wlb_checksums.txt") == 1
    assert list(losses(tmp_path / "metrics")) == [1, 2]


def test_stock_megatron_goes_on_from_a_checkpoint_of_ours(
    texts: list[Path], tmp_path: Path
) -> None:
    """Weights, optimizer, schedule and the number of steps; its documents are Megatron's own."""
    flags = BOTH | {"data_path": texts[0], "data_cache_path": "cache", "save": "ck"}
    flags |= {"train_iters": 6, "save_interval": 4, "lr_decay_style": "linear", "exit_interval": 4}
    ours = finish(launch(tmp_path, 1, flags | {"wlb_packing": "slim"}))
    flags |= {"load": "ck", "exit_interval": None, "eval_iters": 0}
    stock = finish(run_without_launcher(tmp_path, 1, flags))
    rates = logged(stock, "learning rate")
    assert len(rates) == 2 and float(rates[0]) < float(logged(ours, "learning rate")[-1])
    assert float(logged(stock, "lm loss")[0]) < float(logged(ours, "lm loss")[0])

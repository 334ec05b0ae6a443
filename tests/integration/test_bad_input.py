"""Whatever is wrong, a run ends soon, with one line that says what, and with no traceback."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.layouts import further
from trainer_runs import TINY, Finished, Flags, assert_refused, spawn, start, torchrun

from megatron_wlb.errors import CheckpointError, ConfigError, CorpusError

PP2: Flags = {"pipeline_model_parallel_size": 2}
DP2: Flags = {}
TP2: Flags = {"tensor_model_parallel_size": 2}

CONFIG: dict[str, tuple[int, Flags, list[str]]] = {
    # Name: processes, flags, what the line must hold: value, limit, remedy.
    "window-1": (1, {"seq_length": 1}, ["--seq-length is 1", "at least 2"]),
    "window-text": (1, {"seq_length": "8k"}, ["--seq-length", "'8k'", "int"]),
    "s-max-below-window": (
        1,
        {"wlb_max_tokens": 255},
        ["--wlb-max-tokens is 255", "--seq-length 256", "use at least the window"],
    ),
    "heads-by-tp": (
        2,
        TP2 | {"num_attention_heads": 1},
        ["--num-attention-heads is 1", "TP 2", "multiple of 2"],
    ),
    "layers-by-pp": (2, PP2 | {"num_layers": 3}, ["--num-layers is 3", "PP 2", "multiple of 2"]),
    "layers-by-pp-and-vpp": (
        2,
        PP2 | {"num_layers": 6, "num_virtual_stages_per_pipeline_rank": 2},
        ["--num-layers is 6", "VPP 2", "multiple of 4"],
    ),
    "gbs-by-dp": (2, {"global_batch_size": 3}, ["--global-batch-size is 3", "DP 2", "multiple"]),
    "world-size": (3, PP2, ["3 processes", "PP 2", "multiple of 2"]),
    "world-too-small": (1, PP2 | TP2, ["1 processes", "= 4", "multiple of 4"]),
    "stages-beyond-layers": (
        8,
        {"pipeline_model_parallel_size": 8},
        ["--pipeline-model-parallel-size is 8", "only 4 layers", "at most 4"],
    ),
    "vpp-without-pp": (
        1,
        {"num_virtual_stages_per_pipeline_rank": 2},
        ["--num-virtual-stages-per-pipeline-rank is 2", "no pipeline", "leave it out"],
    ),
    "micro-batch-size": (1, {"micro_batch_size": 0}, ["--micro-batch-size is 0", "at least 1"]),
    "rampup-batch-size": (
        1,
        {"rampup_batch_size": [2, 2, 100]},
        ["--rampup-batch-size", "is for the launcher", "leave it out"],
    ),
    "fp8": (1, {"fp8_format": "e4m3"}, ["--fp8-format is e4m3", "for the launcher"]),
    "attention-dropout": (1, {"attention_dropout": 1.0}, ["is 1.0", "[0, 1)"]),
    "context-parallel": (
        3,
        {"context_parallel_size": 2},
        ["3 processes", "TP 1 × CP 2 × PP 1 = 2", "start a multiple of 2"],
    ),
    "no-gpu": (1, {"wlb_device": "cuda"}, ["--wlb-device is cuda", "no GPU", "--wlb-device cpu"]),
    "nccl-on-cpu": (1, {"distributed_backend": "nccl"}, ["nccl", "needs GPUs", "use gloo"]),
    "mistyped-flag": (1, {"seq_lenght": 256}, ["--seq-lenght", "did you mean --seq-length?"]),
    "unknown-flag": (1, {"qqqq": True}, ["unknown flag --qqqq", "--help"]),
    "megatron-flag": (1, {"fp16": True}, ["--fp16 is a Megatron flag", "leave it out"]),
    "choice": (1, {"wlb_packing": "best"}, ["--wlb-packing", "'best'", "hold"]),
    "save-interval-0": (1, {"save": "x", "save_interval": 0}, ["--save-interval is 0", "least 1"]),
    "log-interval-0": (1, {"log_interval": 0}, ["--log-interval is 0", "at least 1"]),
    "exit-interval-0": (1, {"exit_interval": 0}, ["--exit-interval is 0", "at least 1"]),
    "no-such-cost": (1, {"wlb_cost": "none.json"}, ["--wlb-cost none.json", "give the path"]),
    "no-such-config": (1, {"wlb_config": "none.yaml"}, ["--wlb-config none.yaml", "No such file"]),
    "queue-thresholds": (
        1,
        {"wlb_packing": "wlb", "wlb_queue_thresholds": [200, 100]},
        ["[200, 100]", "ascending", "order them"],
    ),
    "tau": (1, {"wlb_hold_tau": 0}, ["tau is 0", "perfect balance"]),
    "lr-nan": (1, {"lr": "nan"}, ["--lr", "nan is not finite"]),
    "min-lr": (1, {"min_lr": 1.0}, ["--min-lr is 1.0", "up to --lr"]),
    "warmup": (1, {"lr_warmup_iters": 4}, ["--lr-warmup-iters is 4", "after 4 steps", "fewer"]),
    "seed": (1, {"seed": 2**40}, [f"--seed is {2**40}", "4294967296"]),
    "weight-decay": (1, {"weight_decay": -1.0}, ["--weight-decay is -1.0", "[0, inf)"]),
    "sharded-sgd": (
        1,
        {"optimizer": "sgd", "use_distributed_optimizer": True},
        ["--use-distributed-optimizer", "sgd", "leave one"],
    ),
    "split": (1, {"split": "train"}, ["'train'", "weights", "99,1,0"]),
}


@pytest.mark.parametrize("name", CONFIG)
def test_bad_setting_is_one_line(name: str, tmp_path: Path, corpus: Path) -> None:
    num_processes, flags, fragments = CONFIG[name]
    finished = start(tmp_path, num_processes, TINY | {"data_path": corpus} | flags).wait()
    assert_refused(finished, ConfigError.exit_code, *fragments)


def copy_corpus(corpus: Path, folder: Path, suffixes: str = ".bin .idx .json") -> Path:
    for suffix in suffixes.split():
        shutil.copy(f"{corpus}{suffix}", folder / f"copy{suffix}")
    return folder / "copy"


def truncate(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def cut_bin(prefix: Path) -> None:
    truncate(Path(f"{prefix}.bin"), 1000)


def cut_index(prefix: Path) -> None:
    truncate(Path(f"{prefix}.idx"), 100)


def garble_index(prefix: Path) -> None:
    Path(f"{prefix}.idx").write_bytes(b"GIF89a" + bytes(200))


def remove_index(prefix: Path) -> None:
    Path(f"{prefix}.idx").unlink()


def remove_note(prefix: Path) -> None:
    Path(f"{prefix}.json").unlink()


CORPORA: dict[str, tuple[Callable[[Path], None], int, list[str]]] = {
    "missing": (remove_index, CorpusError.exit_code, ["copy.idx", "wlb corpus build"]),
    "corrupt-index": (garble_index, CorpusError.exit_code, ["copy.idx", "GIF89a", "build"]),
    "truncated-index": (cut_index, CorpusError.exit_code, ["truncated", "100 bytes", "build"]),
    "truncated-bin": (cut_bin, CorpusError.exit_code, ["copy.bin", "has 1000", "build"]),
    "no-vocabulary": (remove_note, ConfigError.exit_code, ["copy.json", "--vocab-size"]),
}


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("num_processes", [further(1), 2])
def test_bad_corpus_is_one_line(
    name: str, num_processes: int, tmp_path: Path, corpus: Path
) -> None:
    damage, exit_code, fragments = CORPORA[name]
    prefix = copy_corpus(corpus, tmp_path)
    damage(prefix)
    finished = start(tmp_path, num_processes, TINY | {"data_path": prefix}).wait()
    assert_refused(finished, exit_code, *fragments)


def test_corpus_left_out_is_one_line(tmp_path: Path) -> None:
    finished = start(tmp_path, 1, TINY).wait()
    assert_refused(finished, ConfigError.exit_code, "--data-path is missing", "wlb corpus build")


def test_empty_validation_split_is_refused_before_training(tmp_path: Path, corpus: Path) -> None:
    flags = TINY | {"data_path": corpus, "split": "1", "eval_interval": 4}
    finished = start(tmp_path, 1, flags).wait()
    assert_refused(finished, CorpusError.exit_code, "no documents", "another --split")
    assert "iteration" not in finished.output


def test_empty_folder_makes_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "megatron_wlb.cli.main", "corpus", "build", "empty"]
    finished = spawn(tmp_path, [*command, "--out", "corpus"]).wait()
    assert_refused(finished, CorpusError.exit_code, "empty")
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".log"] == ["empty"]


def test_start_without_torchrun_is_one_line(tmp_path: Path, corpus: Path) -> None:
    flags = ["--data-path", str(corpus)]
    finished = spawn(tmp_path, [sys.executable, "-m", "megatron_wlb.pretrain_gpt", *flags]).wait()
    assert_refused(finished, ConfigError.exit_code, "RANK is not set", "torchrun --nproc-per-node")


@pytest.mark.parametrize("layout", [PP2, further(DP2)], ids=["pp2", "dp2"])
def test_token_beyond_the_vocabulary_is_one_line_under_torchrun(
    layout: Flags, tmp_path: Path, corpus: Path
) -> None:
    """One rank meets it in the middle of a step; the other loses its peer and must keep quiet."""
    run = torchrun(tmp_path, 2, TINY | layout | {"data_path": corpus, "vocab_size": 100})
    finished = run.wait()
    ours = finished.output.split("torch/distributed/elastic")[0]  # torchrun's report follows
    assert_refused(Finished(finished.code, ours), None, "vocabulary has 100", "--vocab-size")
    assert "[rank" not in finished.output


@pytest.mark.parametrize("flag", ["save", "wlb-metrics", "tensorboard-dir"])
@pytest.mark.parametrize("place", ["file/below", "/proc/none/below"])
def test_unwritable_output_is_refused_before_training(
    flag: str, place: str, tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    finished = start(tmp_path, 2, TINY | PP2 | {"data_path": corpus, flag: place}).wait()
    assert_refused(finished, CheckpointError.exit_code, f"--{flag} {place}", "choose another")
    assert "iteration" not in finished.output


def test_full_disk_under_the_metrics_ends_with_one_line(tmp_path: Path, corpus: Path) -> None:
    finished = start(tmp_path, 1, TINY | {"data_path": corpus, "wlb_metrics": "/dev/full"}).wait()
    assert_refused(finished, CheckpointError.exit_code, "--wlb-metrics", "No space left", "room")

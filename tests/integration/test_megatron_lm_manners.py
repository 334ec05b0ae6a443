"""The launcher's manners: what it refuses, warns of and explains."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_lm_runs import BOTH, SCRIPT, launch, logged
from rank_runs import ROOT, Flags, assert_refused, finish, losses

from megatron_wlb.errors import CheckpointError, CompatibilityError, ConfigError
from megatron_wlb.runtime.compat.hooks import version_of
from megatron_wlb.runtime.compat.source import MegatronSource

pytestmark = pytest.mark.launcher

REFUSED: dict[str, tuple[Flags, int, list[str]]] = {
    "cpu": (
        {"no_rope_fusion": None, "distributed_backend": None},
        ConfigError.exit_code,
        ["without a GPU", "add --distributed-backend gloo --no-rope-fusion"],
    ),
    "cpu-alone": (
        {"no_rope_fusion": None, "wlb_packing": None, "wlb_device": "cpu"},
        ConfigError.exit_code,
        ["without a GPU", "add --no-rope-fusion"],
    ),
    "fp4": (
        {"fp4_format": "e2m1", "bf16": True},
        ConfigError.exit_code,
        ["--fp4-format e2m1 does not work", "use --fp8-format"],
    ),
    "mistyped": (
        {"num_layer": 4},
        ConfigError.exit_code,
        ["unknown flag --num-layer; did you mean --num-layers?"],
    ),
    "other-version": (  # plans do not run with it in any
        {"sequence_packing_scheduler": "dp_balanced"},
        ConfigError.exit_code,
        ["--sequence-packing-scheduler", "does not work with --wlb-packing: it chooses which"],
    ),
    "value": ({"num_layers": "four"}, ConfigError.exit_code, ["--num-layers", "'four'"]),
    "assertion": (
        {"save": "ck", "save_interval": None},
        ConfigError.exit_code,
        ["Megatron-LM refuses the arguments: assert args.save_interval is not None; correct"],
    ),
    "tokenizer": (
        {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "nowhere"},
        ConfigError.exit_code,
        ["Megatron-LM refuses the arguments: ", "; correct"],
    ),
    "hardware": (
        {"wlb_hardware": "none.yaml"},
        ConfigError.exit_code,
        ["--wlb-hardware", "none.yaml", "wlb profile"],
    ),
    "cost": (
        {"wlb_cost": "none.json"},
        ConfigError.exit_code,
        ["--wlb-cost none.json", "give the path"],
    ),
    "tau": (
        {"wlb_hold_tau": 0},
        ConfigError.exit_code,
        ["--wlb-hold-tau is 0.0", "give a number in [1, inf)"],
    ),
    "kernel": (
        {"wlb_attention_kernel": "flash-attn-2"},
        CompatibilityError.exit_code,
        ["--wlb-attention-kernel flash-attn-2 cannot run", "it needs a GPU", "leave it at"],
    ),
    "no-validation": (
        {"split": "1", "eval_iters": 1},
        ConfigError.exit_code,
        ["--eval-iters is 1", "no documents", "--split"],
    ),
    "train-iters": ({"train_iters": -1}, ConfigError.exit_code, ["--train-iters -1", "1 or more"]),
    "load": (
        {"load": "nowhere", "save": "ck"},
        CheckpointError.exit_code,
        ["--load nowhere does not exist", "give the folder of a --save"],
    ),
    "load-file": (
        {"load": __file__},
        CheckpointError.exit_code,
        [f"{Path(__file__).name} is not a folder", "--save"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_new_user_mistypes_is_one_line(name: str, corpus: Path, tmp_path: Path) -> None:
    flags, exit_code, fragments = REFUSED[name]
    base = BOTH | {"data_path": corpus, "train_iters": 1, "wlb_packing": "hold"}
    finished = launch(tmp_path, 1, base | flags)
    ended = finished.wait()
    assert_refused(ended, exit_code, *fragments)
    assert "usage:" not in ended.output
    if name not in ("no-validation", "kernel"):  # which take the corpora to know
        assert "> initializ" not in ended.output, "a process group was made before"


def test_all_refusals_are_told_in_one_run(corpus: Path, tmp_path: Path) -> None:
    flags = BOTH | {"data_path": corpus, "wlb_packing": "hold", "train_iters": 1}
    flags |= {"fp4_format": "e2m1", "bf16": True, "no_rope_fusion": None, "qk_clip": True}
    ended = launch(tmp_path, 1, flags | {"eval_interval": None}).wait()
    assert ended.code == ConfigError.exit_code
    told = [line.split()[1] for line in ended.errors]
    assert told == ["--qk-clip", "--fp4-format", "--eval-interval", "without"]


def test_a_script_with_a_loss_or_data_of_its_own_is_refused(corpus: Path, tmp_path: Path) -> None:
    """The untouched script runs in all other tests."""
    text = Path(SCRIPT or ROOT / "megatron_wlb" / "pretrain_gpt.py").read_text()
    for losses_of, own in (
        ("torch.sum(losses * loss_mask)", "torch.sum(losses**2 * loss_mask)"),
        ("losses.view(-1).float() * mask", "losses.view(-1).float() ** 2 * mask"),
        ("dataset_type = GPTFIMDataset", "dataset_type = GPTDataset"),
    ):
        text = text.replace(losses_of, own)
    script = tmp_path / "my_pretrain.py"
    script.write_text(text)
    flags = BOTH | {"data_path": corpus, "wlb_packing": "hold", "train_iters": 1}
    ended = launch(tmp_path, 1, flags, script=script).wait()
    if not version_of(MegatronSource.installed().version).tested:  # it may bring another script
        assert ended.code == 0, ended.output
        assert ended.output.count("unedited script") == 2
        return
    assert ended.code == ConfigError.exit_code, ended.output
    for line, what in zip(ended.errors, ("forward step or loss", "data sets"), strict=True):
        assert line.startswith(f"error: {script} has {what} of its own (")
        assert "unedited script" in line
        assert line.endswith("or leave out the --wlb flags")
        assert ("--wlb-loss FILE.py" in line) == (what == "forward step or loss")
    assert "> initializ" not in ended.output, "a process group was made before"
    assert "Traceback" not in ended.output


def test_a_resumed_run_explains_megatrons_second_loss(corpus: Path, tmp_path: Path) -> None:
    """With flags that have no effect, and memory shown where there is no GPU."""
    flags = BOTH | {"data_path": corpus, "wlb_packing": "hold", "train_iters": 4}
    flags |= {"save": "ck", "load": "ck", "save_interval": 2, "exit_interval": 2}
    flags |= {"wlb_metrics": "metrics"}
    flags |= {"reset_position_ids": True, "reset_attention_mask": True}
    flags |= {"dataloader_type": "cyclic", "log_memory_to_tensorboard": True}
    flags |= {"tensorboard_dir": "board", "tensorboard_log_interval": 1}
    first = finish(launch(tmp_path, 1, flags))
    for flag in ("--reset-position-ids", "--reset-attention-mask", "--dataloader-type cyclic"):
        assert first.output.count(f"{flag} has no effect with --wlb-packing: ") == 1
    explanation = "counts the first step after the resume again"
    assert explanation not in first.output
    second = finish(launch(tmp_path, 1, flags))
    assert second.output.count(explanation) == 1
    own = losses(tmp_path / "metrics")
    shown = [float(loss) for loss in logged(second, "lm loss")]
    assert shown == pytest.approx([own[3], (own[3] + own[4]) / 2], rel=1e-6)
    assert own[3] != pytest.approx(own[4], rel=1e-4)

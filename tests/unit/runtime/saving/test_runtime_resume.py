"""What a resumed run is told: settings that may change, and a machine that was measured anew."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_wlb.cost.hardware import read_hardware
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.saving.resume import (
    changed_settings,
    differences,
    file_digests,
    missing_load,
    plan_settings,
    require_same_tokens,
    tell_changes,
)
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config


def settings(*flags: str) -> Config:
    return parse(" ".join(flags).split())


def as_saved(config: Config) -> dict[str, object]:
    saved: dict[str, object] = json.loads(json.dumps(config.flat()))
    return saved


def test_differences_name_flags_and_both_values() -> None:
    saved = {"lr": 0.001, "train_iters": 12, "seed": 3}
    assert differences(saved, {"lr": 0.5, "train_iters": 12}) == "--lr 0.001 there, 0.5 here"
    assert differences(saved, {"min_lr": 0.0, "train_iters": 14}) == (
        "--min-lr None there, 0.0 here; --train-iters 12 there, 14 here"
    )
    assert differences(saved, saved) == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--wlb-max-age 3", "--wlb-max-age 12 there, 3 here"),
        ("--wlb-queue-thresholds 64 96", "--wlb-queue-thresholds [] there, [64, 96] here"),
        ("--clip-grad 0.5", "--clip-grad 1.0 there, 0.5 here"),
    ],
)
def test_changed_settings_are_told(flags: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    saved = as_saved(settings())
    tell_changes(settings(flags), saved, {}, "clip_grad")
    assert caplog.messages == [
        f"other settings than the checkpoint's, so steps differ from here on: {said}"
    ]


def test_settings_that_change_no_step_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    flags = "--wlb-metrics m --wlb-cost c.json --wlb-hardware cpu --wlb-attention-kernel sdpa"
    now = settings(flags, "--log-interval 9 --clip-grad 0.5")
    tell_changes(now, as_saved(settings()), {})
    assert not caplog.text


def test_checkpoint_of_before_a_setting_existed_had_its_default(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = as_saved(settings())
    del saved["wlb_queue_thresholds"], saved["wlb_max_age"]
    tell_changes(settings(), saved, {})
    assert not caplog.text
    tell_changes(settings("--wlb-max-age 3"), saved, {})
    assert "--wlb-max-age 12 there, 3 here" in caplog.text


def test_files_that_were_edited_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, content = read_hardware("cpu")
    changed = {**content, "latency_us": {"value": 3, "source": "measured"}}
    configs = []
    for name, machine, loss in (("there", dict(content), "-x"), ("here", changed, "-2 * x")):
        hardware, own = tmp_path / f"{name}.yaml", tmp_path / f"{name}.py"
        hardware.write_text(yaml.safe_dump(machine))
        own.write_text(f"def loss(x, _): return {loss}")
        flags = f"--context-parallel-size 2 --wlb-hardware {hardware} --wlb-loss {own}"
        configs.append(settings(flags))
    there, here = configs
    noted = json.loads(json.dumps(file_digests(there)))
    tell_changes(there, as_saved(there), noted)
    tell_changes(here, as_saved(here), {})  # of a checkpoint from before they were noted
    tell_changes(settings(), as_saved(settings()), noted)  # no step depends on them
    assert not caplog.text
    tell_changes(here, as_saved(here), noted)
    words = "here.yaml says other figures than when", "here.py holds another text than when"
    assert all(word in text for word, text in zip(words, caplog.messages, strict=True))
    for simulated in ("--wlb-shape on", "--wlb-micro-batches auto", "--wlb-packing slim"):
        assert file_digests(settings(simulated))["machine"] is not None


def filled_in(config: Config) -> dict[str, object]:
    """As a run fills in what need not be given."""
    found = config.flat()
    found["max_position_embeddings"] = found["max_position_embeddings"] or found["seq_length"]
    found["lr_decay_iters"] = found["lr_decay_iters"] or found["train_iters"]
    found["ffn_hidden_size"] = found["ffn_hidden_size"] or 4 * config.model.hidden_size
    names = ("max_position_embeddings", "lr_decay_iters", "hidden_size", "ffn_hidden_size", "lr")
    return {name: found[name] for name in names}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--seq-length 128", "--seq-length 256 there, 128 here"),
        ("--train-iters 8", "--train-iters 4 there, 8 here"),
        ("--lr-decay-iters 9", "--lr-decay-iters 4 there, 9 here"),
        ("--hidden-size 64", "--hidden-size 32 there, 64 here"),
        ("--seq-length 64 --lr 1", "--seq-length 256 there, 64 here; --lr 0.0003 there, 1.0 here"),
        ("--ffn-hidden-size 128", ""),  # as it was filled in
    ],
)
def test_changed_settings_blame_flags_that_were_given(flags: str, said: str) -> None:
    base = "--seq-length 256 --train-iters 4 --hidden-size 32 --lr 3e-4"
    saved, now = settings(base), settings(base, flags)
    assert changed_settings(filled_in(saved), filled_in(now), saved.flat(), now.flat()) == said


def test_windows_are_the_same_in_any_form_of_a_list() -> None:
    """A checkpoint has a list where settings have a tuple."""
    now = settings("--window-size 7,0").flat()
    saved = now | {"window_size": [7, 0]}
    assert changed_settings(saved, now, saved, now) == ""
    saved["window_size"] = [8, 0]
    assert changed_settings(saved, now, saved, now) == "--window-size [8, 0] there, [7, 0] here"


def test_other_windows_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Also of a checkpoint from before there were any."""
    now, names = settings("--window-size 7,0"), ("window_size", "window_attn_skip_freq")
    tell_changes(now, plan_settings(now, *names), {}, *names)
    tell_changes(settings(""), plan_settings(settings("")), {}, *names)
    assert not caplog.messages
    tell_changes(now, plan_settings(settings("")), {}, *names)
    assert "--window-size [] there, [7, 0] here" in caplog.text


def test_changed_settings_without_a_flag_have_a_name() -> None:
    assert changed_settings({"processes": 2}, {"processes": 4}, {}, {}) == (
        "processes 2 there, 4 here"
    )


def test_a_folder_to_load_must_exist_unless_it_is_to_be_saved(tmp_path: Path) -> None:
    none, there = str(tmp_path / "none"), str(tmp_path)
    assert f"--load {none} does not exist" in missing_load(none, None)
    assert f"--load {none} does not exist" in missing_load(none, there)
    for load, save in ((None, there), (there, None), (none, f"{there}/./none"), ("msc://a", None)):
        assert missing_load(load, save) == ""


def test_resume_refuses_a_corpus_of_the_same_lengths_with_other_tokens(tmp_path: Path) -> None:
    def opened() -> Corpora:
        names = ("one", "two")
        return Corpora([Corpus(str(tmp_path / n), np.array([5]), 256, 0) for n in names], 256, {})

    for name in ("one", "two"):
        (tmp_path / f"{name}.bin").write_bytes(b"abcd\0")
    saved = json.loads(json.dumps(opened().samples))
    require_same_tokens(opened(), saved)
    require_same_tokens(opened(), None)  # of a checkpoint from before they were noted
    (tmp_path / "two.bin").write_bytes(b"abce\0")
    with pytest.raises(CheckpointError, match=r"two.bin holds other tokens .*; give the corpus"):
        require_same_tokens(opened(), saved)

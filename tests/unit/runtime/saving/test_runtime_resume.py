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
    file_digests,
    missing_load,
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


def test_settings_that_change_no_step_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    flags = "--wlb-metrics m --wlb-cost c.json --wlb-hardware cpu --wlb-attention-kernel sdpa"
    now = settings(flags, "--clip-grad 0.5")
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

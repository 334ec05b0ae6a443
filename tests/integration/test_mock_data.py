"""Training on random tokens, without a corpus: the same in every layout and resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_lm_runs import BOTH, LAYOUTS, PATH, PP2, launch, validations
from trainer_runs import Flags, assert_refused, evaluations, finish, losses, start

from megatron_wlb.errors import CheckpointError, ConfigError

NUM_STEPS = 4
MOCK: Flags = BOTH | {"mock_data": True, "train_iters": NUM_STEPS, "wlb_packing": "hold"}
EMBEDDED: Flags = {"vocab_size": 256}  # of the NullTokenizer, and its end of documents
ROUNDING = 1e-6
"""Relative: fp32 sums of a thousand token losses, in another order."""


def test_mock_data_need_no_megatron_lm_and_resume_exactly(tmp_path: Path) -> None:
    flags = MOCK | EMBEDDED
    finish(start(tmp_path, 1, flags | {"wlb_metrics": "plain"}))
    expected = losses(tmp_path / "plain")
    assert len(expected) == NUM_STEPS
    saved = flags | {"save": "ck", "save_interval": 2, "wlb_metrics": "resumed"}
    finish(start(tmp_path, 1, saved | {"exit_interval": 2}))
    saved |= {"load": "ck"}
    other = start(tmp_path, 1, saved | {"wlb_mock_lengths": "stdlib"}).wait()
    assert_refused(other, CheckpointError.exit_code, "mock data (distribution stdlib)")
    finish(start(tmp_path, 1, saved))
    assert losses(tmp_path / "resumed") == expected


@pytest.mark.launcher
def test_mock_data_are_the_embedded_trainers_in_another_layout(tmp_path: Path) -> None:
    """As many stages, which decide the first weights, but more ranks that share documents."""
    flags = MOCK | {"wlb_packing": "original", "eval_interval": 2, "eval_iters": 2}
    num_processes, layout = LAYOUTS["pp2-cp2-dp2"]
    tokenizer = Path(PATH or "", "megatron/core/tokenizers/text/libraries/null_tokenizer.py")
    counts_end = "_without_eod" not in tokenizer.read_text(encoding="utf-8")  # among --vocab-size
    shared = flags | layout | {"wlb_metrics": "launched", "vocab_size": 256 if counts_end else 255}
    launched = finish(launch(tmp_path, num_processes, shared))
    finish(start(tmp_path, 2, flags | PP2 | EMBEDDED | {"wlb_metrics": "embedded"}))
    found, expected = losses(tmp_path / "launched"), losses(tmp_path / "embedded")
    assert found == pytest.approx(expected, rel=ROUNDING)
    evaluated = evaluations(tmp_path / "embedded")
    assert len(evaluated) == 2
    assert [float(x) for x in validations(launched)][:2] == pytest.approx(evaluated, rel=ROUNDING)


@pytest.mark.long
@pytest.mark.launcher
def test_mock_data_of_other_lengths_train_otherwise(tmp_path: Path) -> None:
    """Negative control of the equalities above, and a resumed run of the launcher."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(str(3 + number * 37 % 200) for number in range(400)))
    flags = MOCK | {"seed": 5}
    finish(launch(tmp_path, 1, flags | {"wlb_metrics": "reference"}))
    flags |= {"wlb_mock_lengths": lengths, "save": "ck", "save_interval": 2, "load": "ck"}
    flags |= {"wlb_metrics": "file"}
    finish(launch(tmp_path, 1, flags | {"exit_interval": 2}))
    moved = lengths.rename(tmp_path / "moved.txt")
    again = finish(launch(tmp_path, 1, flags | {"wlb_mock_lengths": moved}))
    assert "other settings than the checkpoint's" not in again.output
    alone = {"wlb_mock_lengths": moved, "load": None, "save": None, "save_interval": None}
    finish(launch(tmp_path, 1, flags | alone | {"wlb_metrics": "plain"}))
    ours, others = losses(tmp_path / "plain"), losses(tmp_path / "reference")
    assert losses(tmp_path / "file") == ours
    for step, loss in others.items():
        assert abs(loss - ours[step]) > 100 * ROUNDING * loss


@pytest.mark.launcher
def test_mock_data_beside_a_corpus_are_refused(tmp_path: Path) -> None:
    refused = launch(tmp_path, 1, MOCK | {"train_data_path": "a"}).wait()
    assert_refused(refused, ConfigError.exit_code, "--mock-data", "leave one of them out")

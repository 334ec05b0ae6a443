"""Megatron-LM's own ``pretrain_gpt.py`` with numbers of micro-batches that are chosen step by step:
equal to one process, where there is no pipeline that they could matter to.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from megatron_lm_runs import (
    BOTH,
    PP2,
    PP2_VPP2,
    assert_equal_steps,
    finish,
    launch,
    logged,
    needs_megatron_lm,
    validations,
)
from trainer_runs import Flags, command_line, losses, start

from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.corpus import build_corpus
from megatron_wlb.planning.from_config import known_cost, make_planner
from megatron_wlb.settings.command_line import parse

pytestmark = needs_megatron_lm

NUM_STEPS, SAVED, AGAIN = 8, 2, 4
"""Layouts go on from the checkpoint of one process: its weights, its documents and its pool."""
AUTO: Flags = {"wlb_packing": "hold", "wlb_micro_batches": "auto", "seed": 7}
EVALUATED: Flags = {"eval_iters": 1, "eval_interval": AGAIN}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Flags:
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.RandomState(11)
    with (folder / "a.jsonl").open("w") as stream:
        for length in np.clip(generator.lognormal(4.3, 1.2, 300), 5, 1500).astype(int):
            words = generator.choice(["ab", "cde", "fgh ", "the ", "sun ", "x. "], length)
            stream.write(json.dumps({"text": "".join(words)[:length]}) + "\n")
    build_corpus([folder / "a.jsonl"], folder / "a")
    return BOTH | AUTO | {"data_path": folder / "a", "train_iters": NUM_STEPS}


@pytest.mark.parametrize("layout", [PP2, PP2_VPP2], ids=["pp2", "pp2-vpp2"])
def test_steps_have_unlike_numbers(flags: Flags, layout: Flags) -> None:
    """That the runs below are what they seem."""
    config = parse(command_line(flags | layout))
    planner = make_planner(config, Corpora.open(config), known_cost(config, 256), 1)  # type: ignore[arg-type]
    numbers = [len(plan.micro_batches[0]) for plan in planner.plans(NUM_STEPS)]
    assert len({*numbers[SAVED:AGAIN]}) > 1 and len({*numbers[AGAIN:]}) > 1
    assert any(number != config.training.global_batch_size for number in numbers)


def test_numbers_by_step_train_as_one_process_does_and_resume(flags: Flags, tmp_path: Path) -> None:
    flags = flags | EVALUATED
    saves: Flags = {"save": tmp_path / "one-ck", "save_interval": SAVED}
    one = finish(launch(tmp_path, 1, flags | saves | {"wlb_metrics": "one"}))
    begun: Flags = {"load": tmp_path / "one-ck", "ckpt_step": SAVED, "wlb_metrics": "pp2"}
    saves["save"] = tmp_path / "pp2-ck"
    pp2 = finish(launch(tmp_path, 2, flags | PP2 | begun | saves))
    assert_equal_steps(tmp_path / "pp2", tmp_path / "one", first=SAVED + 1)
    assert [*map(float, validations(pp2))] == pytest.approx([*map(float, validations(one))])
    samples = logged(pp2, "consumed samples")
    assert samples == [str(8 * step) for step in range(SAVED + 1, NUM_STEPS + 1)]

    for name, layout in {"resumed": PP2, "virtual": PP2_VPP2}.items():
        resumed: Flags = {"load": saves["save"], "ckpt_step": AGAIN, "wlb_metrics": name}
        finish(launch(tmp_path, 2, flags | layout | resumed))
        assert_equal_steps(tmp_path / name, tmp_path / "one", first=AGAIN + 1)
    expected = losses(tmp_path / "pp2")
    assert all(expected[step] == loss for step, loss in losses(tmp_path / "resumed").items())


def test_embedded_trainer_computes_the_same_in_any_number(flags: Flags, tmp_path: Path) -> None:
    """Of one layout, as its first weights depend on that."""
    for name in ("fixed", "auto"):
        chosen: Flags = {"wlb_micro_batches": name, "wlb_metrics": name, "train_iters": AGAIN}
        finish(start(tmp_path, 2, flags | PP2 | chosen))
    assert_equal_steps(tmp_path / "auto", tmp_path / "fixed")

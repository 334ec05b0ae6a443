"""Where the host waits for the device in a step of Megatron-LM's loop: in Megatron's own code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.waits import recorded
from megatron_lm_runs import BOTH, MEGATRON_LM, PP2, _launch, finish, needs_megatron_lm
from trainer_runs import start

pytestmark = needs_megatron_lm

READS = {
    # The loss, for --wlb-metrics, when the next step is under way.
    "megatron_wlb/runtime/transfer.py:item",
}
MEGATRONS = {
    # Each step, whatever runs in it: the norm that gradients are clipped by, whether all ranks
    # updated, and its own check of the step's loss.
}


def launch_recorded(argv: list[str]) -> int:
    """Runs the launcher; notes where this rank would wait in steps and their log."""
    with recorded("train_step", "training_log") as places:
        code = _launch(argv)
    Path(f"waits-{os.environ['RANK']}").write_text(json.dumps(sorted(places)))
    return code


@pytest.mark.parametrize("packing", ["hold", "slim"])
def test_a_step_of_megatrons_loop_waits_where_megatron_does(
    packing: str, corpus: Path, tmp_path: Path
) -> None:
    flags = MEGATRON_LM | BOTH | PP2 | {"data_path": corpus, "train_iters": 4, "log_interval": 3}
    flags |= {"wlb_packing": packing, "wlb_metrics": "metrics"}
    finish(start(tmp_path, 2, flags, program=launch_recorded))
    found = [set(json.loads((tmp_path / f"waits-{rank}").read_text())) for rank in range(2)]
    ours = {place for places in found for place in places if place.startswith("megatron_wlb/")}
    assert ours == READS
    assert found[0] | found[1] == READS | MEGATRONS
    metrics = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert [line["iteration"] for line in metrics] == [1, 2, 3, 4]

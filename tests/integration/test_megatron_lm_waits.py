"""Where the host waits for the device in a step of Megatron-LM's loop: in Megatron's own code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.waits import recorded
from megatron_lm_runs import BOTH, MEGATRON_LM, PP2, launched
from rank_runs import finish, start

pytestmark = pytest.mark.launcher

READS = {
    # The loss, for --wlb-metrics, when the next step is under way.
    "megatron_wlb/runtime/ranks/transfer.py:item",
}
OPENING = "megatron_wlb/runtime/ranks/transfer.py:of_all_ranks"
"""Once, where the first slice of a document needs another communicator."""
SEEN = "megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32"
"""Megatron's clipping reads the norm: so steps were looked at."""
SYNCHRONISED = "megatron/core/pipeline_parallel/p2p_communication.py:_communicate"
"""Where Megatron synchronises the device behind an exchange, unless it is told not to."""


def launch_recorded(argv: list[str]) -> int:
    """Runs the launcher; notes where this rank would wait in steps and their log."""
    with recorded("train_step", "training_log") as places:
        code = launched(argv)
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
    assert ours - {OPENING} == READS
    assert all(SEEN in places and SYNCHRONISED not in places for places in found)
    metrics = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert [line["iteration"] for line in metrics] == [1, 2, 3, 4]

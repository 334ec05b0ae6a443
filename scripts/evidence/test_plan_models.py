"""The table of models takes what fits, and says so where Megatron's packing does not."""

from pathlib import Path

import pytest
from plan_models import MODELS, Row

from megatron_wlb.data.lengths import DISTRIBUTIONS
from megatron_wlb.planning.models import model_names

ROW = Row("7b", 64, 131072, "reference")


def found(packing, gain, *, fits=True, delay=0.0):
    sizes = {"tp_size": 4, "cp_size": 1, "pp_size": 2, "vpp_size": 1, "dp_size": 8, "ep_size": 1}
    more = {"packing": packing, "speedup_over_best": gain, "mfu": gain / 4}
    return {**sizes, **more, "fits": fits, "delay_mean": delay}


@pytest.mark.parametrize("original_fits", [True, False])
def test_what_does_not_fit_or_delays_too_much_is_left_out(original_fits):
    ranked = [
        found("slim", 1.4, fits=False), found("slim", 1.2), found("hold", 1.3, delay=1.5),
        found("hold", 1.1), found("original", 1.0, fits=original_fits), found("slim", 1.15),
    ]  # fmt: skip
    frame = {"overlapped_speedup": 1.06}
    cells = ROW.cells({"ranked": ranked, "frame": frame, "original_fits": original_fits})
    mfu = "30%, 25%" if original_fits else "30%, none fits"
    assert cells[4:] == ["`slim`: TP4 PP2 DP8", "1.20", "1.10", "1.20", "1.06", mfu]


def test_each_row_is_a_command_of_known_names(tmp_path: Path):
    assert {*MODELS} <= {*model_names()}
    words = ROW.command(tmp_path)
    assert words[words.index("--num-micro-batches") + 1] == "16"
    assert words[words.index("--distribution") + 1] in DISTRIBUTIONS
    tuning = Row("7b", 64, 32768, "tuning").command(tmp_path)
    assert tuning[tuning.index("--num-micro-batches") + 1] == "64"
    lengths = list(map(int, (tmp_path / "tuning.txt").read_text().split()))
    assert max(lengths) == 32768 and 1400 < sorted(lengths)[len(lengths) // 2] < 1600

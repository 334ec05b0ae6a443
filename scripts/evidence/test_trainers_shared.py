"""Steps of verl, slime and NeMo-RL by their own code, whose samples share what they begin with.

VERL_PATH, SLIME_PATH and NEMO_RL_PATH name checkouts. Each imports more than this project does:
have that in the environment, or in a folder on PYTHONPATH. ``_trainers_shared.py`` says what runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
PATHS = {"verl": "VERL_PATH", "slime": "SLIME_PATH", "nemo_rl": "NEMO_RL_PATH"}


def run(trainer: str, kind: str, num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank prints."""
    checkout = os.environ.get(PATHS[trainer])
    if checkout is None:
        pytest.skip(f"{PATHS[trainer]} names no checkout")
    known = os.environ.get("PYTHONPATH", "")
    program = str(FOLDER / "_trainers_shared.py"), trainer, kind, str(folder / "alone.pt")
    found = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
            *(str(num_ranks), *program),
        ],
        capture_output=True, text=True, check=False, timeout=300,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), checkout, known])}
        | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    # A rank's line may stand behind a bar of progress, which has no end of line.
    text = found.stdout.split('{"tokens"')[1:]
    ranks = [json.JSONDecoder().raw_decode('{"tokens"' + rest)[0] for rest in text]
    assert len(ranks) == num_ranks
    return ranks


@pytest.mark.parametrize("ranks", ["one", "stages", "context-parallel ranks"])
@pytest.mark.parametrize("trainer", PATHS)
def test_trainers_compute_what_each_sample_gives_alone(
    tmp_path: Path, trainer: str, ranks: str
) -> None:
    cp_size = 1
    if ranks == "context-parallel ranks":
        cp_size = 2
        run(trainer, "pp", 1, tmp_path)  # what they are compared with
        found = run(trainer, "cp", 2, tmp_path)
    else:
        found = run(trainer, "pp", 1 if ranks == "one" else 2, tmp_path)
    for rank in found:
        together, control = rank["together"], rank["control"]
        assert together["rows"] < 0.5 * rank["tokens"] / cp_size
        assert together["gradients"] < 1e-5 and control["gradients"] > 0.1
    last = max((rank["together"] for rank in found), key=lambda own: own["samples"])
    assert last["samples"] == 12 and last["names"]
    assert last["log_probs"] < 2e-6 and last["said"] < 1e-6
    assert max(rank["control"]["log_probs"] for rank in found) > 1e-2

"""Steps of verl, slime and NeMo-RL by their own code, whose samples share what they begin with.

VERL_PATH, SLIME_PATH and NEMO_RL_PATH name checkouts. Each imports more than this project does:
have that in the environment, or in a folder on PYTHONPATH. ``_trainers_shared.py`` says what runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PATHS = {"verl": "VERL_PATH", "slime": "SLIME_PATH", "nemo_rl": "NEMO_RL_PATH"}


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("trainer", PATHS)
def test_trainers_compute_what_each_sample_gives_alone(trainer: str, num_stages: int) -> None:
    checkout = os.environ.get(PATHS[trainer])
    if checkout is None:
        pytest.skip(f"{PATHS[trainer]} names no checkout")
    known = os.environ.get("PYTHONPATH", "")
    found = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
            *(str(num_stages), str(FOLDER / "_trainers_shared.py"), trainer),
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
    assert len(ranks) == num_stages
    for rank in ranks:
        together, control = rank["together"], rank["control"]
        # The micro-batches of verl that nothing shares have padding, which is not counted here.
        assert together["rows"] < 0.5 * rank["tokens"]
        assert together["gradients"] < 1e-5 and control["gradients"] > 0.1
    last = max((rank["together"] for rank in ranks), key=lambda own: own["samples"])
    assert last["samples"] == 12 and last["names"]
    assert last["log_probs"] < 2e-6 and last["said"] < 1e-6
    assert max(rank["control"]["log_probs"] for rank in ranks) > 1e-2

"""Claims whose command takes seconds are made again, and compared with what they printed."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import Any

import claims
import pytest

AGAIN = [claim for claim in claims.read() if "prints" in claim]


@pytest.mark.parametrize("claim", AGAIN, ids=lambda claim: str(claim["claim"])[:40])
def test_claim_is_what_its_command_prints(claim: dict[str, Any]) -> None:
    done = subprocess.run(
        shlex.split(claim["command"].partition("#")[0]), capture_output=True, text=True, check=True,
        cwd=claims.ROOT, env=os.environ | {"COLUMNS": "250"}, timeout=600,
    )  # fmt: skip
    missing = [text for text in claim["prints"] if text not in done.stdout]
    assert not missing, f"{missing} of {claim['page']} are not in\n{done.stdout}"

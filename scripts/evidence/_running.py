"""Runs a study's script as a user does: what the tests beside the studies share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_script(name: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script of that name in this folder; a text of several words is split at its spaces."""
    flags = [one for word in words for one in str(word).split()]
    return subprocess.run(
        [sys.executable, str(HERE / name), *flags],
        capture_output=True, text=True, check=False, timeout=300, env=os.environ | environment,
    )  # fmt: skip

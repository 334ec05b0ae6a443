"""The image's pins agree with the rest of the project, and hadolint has nothing to say."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_wlb.runtime.compat import hooks

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
CONSTRAINTS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if "==" in line and not line.startswith("#")
)


def test_megatron_is_the_tested_version_everywhere() -> None:
    assert hooks.VERSIONS[CONSTRAINTS["megatron-core"]].tested
    assert '--no-deps "$(grep ^megatron-core== constraints.txt)" .\n' in DOCKERFILE


def test_image_ends_in_a_smoke_test() -> None:
    runs = re.findall(r"^RUN ((?:.*\\\n)*.*)", DOCKERFILE, re.M)
    words = shlex.split(runs[-1].replace("\\\n", ""))
    assert {"wlb", "doctor", "pytest"} <= set(words)
    assert "import transformer_engine.pytorch" in runs[-1]
    paths = [word for word in words if word.startswith(("tests/", "configs/"))]
    assert len(paths) > 4
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run(
        [hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_package_takes_every_known_megatron_core() -> None:
    (asked,) = re.findall(r'"megatron-core(.*)"', (ROOT / "pyproject.toml").read_text())
    taken = SpecifierSet(asked)
    assert all(version in taken for version in hooks.VERSIONS)
    newest = Version(list(hooks.VERSIONS)[-1])
    assert "0.17.1" not in taken and f"{newest.major}.{newest.minor + 1}.0" not in taken

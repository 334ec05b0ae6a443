"""The launcher without our flags is the script alone; with them it says what is wrong in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_wlb.errors import CompatibilityError, ConfigError

SCRIPT = """
import json, os, sys
import neighbour
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0],
    "main": sys.modules["__main__"].__dict__ is globals(),
    "loaded": sorted({"torch", "megatron", "numpy", "logging"} & set(sys.modules)),
    "neighbour": neighbour.__file__,
}))
if "--fail" in sys.argv:
    sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "neighbour.py").write_text("")
    (folder / "pretrain_gpt.py").write_text(SCRIPT)
    return folder / "pretrain_gpt.py"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False
    )


def launch(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return run("-m", "megatron_wlb.launch", *words)


@pytest.mark.parametrize("flags", [[], ["--num-layers", "4", "--bf16"], ["--fail"]])
def test_without_our_flags_a_script_runs_as_alone(script: Path, flags: list[str]) -> None:
    alone, launched = run(script, *flags), launch(script, *flags)
    assert launched.returncode == alone.returncode == (7 if "--fail" in flags else 0)
    ours, theirs = json.loads(launched.stdout), json.loads(alone.stdout)
    assert theirs["argv"] == [str(script), *flags]
    # The launcher's own settings are known to it before; they touch neither torch nor Megatron.
    assert not {"torch", "megatron"} & set(ours["loaded"])
    del ours["loaded"], theirs["loaded"]
    assert ours == theirs


def test_help_teaches_the_flags_and_an_example() -> None:
    shown = launch("--help")
    assert shown.returncode == 0
    for fragment in ("--wlb-packing", "torchrun --nproc-per-node 8", "--wlb-packing original"):
        assert fragment in shown.stdout
    assert launch().returncode == ConfigError.exit_code


def test_missing_script_is_one_line(tmp_path: Path) -> None:
    failed = launch(tmp_path / "no.py", "--wlb-packing", "hold")
    assert failed.returncode == ConfigError.exit_code
    assert failed.stderr.startswith("error: ")
    assert "no.py is not a file" in failed.stderr
    assert failed.stderr.count("\n") == 1


def test_a_script_with_another_megatron_beside_it_is_one_line(script: Path) -> None:
    (script.parent / "megatron").mkdir()
    (script.parent / "megatron" / "__init__.py").touch()
    failed = launch(script, "--wlb-packing", "hold")
    assert failed.returncode == CompatibilityError.exit_code
    assert "must lie in a checkout of Megatron-LM" in failed.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [["--yaml-cfg", "run.yaml"], ["--yaml-cfg=run.yaml"]])
def test_yaml_settings_of_megatron_are_refused(script: Path, words: list[str]) -> None:
    failed = launch(script, "--wlb-packing", "hold", *words)
    assert failed.returncode == ConfigError.exit_code
    assert "--yaml-cfg" in failed.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["--wlb-paking", "hold"], ["--wlb-paking", "did you mean --wlb-packing?"]),
        (["--wlb-packing", "best"], ["--wlb-packing", "'best'", "hold"]),
        (["--wlb-max-tokens", "many"], ["--wlb-max-tokens", "'many'"]),
    ],
)
def test_bad_flag_of_ours_is_one_line(script: Path, words: list[str], fragments: list[str]) -> None:
    failed = launch(script, *words, "--num-layers", "4")
    assert failed.returncode == ConfigError.exit_code
    (line,) = failed.stderr.splitlines()
    assert line.startswith("error: ")
    for fragment in fragments:
        assert fragment in line


def test_settings_file_that_cannot_be_read_is_one_line(script: Path) -> None:
    failed = launch(script, "--wlb-config", "none.yaml")
    assert failed.returncode == ConfigError.exit_code
    assert "--wlb-config none.yaml" in failed.stderr


def test_settings_file_goes_before_the_command_line(tmp_path: Path) -> None:
    from megatron_wlb.settings.command_line import with_settings_file

    path = tmp_path / "run.yaml"
    path.write_text("wlb_packing: wlb\nnum-layers: 4\nbf16: true\nfp16: false\ndata_path: [a, b]\n")
    words = with_settings_file(["--wlb-config", str(path), "--wlb-packing", "hold"])
    assert words == [
        "--wlb-packing", "wlb", "--num-layers", "4", "--bf16", "--data-path", "a", "b",
        "--wlb-packing", "hold",
    ]  # fmt: skip

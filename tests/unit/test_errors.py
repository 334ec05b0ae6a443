"""How programs end: one mechanism for commands and scripts."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_wlb.errors import CorpusError, PackingError, run_program

PROJECT = Path(__file__).parents[2]
FOLDERS = (PROJECT / "scripts", PROJECT / "scripts" / "evidence")
SCRIPTS = sorted(
    path for folder in FOLDERS for path in folder.glob("[a-z]*.py") if "test_" not in path.name
)


def raising(error: BaseException):
    def program() -> int:
        raise error

    return program


def test_program_tells_each_line_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(raising(CorpusError("one\ntwo"))) == CorpusError.exit_code
    assert capsys.readouterr().err == "error: one\nerror: two\n"


def test_program_has_its_own_code_or_that_of_a_signal() -> None:
    assert run_program(lambda: 3) == 3
    assert run_program(raising(KeyboardInterrupt())) == 130


def test_program_shows_where_an_error_is_from_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WLB_TRACEBACK", "1")
    with pytest.raises(PackingError):
        run_program(raising(PackingError("too long")))


def test_program_tells_of_an_unusable_place_where_a_flag_chooses_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = OSError(28, "No space left on device", "/here/file")
    assert run_program(raising(full), place_flag="--out") == 1
    said = "error: /here/file: No space left on device; choose another --out\n"
    assert capsys.readouterr().err == said
    with pytest.raises(OSError):  # nobody's choice: a defect
        run_program(raising(full))


def test_program_ends_quietly_where_its_reader_has_enough() -> None:
    code = (
        "import sys\nfrom megatron_wlb.errors import run_program\n"
        "sys.exit(run_program(lambda: print('line\\n' * 100_000) or 0))"
    )
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | head -n 1', sys.executable, code],
        capture_output=True, text=True, check=False, cwd=PROJECT,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (141, "line\n", "")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_leaves_telling_errors_to_that_mechanism(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "except WLBError" not in text and 'f"error: ' not in text
    assert "run_program(main" in text or "WLBError" not in text


def test_program_that_is_ended_ends_what_it_started() -> None:
    code = (
        "import subprocess\nfrom megatron_wlb.errors import run_program\n"
        "def program():\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        "    print(child.pid, flush=True)\n"
        "    return child.wait()\n"
        "raise SystemExit(run_program(program))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    child.wait(20)


@pytest.mark.parametrize("program", ["cli", "launch", "measure_cost"])
def test_interrupt_of_a_program_that_still_starts_is_one_line(program: str) -> None:
    code = f"import megatron_wlb.{program}\nraise KeyboardInterrupt"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "error: interrupted\n")


def test_library_leaves_interrupts_and_errors_alone() -> None:
    code = "import sys, megatron_wlb.api; assert sys.excepthook is sys.__excepthook__"
    assert not subprocess.run([sys.executable, "-c", code], check=False).returncode
    code = "import megatron_wlb.cli\nraise ValueError(3)"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and ended.stderr.endswith("\nValueError: 3\n")

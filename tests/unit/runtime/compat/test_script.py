"""Which edits of a script's forward step and data count, and what becomes of such a script."""

from __future__ import annotations

import functools
import logging
import types
from pathlib import Path

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.runtime.compat import script

SCRIPT = '''
from functools import lru_cache, partial

LIMIT = 10

def mask(batch):
    return batch["mask"]

@lru_cache(maxsize=1)
def table():
    return [n for n in range(4)]

def loss_func(batch, output):
    """Loss."""
    return sum(output) * mask(batch), LIMIT, table()

def forward_step(data, model, plan: bool = False):
    # Runs the model.
    batch = next(data)
    return model(batch), partial(loss_func, batch)
'''


def module(path: Path, text: str) -> types.ModuleType:
    path.write_text(text)
    made = types.ModuleType(path.stem)
    exec(compile(text, str(path), "exec"), made.__dict__)
    return made


def fingerprint(path: Path, text: str) -> str:
    return script.fingerprint(module(path, text).forward_step)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# Runs the model.", "# Something else."),
        ('"""Loss."""', '"""The loss.\n\n    Args: two.\n    """'),
        ("(batch, output):", "(\n    batch: dict, output\n) -> tuple:"),
        ('batch["mask"]', "batch['mask']"),
        ("LIMIT = 10", "import os\nOTHER = 3\nLIMIT = 10"),
    ],
)
def test_layout_and_words_do_not_count(tmp_path: Path, old: str, new: str) -> None:
    assert old in SCRIPT
    own = fingerprint(tmp_path / "a.py", SCRIPT)
    assert fingerprint(tmp_path / "b.py", SCRIPT.replace(old, new)) == own


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sum(output)", "max(output)"),
        ("range(4)", "range(5)"),
        ('batch["mask"]', 'batch["weights"]'),
        ("LIMIT = 10", "LIMIT = 3"),
        ("    # Runs the model.", "    print(data)"),
    ],
)
def test_what_is_computed_counts(tmp_path: Path, old: str, new: str) -> None:
    own = fingerprint(tmp_path / "a.py", SCRIPT)
    assert fingerprint(tmp_path / "b.py", SCRIPT.replace(old, new)) != own


def test_functions_of_other_files_count_too(tmp_path: Path) -> None:
    """A script that imports Megatron's and puts its own loss in."""
    theirs = module(tmp_path / "a.py", SCRIPT)
    own = script.fingerprint(theirs.forward_step)
    other = module(tmp_path / "b.py", "def loss_func(batch, output):\n    return 0")
    theirs.loss_func = other.loss_func  # type: ignore[attr-defined]
    assert script.fingerprint(theirs.forward_step) != own
    wrapped = functools.wraps(theirs.forward_step)(lambda *args: theirs.forward_step(*args))
    assert script.fingerprint(wrapped) != own
    assert script.fingerprint(functools.partial(theirs.forward_step, plan=True)) != own


def test_unknown_code_is_refused_with_a_known_version_and_told_with_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = module(tmp_path / "mine.py", SCRIPT).forward_step
    with pytest.raises(ConfigError) as raised:
        script.check("0.18.0", own, own)
    first, second = str(raised.value).splitlines()
    assert first.startswith(f"{tmp_path}/mine.py has forward step or loss of its own (")
    assert second.startswith(f"{tmp_path}/mine.py has data sets of its own (")
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        script.check("0.20.0", own, own)
        script.check("0.33", own, own)
    assert len(caplog.messages) == 4

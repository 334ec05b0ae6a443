"""How commands show things: tables, progress on stderr; where they can write files."""

from __future__ import annotations

import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event, Thread

from rich import progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_wlb.errors import ConfigError
from megatron_wlb.simulator.baseline import COLUMNS, Baseline
from megatron_wlb.simulator.trial import Outcome

WIDTH = 160
"""The width of tables that go to a file or a pipe."""
OVER = "! is above the limit"
"""What a caption says of :func:`marked` numbers."""
MIN_WIDTH = 130
"""Columns of a terminal that has room for more figures."""
QUIET_S, LONGEST_S = 1.0, 10.0
"""Where there is no terminal: work that takes no longer says nothing, and longer work says no less
often how far it is."""


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal, or as a table needs where there is none."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, width=None if terminal else WIDTH, highlight=False)


def say(out: Console, text: str) -> None:
    """A sentence, as it stands: one line, unless a terminal has to break it between words."""
    out.print(Text(text), soft_wrap=not out.is_terminal)


def table_of(
    title: str, headers: Sequence[str], words: Sequence[str] = (), caption: str | None = None
) -> Table:
    """Makes a table without rows; all columns but ``words`` are numbers, which end on the right."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for header in headers:
        table.add_column(header, justify="left" if header in words else "right")
    return table


def table_of_outcomes(
    title: str,
    columns: Sequence[str],
    outcomes: Sequence[tuple[Outcome, Baseline]],
    caption: str,
    extra: Sequence[str] = (),
) -> Table:
    """A row each, in sections of one packing. What tells nothing here is left out, and ``extra``
    columns where there is no room.
    """
    runs = [outcome.run for outcome, _ in outcomes]
    room = console().width >= MIN_WIDTH
    told = {
        "num_micro_batches": len({run.num_micro_batches for run in runs}) > 1,
        "sharding": runs[0].parallelism.cp_size > 1,
        "cp_imbalance": runs[0].parallelism.cp_size > 1,
        "recompute": len({run.recompute for run in runs}) > 1,
        "net_speedup": any(base.stock for _, base in outcomes),
        "expert_wait_share": runs[0].costs.experts is not None,
        "padding": any(outcome.metrics.padding_share >= 0.00005 for outcome, _ in outcomes),
        **dict.fromkeys(extra, room),
    }
    shown = [COLUMNS[name] for name in columns if told.get(name, True)]
    words = [COLUMNS[name].header for name in ("title", "sharding", "recompute")]
    table = table_of(title, [column.header for column in shown], words, caption)
    for column in table.columns:
        column.no_wrap = column.header not in words
    before, several = outcomes[0][0], len({outcome.sharding for outcome, _ in outcomes}) > 1
    for outcome, base in outcomes:
        if several and outcome.setting != before.setting:
            table.add_section()
        before = outcome
        cells = {column.name: column.cell(outcome, base) for column in shown}
        if len(outcome.mfu_by_seed) > 1 and outcome is not base.original:
            cells["speedup"] += " ({:.2f}-{:.2f})".format(*outcome.speedup_by_seed(base.original))
        if "peak_gib" in cells:
            cells["peak_gib"] = marked(cells["peak_gib"], over=bool(outcome.out_of_memory))
        table.add_row(*cells.values())
    return table


def about_columns(names: Sequence[str]) -> str:
    """What a help text says of a table's columns."""
    shown = [COLUMNS[name] for name in names]
    width = max(len(column.header) for column in shown)
    lines = []
    for column in shown:
        first, *rest = textwrap.wrap(column.about, 96 - width)
        lines += [f"  {column.header:{width}}  {first}", *(f"  {'':{width}}  {r}" for r in rest)]
    return "\n".join(lines)


def marked(number: str, *, over: bool) -> str:
    """A table's number, or what shows that it is above its limit, also without colour."""
    return f"[red]! {number}[/red]" if over else number


def facts(title: str, rows: Mapping[str, object]) -> Table:
    """Makes a table of names and what they are, texts or whole numbers."""
    table = Table(title=title, title_justify="left", show_header=False, highlight=False)
    table.add_column()
    table.add_column(justify="left" if any(isinstance(x, str) for x in rows.values()) else "right")
    for name, value in rows.items():
        table.add_row(name, value if isinstance(value, str) else f"{value:,.0f}")
    return table


def remark(text: str) -> None:
    """One line on stderr about what was done with the user's data."""
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def progress_bar(task: str, *, of_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """A bar on stderr, lines where that is no terminal.

    What it yields takes (done, total), and what is done at the moment.
    """
    stderr = Console(stderr=True)
    if not stderr.is_terminal:
        with _progress_lines(task, " bytes" if of_bytes else "") as tell:
            yield tell
        return
    done = progress.DownloadColumn() if of_bytes else progress.MofNCompleteColumn()
    columns = "{task.description}", progress.BarColumn(), done, progress.TimeRemainingColumn()
    with progress.Progress(*columns, console=stderr, transient=True) as bars:
        bar = bars.add_task(task, total=None)

        def tell(done: int, total: int, what: str = task) -> None:
            bars.update(bar, description=what, completed=done, total=total)
            if not total:  # nobody knows how much there is: the bar moves to and fro
                bars.tasks[0].total = None

        yield tell


@contextmanager
def counting_bar(task: str, total: int) -> Iterator[Callable[[], None]]:
    """A :func:`progress_bar` to whose count each call adds one."""
    with progress_bar(task) as tell:
        done = count(1)
        yield lambda: tell(next(done), total)


@contextmanager
def _progress_lines(task: str, unit: str) -> Iterator[Callable[..., None]]:
    """A line on stderr after :data:`QUIET_S`, and each time that as long again has gone by, or
    :data:`LONGEST_S`. What is left is estimated from the time since the count began.
    """
    start_s = begun_s = time.monotonic()
    now, ended = (0, 0, task), Event()

    def note(done: int, total: int, what: str = task) -> None:
        nonlocal now, begun_s
        if done < now[0]:
            begun_s = time.monotonic()
        now = done, total, what

    def tell() -> None:
        wait_s = QUIET_S
        while not ended.wait(wait_s):
            gone_s = time.monotonic() - start_s
            wait_s = min(gone_s, LONGEST_S)
            done, total, what = now
            so_far = f" {done:,} of {total:,}{unit}" if total else ""
            left = ""
            if 0 < done < total:
                left_s = (time.monotonic() - begun_s) * (total - done) / done
                left = f", about {left_s:.0f} s left"
            print(f"{what}:{so_far} after {gone_s:.0f} s{left}", file=sys.stderr, flush=True)

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield note
    finally:
        ended.set()
        teller.join()


def check_file(flag: str, path: Path | None) -> None:
    """Raises :class:`ConfigError` where no file can be written; makes the folder."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; add a file name")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write {flag} {path}: {error.strerror or error}; choose another place"
        ) from None


def check_picture(flag: str, path: Path | None) -> None:
    """As :func:`check_file`, and raises :class:`ConfigError` for an ending that is no picture's."""
    if path is not None and path.suffix.lower() not in ("", ".png", ".svg"):
        raise ConfigError(f"{flag} {path} is not a picture; name it .png or .svg")
    check_file(flag, path)

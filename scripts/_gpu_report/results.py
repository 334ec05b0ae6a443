"""What a part has found, in a file that is whole at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text
from megatron_wlb.reading import MAX_RECORD_BYTES, parse_mapping, read_text, typed

CPU = "cpu"
MOST_LETTERS = 1500
"""Of an obstacle; the part's log has all of it."""
TOLD = "GPU_REPORT_TOLD"
"""Names the file descriptor on which a part tells how far it is."""
_ENTRIES = {"part": str, "status": str, "tiny": bool, "figures": dict, "seconds": float}
"""What each file says at least."""


def read(path: Path) -> dict[str, Any] | None:
    """What a part's file says, or None where there is no file.

    Raises :class:`ConfigError` for a file that is none of the report's.
    """
    if not path.exists():
        return None
    try:
        content = parse_mapping(read_text(path, MAX_RECORD_BYTES), is_json=True)
        for name, kind in _ENTRIES.items():
            typed(name, content.get(name), kind)
        return content
    except ConfigError as error:
        raise ConfigError(
            f"{path} is no result of the report ({error}); move it away, or give another --out"
        ) from None


def write(path: Path, content: dict[str, Any]) -> None:
    """All of it or nothing, see :func:`write_text`."""
    write_text(path, json.dumps(content, indent=1) + "\n")


class Results:
    """The file of a part that is measured now. Each figure is written as soon as it is known.

    Goes on from what an earlier start of the same form left on the same machine. A part asks
    :meth:`once` for what takes long, so that a start that was cut off costs only what it was at.
    """

    def __init__(self, out: Path, part: str, *, tiny: bool, machine: str) -> None:
        self.path = out / f"{part}.json"
        self.out, self.tiny = out, tiny
        self._content: dict[str, Any] = {
            "part": part, "status": "running", "why": "", "tiny": tiny, "machine": machine,
            "seconds": 0.0, "figures": {},
        }  # fmt: skip
        left = read(self.path)
        if left is not None and (left["tiny"], left.get("machine")) == (tiny, machine):
            self._content |= {name: left[name] for name in ("seconds", "figures")}
        self._before_s = float(self._content["seconds"])
        self._start_s = time.monotonic()
        self._write()

    @property
    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = self._content["figures"]
        return figures

    @property
    def device(self) -> str:
        """Where the part measures, by torch's name."""
        return CPU if self.tiny else "cuda"

    def put(self, name: str, value: Any) -> None:
        self.figures[name] = value
        self._write()

    def once(self, name: str, make: Callable[[], Any]) -> None:
        """Puts what ``make`` returns, unless it is there already, and tells so."""
        if name not in self.figures:
            start_s = time.monotonic()
            self.put(name, make())
            line = f"    {self.path.stem}: {name} ({time.monotonic() - start_s:.1f} s)\n"
            if TOLD in os.environ:
                with contextlib.suppress(OSError):  # whoever listened may be gone
                    os.write(int(os.environ[TOLD]), line.encode())

    def attempt(self, name: str, make: Callable[[], Any], *failures: type[Exception]) -> None:
        """:meth:`once`, but one of the ``failures`` is put as an ``obstacle``, and tried again by a
        later start.
        """

        def made() -> Any:
            try:
                return make()
            except failures as error:
                print(f"{name}: {error}", *getattr(error, "__notes__", []), sep="\n", flush=True)
                return {"obstacle": str(error)[:MOST_LETTERS]}

        if isinstance(left := self.figures.get(name), dict) and "obstacle" in left:
            del self.figures[name]
        self.once(name, made)

    def end(self, status: str, why: str = "") -> None:
        self._content |= {"status": status, "why": why}
        self._write()

    def _write(self) -> None:
        self._content["seconds"] = round(self._before_s + time.monotonic() - self._start_s, 1)
        write(self.path, self._content)

"""Lets torch unpickle plain values alone, as it loads a checkpoint of its distributed format.

Two of its places run whatever a pickle names: ``.metadata``, which says where everything is, and
the objects beside tensors in ``.distcp``, such as the states of random numbers. Checksums do not
help, as whoever writes a file can write its checksum. ``--ckpt-format torch`` is not covered, nor
is what TransformerEngine unpickles.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, filesystem

from megatron_wlb.errors import CheckpointError
from megatron_wlb.files import open_file
from megatron_wlb.reading import one_line, shown
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.ranks.transfer import from_first_rank
from megatron_wlb.runtime.saving.newest import damaged

_RECORDS = {f"torch.distributed.checkpoint.{one}" for one in ("metadata", "planner", "filesystem")}
_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # from Python 3.13 on
}


def install(patches: PatchSet) -> None:
    """Replaces the two places, until the patches are restored."""
    load_bytes = default_planner.DefaultLoadPlanner.load_bytes

    def load_plain_bytes(planner: Any, item: Any, value: io.BytesIO) -> None:
        try:
            torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            said = named[1] if named else one_line(error)
            raise _refused(f"object {shown(item.dest_index.fqn)}", said) from None
        value.seek(0)
        load_bytes(planner, item, value)

    plain = SimpleNamespace(**{**vars(pickle), "load": lambda file: _Unpickler(file).load()})
    patches.replace(filesystem, "pickle", plain)
    patches.replace(default_planner.DefaultLoadPlanner, "load_bytes", load_plain_bytes)


@contextmanager
def plain_values() -> Iterator[None]:
    """Nothing else is unpickled by torch's distributed checkpoints inside."""
    with PatchSet() as patches:
        install(patches)
        yield


def check_metadata(folder: str | os.PathLike[str], *, sizes: bool = False) -> None:
    """Reads the ``.metadata`` of a checkpoint, if it has one: torch only warns of what is wrong,
    and looks for others. With ``sizes`` the files must be as long as it says. Called by every rank.

    Raises :class:`CheckpointError` on every rank for one that cannot be taken.
    """

    def check() -> None:
        ends: dict[str, int] = {}
        try:
            with suppress(FileNotFoundError), open_file(Path(folder, ".metadata")) as stream:
                for place in _Unpickler(stream).load().storage_data.values():
                    end = place.offset + place.length
                    ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
        except Exception as error:  # unpickling damaged files raises anything
            raise damaged(folder, f".metadata cannot be read ({one_line(error)})") from error
        for name, end in sorted(ends.items()) if sizes else ():
            path = Path(folder, name)
            if not path.is_file():
                raise damaged(folder, f"{shown(name)} is missing")
            if (num_bytes := path.stat().st_size) < end:
                raise damaged(folder, f"{name} has {num_bytes} bytes, expected {end}")

    from_first_rank(check)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Takes torch's records of checkpoints, and types of numbers."""
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if (module == "torch" or module in _RECORDS) and "." not in name:
            found = super().find_class(module, name)
            is_own = isinstance(found, type) and found.__module__ in _RECORDS
            is_record = is_own and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
            if is_record or isinstance(found, torch.dtype):
                return found
        raise _refused("it", f"{module}.{name}")


def _refused(what: str, said: str) -> CheckpointError:
    return CheckpointError(
        f"{what} holds {shown(said)}, and only plain values are taken, as others may run "
        "code; load a checkpoint of those whom you trust"
    )

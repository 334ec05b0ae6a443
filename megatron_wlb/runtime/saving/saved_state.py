"""Reads the planner's state out of a checkpoint without torch's or Megatron's own readers.

Of its pickled values only plain ones are made: text, numbers, lists and dicts. Everything else,
weights and tuples too, becomes an empty stand-in, so no code of a checkpoint runs, no tensor is
read, and neither time nor memory grow beyond those for the file's bytes.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, ClassVar

from megatron_wlb.errors import CheckpointError
from megatron_wlb.files import open_file
from megatron_wlb.reading import MAX_RECORD_BYTES, shown
from megatron_wlb.runtime.saving.checksums import unseal_state
from megatron_wlb.runtime.saving.newest import folder_of, latest

_FILES = ("common.pt", "mp_rank_00/model_optim_rng.pt", "mp_rank_00_000/model_optim_rng.pt")
"""Files by format: ``torch_dist``, then ``torch`` without and with pipeline stages."""
_METADATA = ".metadata"
"""Says where in the files of ``torch_dist`` everything is. From megatron-core 0.19 on they have
what was in ``common.pt``, too, in a list, by the name of :data:`_COMMON`."""
_COMMON = "common_state/"


def newest_state(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """The step of the newest checkpoint in a folder of ``--save`` and its planner's state.

    None where there is no checkpoint. Raises :class:`CheckpointError` as :func:`latest` does,
    and as :func:`state_of`.
    """
    if (step := latest(folder)) is None:
        return None
    return step, dict(state_of(folder_of(folder, step))["planner"])


def state_of(checkpoint: Path) -> dict[str, Any]:
    """What this package has saved in the folder of a checkpoint.

    Raises :class:`CheckpointError` for one that is damaged or has no such state.
    """
    for name in (*_FILES, _METADATA):
        path = checkpoint / name
        if not path.exists():
            continue
        try:
            if name == _METADATA:
                return _state(io.BytesIO(_common(path)))
            with open_file(path) as file:
                return _state(file)
        except Exception as error:  # unpickling damaged files raises anything
            raise CheckpointError(
                f"{path} has no planner's state that can be read ({shown(error)}); use an intact "
                "checkpoint"
            ) from None
    known = ", ".join((*_FILES, _METADATA))
    raise CheckpointError(f"{checkpoint} has none of {known}; use an intact checkpoint")


def _state(file: IO[bytes]) -> dict[str, Any]:
    with zipfile.ZipFile(file) as archive:
        entry = next(one for one in archive.infolist() if one.filename.endswith("data.pkl"))
        # torch compresses nothing, so that no entry is larger than the file.
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > MAX_RECORD_BYTES:
            raise ValueError(f"its entry of {entry.file_size} bytes is none of torch's")
        values = _PlainUnpickler(io.BytesIO(archive.read(entry))).load()
    values = values[0] if isinstance(values, list) else values
    return unseal_state(values["megatron_wlb"])


def _common(metadata: Path) -> bytes:
    """The archive that has the place of ``common.pt``."""
    with open_file(metadata) as file:
        known = _FieldsUnpickler(file).load().fields["storage_data"]
    at = next(at.fields for own, at in known.items() if own.fields["fqn"].startswith(_COMMON))
    with open_file(metadata.with_name(Path(at["relative_path"]).name)) as file:
        file.seek(at["offset"])
        return file.read(min(at["length"], MAX_RECORD_BYTES))


class _StandIn:
    """Takes whatever pickle does with an object."""

    fields: Any = None
    """What the object's fields were set to, if a reader wants to know."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> _StandIn:
        return self

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...

    def add(self, _: Any) -> None: ...


class _PlainUnpickler(pickle._Unpickler):
    """The one in Python: of that in C a few bytes may ask for any amount of memory."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, _: str, __: str) -> Any:
        return _StandIn

    def persistent_load(self, _: Any) -> Any:
        return _StandIn()


def _stand_in(num: int | None) -> Callable[[Any], None]:
    """Puts a stand-in for the last ``num`` values, or for those from the mark on."""

    def load(unpickler: Any) -> None:
        if num is None:
            unpickler.pop_mark()
        elif num:
            del unpickler.stack[-num:]
        unpickler.append(_StandIn())

    return load


_PlainUnpickler.dispatch |= {
    # Tuples too: as keys of a dict, those in one another take time without end.
    opcode[0]: _stand_in(num)
    for opcode, num in (
        (pickle.EMPTY_TUPLE, 0), (pickle.TUPLE1, 1), (pickle.TUPLE2, 2), (pickle.TUPLE3, 3),
        (pickle.TUPLE, None), (pickle.REDUCE, 2), (pickle.NEWOBJ, 2), (pickle.NEWOBJ_EX, 3),
        (pickle.OBJ, None), (pickle.BUILD, 2),
    )
}  # fmt: skip
for _opcode in (pickle.INST, pickle.BYTEARRAY8, pickle.EXT1, pickle.EXT2, pickle.EXT4):
    del _PlainUnpickler.dispatch[_opcode[0]]


class _FieldsUnpickler(_PlainUnpickler):
    """It tells the fields of objects, too."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(_PlainUnpickler.dispatch)

    def _build(self) -> None:
        fields = self.stack.pop()  # type: ignore[attr-defined]
        if isinstance(fields, dict):
            self.stack[-1].fields = fields  # type: ignore[attr-defined]


_FieldsUnpickler.dispatch[pickle.BUILD[0]] = _FieldsUnpickler._build

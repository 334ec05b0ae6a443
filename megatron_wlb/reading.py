"""Reads what a user gives with care: files of YAML and JSON, numbers, names, lists of flags.

Whatever is in a file or a flag, it is read or refused in one line. There is one reader of files and
one of each kind of number, so that a limit holds wherever a value comes from.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from itertools import repeat
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import yaml

from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.files import open_file

MAX_FILE_BYTES = 1 << 18
"""The largest file of settings or measurements; the project writes 30 KB at most."""
MAX_RECORD_BYTES = 1 << 28
"""The largest file of what a run has recorded: steps, results, states."""
_BLOCK_BYTES = 1 << 16
MAX_BITS = 1000
"""The most bits of a whole number in a file: any such fits a float."""
MAX_SIZE = 2**31 - 1
"""The largest whole number where nothing narrower limits it."""
MAX_COUNT = 2**53
"""The largest that a run has counted or numbered: a float holds it."""
MOST_DEVICES = 2**20
"""A number of devices above it is a mistake."""
MOST_LAYERS = 10_000
"""Planning would not come to an end with more."""
MOST_TOKENS = 1 << 28
"""Longest micro-batch: costs are kept by length, 8 bytes each."""
MOST_STEPS_AHEAD = 1000
"""Steps that may be read ahead, batches repacked together, or queues: all wait in memory."""
MOST_MICRO_BATCHES = 1 << 17
"""The most micro-batches of a step: planning so many takes seconds."""
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095
"""The longest name and path of a file on Linux."""
MAX_SHOWN = 60
"""Characters of a wrong value that an error repeats."""

ODD = (
    ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError
)  # fmt: skip
"""What values of another form or kind than expected raise where they are used."""
# What tagged scalars that are none (`!!int foo`, `!!bool foo`, a 40th of May) raise, and deep ones.
_PARSE_ERRORS = (yaml.YAMLError, *ODD)

_T = TypeVar("_T")

Loader = yaml.SafeLoader
"""Makes plain values of YAML: nothing in a file runs code."""


def one_line(error: BaseException) -> str:
    """Puts what an error says into one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return " ".join(str(error).split())[:300] or type(error).__name__


def shown(value: object) -> str:
    """Shows a wrong value as an error repeats it: in one line, cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):
        return "a number of thousands of digits" if isinstance(value, int) else "nested too deep"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> str:
    """Reads a text file. Raises :class:`ConfigError` for one that is missing, too large, no text,
    or no file.
    """
    try:
        with open_file(path) as stream:
            # Memory is taken before it is read, so it goes by the file and not by the limit.
            num_bytes = max(os.fstat(stream.fileno()).st_size, _BLOCK_BYTES)
            content = stream.read(min(num_bytes, max_bytes) + 1)
        if len(content) > max_bytes:
            raise ConfigError(f"it is larger than {max_bytes} bytes, the limit of such a file")
        return content.decode()
    except (OSError, ValueError) as error:  # a NUL in the path, bytes that are no UTF-8
        raise ConfigError(one_line(error)) from None


def parse_mapping(
    text: str, *, is_json: bool = False, loader: type[Loader] = Loader
) -> dict[str, Any]:
    """Reads the names and values that YAML or JSON holds.

    All names in it are text, and all whole numbers fit a float. Raises :class:`ConfigError`
    otherwise.
    """
    try:
        content = json.loads(text) if is_json else yaml.load(text, Loader=loader)
        if not isinstance(content, dict):
            raise ConfigError("expected names and values as `name: value`")
        _check(content)
        return content
    except _PARSE_ERRORS as error:
        reason = one_line(error)
        if isinstance(error, KeyError):  # of `!!bool foo`
            reason = f"{reason} is no value of its kind"
        raise ConfigError(reason) from None


def read_mapping(
    path: str | os.PathLike[str],
    what: str = "",
    remedy: str = "",
    max_bytes: int = MAX_FILE_BYTES,
) -> dict[str, Any]:
    """Reads a mapping from a file: JSON or YAML by its ending, else by its first character.

    Raises :class:`ConfigError` that begins with ``what`` and the path and ends with ``remedy``.
    """
    path = Path(path)
    try:
        text = read_text(path, max_bytes)
        is_json = path.suffix == ".json"
        if path.suffix not in (".json", ".yaml", ".yml"):
            is_json = text.lstrip().startswith("{")
        return parse_mapping(text, is_json=is_json)
    except ConfigError as error:
        remedy = f"; {remedy}" if remedy else ""
        raise ConfigError(f"{what} {path}: {error}{remedy}".lstrip()) from None


def _check(value: object) -> None:
    """Raises :class:`ConfigError` for a name that is no text, and for a number that fits no float.

    A list that an alias puts into itself raises :class:`RecursionError`.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"the name {shown(name)} is not a text; put it in quotes")
            _check(inner)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            _check(inner)
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ConfigError("it has a whole number of hundreds of digits; give a smaller one")


def whole_number(name: str, value: object, least: int, most: int = MAX_SIZE) -> int:
    """Returns ``value`` if it is a whole number in ``[least, most]``, numpy's too.

    Raises :class:`ConfigError`, which names it ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} is {shown(value)}; give a whole number")
    _check_limits(name, int(value), least, most)
    return int(value)


def real_number(name: str, value: object, least: float = 0.0, most: float = math.inf) -> float:
    """Returns ``value`` if it is a finite number in ``[least, most]``, numpy's too.

    Raises :class:`ConfigError`, which names it ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} is {shown(value)}; give a number")
    number = int(value) if isinstance(value, Integral) else float(value)
    if isinstance(number, float) and not math.isfinite(number):
        raise ConfigError(f"{name} is {number}; give a finite number")
    _check_limits(name, number, least, most)
    return float(number)


def truth(name: str, value: object) -> bool:
    """Returns ``value`` if it is true or false. Raises :class:`ConfigError` otherwise."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {shown(value)}; give true or false")
    return value


def _check_limits(name: str, value: float, least: float, most: float) -> None:
    if value < least:
        raise ConfigError(f"{name} is {shown(value)}; give at least {least}")
    if value > most:
        raise ConfigError(f"{name} is {shown(value)}; give at most {most}")


def listed(name: str, values: object) -> Sequence[Any]:
    """Returns ``values`` if it is a list. Raises :class:`ConfigError` otherwise."""
    if not isinstance(values, list | tuple):
        raise ConfigError(f"{name} is {shown(values)}; give a list")
    return values


def typed(name: str, value: object, hint: Any) -> Any:
    """Returns a value of JSON or YAML as the type ``hint`` has it: lists become tuples where it
    says so. Whole numbers are within 2⁵³, others finite.

    Raises :class:`ConfigError`, which names it ``name``, for one of another type.
    """
    of, inner = typing.get_origin(hint), typing.get_args(hint)
    if of in (typing.Union, types.UnionType):
        if value is None and types.NoneType in inner:
            return None
        (hint,) = (one for one in inner if one is not types.NoneType)
        return typed(name, value, hint)
    if of is typing.Literal:
        if not any(type(value) is type(one) and value == one for one in inner):
            raise ConfigError(f"{name} is {shown(value)}; give {' or '.join(map(str, inner))}")
        return value
    if of in (list, tuple):
        items = listed(name, value)
        hints = repeat(inner[0]) if of is list or inner[-1] is ... else inner
        if hints is inner and len(items) != len(inner):
            raise ConfigError(f"{name} is {shown(value)}; give {len(inner)} values")
        return of(typed(name, item, one) for item, one in zip(items, hints, strict=False))
    if hint is bool:
        return truth(name, value)
    if hint is int:
        return whole_number(name, value, -MAX_COUNT, MAX_COUNT)
    if hint is float:
        return real_number(name, value, -math.inf)
    kind = of or hint  # of mappings, what they hold is for their reader
    if kind is not Any and not isinstance(value, kind):
        raise ConfigError(f"{name} is {shown(value)}; give {_KINDS[kind]}")
    return value


_KINDS = {str: "text", dict: "names and values", Mapping: "names and values"}


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def record(what: str, kind: type[_T], values: object) -> _T:
    """Makes a dataclass of the names and values that JSON or YAML holds of it.

    Raises :class:`ConfigError`, which begins with ``what``, for names that are unknown or missing,
    and for values of another type than the dataclass has.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{what}{shown(values)} is not a table; give names and values")
    own = fields(kind)  # type: ignore[arg-type]
    needed = [f.name for f in own if f.default is MISSING and f.default_factory is MISSING]
    check_names(what, "entry", values, [f.name for f in own], needed)
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{name: typed(f"{what}{name}", v, hints[name]) for name, v in values.items()})


@contextlib.contextmanager
def reading_state(of: str) -> Iterator[None]:
    """Makes :class:`CheckpointError` of whatever a saved state of another form raises in it."""
    try:
        yield
    except (ConfigError, *ODD) as error:
        reason = str(error) if isinstance(error, ConfigError) else repr(error)
        raise CheckpointError(
            f"not the state of {of} ({' '.join(reason[:300].split())}); use an intact checkpoint"
        ) from None


def check_names(
    what: str,
    kind: str,
    values: Mapping[str, Any],
    known: Iterable[str],
    required: Iterable[str] = (),
) -> None:
    """Raises :class:`ConfigError` for a name that is not ``known`` (the nearest one is named), or
    for all ``required`` ones that are missing.
    """
    known = list(known)
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1) or known
            raise ConfigError(f"{what}unknown {kind} {shown(name)[1:-1]}; use {near[0]}")
    if missing := [name for name in required if name not in values]:
        are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
        raise ConfigError(f"{what}{', '.join(missing)} {are} missing; add {them}")


def unknown(what: str, name: str, names: Iterable[str], other: str = "") -> ConfigError:
    """Makes the error for a name that is none of ``names``: lists them all, the nearest first."""
    names = list(names)
    near = [known for known in names if name and known.startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {' or '.join(near)}? There are" if near else "use one of"
    return ConfigError(f"unknown {what} {shown(name)[1:-1]}; {hint} {', '.join(names)}{other}")


def shipped(kind: str) -> dict[str, Path]:
    """The files ``configs/KIND/*.yaml`` that come with the project, by name.

    A checkout has them beside the package, an installed package has a copy inside.
    """
    package = Path(__file__).resolve().parent
    folders = (package.parent / "configs" / kind, package / "configs" / kind)
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def named_file(kind: str, name_or_path: str, names: Callable[[], Iterable[str]]) -> Path:
    """The shipped file called so, or the path of a YAML or JSON file.

    Raises :class:`ConfigError` that lists ``names`` for an unknown one.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".json"):
        return path
    found = shipped(kind).get(name_or_path.lower())
    if found is None:
        raise unknown(kind, name_or_path, names(), ", or give a YAML file")
    return found


def decimal(text: str) -> float:
    """Reads a flag's value that is a finite number, for argparse."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not finite; give a finite number")
    return value


def text_of_flag(text: str) -> str:
    """Reads a flag's value that may be a path, for argparse: without NULs and overlong names."""
    if "\0" in text:
        raise argparse.ArgumentTypeError("it has a NUL; give a name without")
    longest = max(len(os.fsencode(name)) for name in text.split("/"))
    if longest > MAX_NAME_BYTES or len(os.fsencode(text)) > MAX_PATH_BYTES:
        raise argparse.ArgumentTypeError(
            f"{text[:20]}… has {longest} bytes between slashes and {len(os.fsencode(text))} in all;"
            f" names have at most {MAX_NAME_BYTES}, paths {MAX_PATH_BYTES}"
        )
    return text


def path_of_flag(text: str) -> Path:
    return Path(text_of_flag(text))


class Several(argparse.Action):
    """A flag that takes a list: ``16 32``, ``16,32``, ``16, 32`` and ``(16,32)`` are the same.

    ``of`` makes a value of each word. A corpus that comes after the list is no part of it, but goes
    to the parser's ``prefixes``. Raises :class:`ConfigError` for words that are no values.
    """

    def __init__(self, *, of: Callable[[str], Any] = str, **kwargs: Any) -> None:
        super().__init__(**kwargs, nargs="+")
        self._of = of

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        corpora = [word for word in values[1:] if os.path.isfile(f"{word}.idx")]
        if corpora and hasattr(namespace, "prefixes"):
            values = [word for word in values if word not in corpora]
            namespace.prefixes = [*(namespace.prefixes or []), *corpora]
        words = [word for value in values for word in value.strip("()").split(",") if word]
        if not words:
            raise ConfigError(f"{option_string} names none; give some, as in a,b or a b")
        try:
            setattr(namespace, self.dest, [self._of(word) for word in words])
        except ValueError:
            raise ConfigError(
                f"{option_string} {shown(' '.join(values))[1:-1]} is not a list of whole numbers; "
                "write several as 4 16 or 4,16"
            ) from None


_EXPRESSION = 10_000
"""The most characters of an expression, and entries of a list that it says."""


def read_pattern(text: str) -> int | list[int] | None:
    """What a pattern of layers says, as Megatron's flags write it: N, or a list that Python would
    make of sums and multiples of lists. None where it is anything else.
    """
    try:
        return _pattern(ast.parse(text[:_EXPRESSION].strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _pattern(node: ast.expr) -> int | list[int]:
    """A number or list of numbers. Raises :class:`ValueError` for anything else, or too long."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        entries = [_pattern(entry) for entry in node.elts]
        if all(isinstance(entry, int) for entry in entries):
            return entries  # type: ignore[return-value]
    if isinstance(node, ast.BinOp):
        left, right = _pattern(node.left), _pattern(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return (left + right)[:_EXPRESSION]
        if isinstance(node.op, ast.Mult):
            if isinstance(left, int):
                left, right = right, left
            if isinstance(left, list) and isinstance(right, int) and right <= _EXPRESSION:
                return (left * right)[:_EXPRESSION]
    raise ValueError

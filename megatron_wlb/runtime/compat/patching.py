"""Replacing names in other people's modules: explicit, checked, undone by one call."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_wlb.errors import CompatibilityError

_MISSING = object()


@dataclass
class PatchSet:
    """Replaces attributes and restores them all, newest first.

    A second replacement of the same name is an error: two features that both want a name would
    silently undo each other. In a ``with`` statement it restores all at the end.
    """

    _saved: list[tuple[Any, str, Any]] = field(default_factory=list)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets ``owner.name``; ``owner`` may be a module's dotted name.

        Raises :class:`CompatibilityError` where there is no such module or attribute, or this set
        has already replaced it.
        """
        owner = _module(owner)
        label = f"{getattr(owner, '__name__', owner)}.{name}"
        if any(o is owner and n == name for o, n, _ in self._saved):
            raise CompatibilityError(f"{label} is already replaced; a name has one owner")
        old = (
            vars(owner).get(name, _MISSING)
            if isinstance(owner, type)
            else getattr(owner, name, _MISSING)
        )
        if old is _MISSING:
            raise _missing(label)
        self._saved.append((owner, name, old))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        """Replaces a function by ``hook(original, …)``; errors are those of :meth:`replace`."""
        original = getattr(_module(owner), name, _MISSING)
        self.replace(owner, name, functools.partial(hook, original))
        functools.update_wrapper(getattr(_module(owner), name), original)  # type: ignore[arg-type]

    def __enter__(self) -> PatchSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __bool__(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._saved)

    def restore(self) -> None:
        """Puts everything back; afterwards the set is empty and can be used again."""
        while self._saved:
            owner, name, old = self._saved.pop()
            setattr(owner, name, old)


def _module(owner: Any) -> Any:
    """The module of a dotted name; anything else as it is."""
    if not isinstance(owner, str):
        return owner
    try:
        return importlib.import_module(owner)
    except ImportError as error:
        raise _missing(owner, f" ({error})") from None


def _missing(label: str, why: str = "") -> CompatibilityError:
    return CompatibilityError(
        f"{label} is missing{why}: this version of {label.split('.')[0]} is not one that "
        "megatron-wlb knows; install the versions in its constraints file"
    )

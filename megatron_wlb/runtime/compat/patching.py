"""Replacing names in other people's modules: explicit, checked, undone by one call."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from megatron_wlb.errors import CompatibilityError

_MISSING = object()


@dataclass
class PatchSet:
    """Replaces attributes and restores them all, newest first.

    A second replacement of the same name is an error: two features that both want a name would
    silently undo each other.
    """

    _saved: list[tuple[Any, str, Any]] = field(default_factory=list)

    def replace(self, owner: Any, name: str, value: Any, *, create: bool = False) -> None:
        """Sets ``owner.name``; ``owner`` may be a module's dotted name.

        Raises:
            CompatibilityError: there is no such module or attribute (unless ``create``), or this
                set has already replaced it.
        """
        if isinstance(owner, str):
            try:
                owner = importlib.import_module(owner)
            except ImportError as error:
                raise CompatibilityError(
                    f"{owner} is missing ({error}): this version of {owner.split('.')[0]} is not "
                    "one that megatron-wlb knows; install the versions in its constraints file"
                ) from None
        label = f"{getattr(owner, '__name__', owner)}.{name}"
        if any(o is owner and n == name for o, n, _ in self._saved):
            raise CompatibilityError(f"{label} is already replaced; a name has one owner")
        old = (
            vars(owner).get(name, _MISSING)
            if isinstance(owner, type)
            else getattr(owner, name, _MISSING)
        )
        if old is _MISSING and not create:
            raise CompatibilityError(
                f"{label} is missing: this version of {label.split('.')[0]} is not one that "
                "megatron-wlb knows; install the versions in its constraints file"
            )
        self._saved.append((owner, name, old))
        setattr(owner, name, value)

    def __bool__(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._saved)

    def restore(self) -> None:
        """Puts everything back; afterwards the set is empty and can be used again."""
        while self._saved:
            owner, name, old = self._saved.pop()
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

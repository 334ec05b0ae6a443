"""Replaced names: one owner each, restored by one call."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.compat.patching import PatchSet


class Base:
    def inherited(self) -> str:
        return "base"


class Owner(Base):
    limit = 3

    @staticmethod
    def helper() -> str:
        return "stock"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``foreign.inner`` with one attribute, importable."""
    inner = ModuleType("foreign.inner")
    inner.width = 80  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "foreign", ModuleType("foreign"))
    monkeypatch.setitem(sys.modules, "foreign.inner", inner)
    return inner


def test_restore_puts_back_what_was_there(module: Any) -> None:
    helper = vars(Owner)["helper"]
    patches = PatchSet()
    patches.replace(module, "width", 100)
    patches.replace(Owner, "limit", 7)
    patches.replace(Owner, "helper", staticmethod(lambda: "ours"))
    assert (module.width, Owner.limit, Owner.helper()) == (100, 7, "ours")
    patches.restore()
    assert (module.width, Owner.limit, Owner.helper()) == (80, 3, "stock")
    assert vars(Owner)["helper"] is helper  # still a static method


def test_wrap_passes_the_original_and_keeps_its_name(module: Any) -> None:
    def area(side: int) -> int:
        return side * module.width

    module.area = area
    patches = PatchSet()
    patches.wrap("foreign.inner", "area", lambda original, side: original(side) + 1)
    assert (module.area(2), module.area.__name__) == (161, "area")
    patches.restore()
    assert module.area is area
    with pytest.raises(CompatibilityError, match=r"foreign\.inner\.volume is missing"):
        patches.wrap("foreign.inner", "volume", print)
    with pytest.raises(CompatibilityError, match=r"foreign\.other is missing"):
        patches.wrap("foreign.other", "volume", print)


def test_second_replacement_of_a_name_is_refused(module: Any) -> None:
    patches = PatchSet()
    patches.replace("foreign.inner", "width", 100)
    with pytest.raises(CompatibilityError, match=r"^foreign\.inner\.width is already replaced"):
        patches.replace(module, "width", 120)
    assert module.width == 100
    patches.replace(Owner, "limit", 7)  # another name, another owner
    patches.restore()
    assert (module.width, Owner.limit) == (80, 3)


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        ("foreign.inner", "gone", r"^foreign\.inner\.gone is missing: this version of foreign is"),
        ("foreign.outer", "width", r"^foreign\.outer is missing .*: this version of foreign is"),
        ("nowhere", "width", r"^nowhere is missing \(No module named 'nowhere'\)"),
        (Owner, "gone", r"^Owner\.gone is missing"),
    ],
)
@pytest.mark.usefixtures("module")
def test_missing_target_names_it_and_the_remedy(owner: Any, name: str, message: str) -> None:
    patches = PatchSet()
    with pytest.raises(CompatibilityError, match=message) as caught:
        patches.replace(owner, name, 1)
    assert str(caught.value).endswith("install the versions in its constraints file")
    assert "\n" not in str(caught.value)
    patches.restore()
    assert not hasattr(owner, name)

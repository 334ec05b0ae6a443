"""Megatron's source, read without importing it."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.compat.source import ANYTHING, MegatronSource

INFO = 'MAJOR = 1\nMINOR = 2\nPATCH = 3\nPRE_RELEASE = "rc4"\n__package_name__ = "x"\n'
MODULE = """
import os
from elsewhere import borrowed, other as renamed
from megatron.core.parts import packaged
from .parts.inner import ending as again
try:
    from fast import Adam
except ImportError:
    Adam = None
LIMIT: int = 3
if LIMIT:
    def chosen(a, b=1): ...
else:
    def chosen(c): ...

def plain(a, /, b, c=2, *rest, d, e=4, **more): ...
async def later(x): ...

class Stock:
    width = 80
    def __init__(self, pp_group: Group, config: Optional[int] = None): ...
    @staticmethod
    def helper(value): ...
    class Inner:
        def deep(self, y): ...

class Bare: ...

def outer():
    def hidden(): ...
"""


@pytest.fixture
def source(tmp_path: Path) -> MegatronSource:
    core = tmp_path / "megatron" / "core"
    (core / "parts").mkdir(parents=True)
    (core / "package_info.py").write_text(INFO)
    (core / "module.py").write_text(MODULE)
    (core / "parts" / "__init__.py").write_text("from .inner import packaged, ending\n")
    (core / "parts" / "inner.py").write_text("def packaged(z): ...\ndef ending(): ...\n")
    return MegatronSource.at(tmp_path)


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("plain", "a, /, b, c=2, *rest, d, e=4, **more"),
        ("later", "x"),
        ("chosen", "c"),  # the last statement that binds it
        ("Stock", "self, pp_group, config=None"),
        ("Stock.__init__", "self, pp_group, config=None"),
        ("Stock.helper", "value"),
        ("Stock.Inner.deep", "self, y"),
        ("packaged", "z"),  # defined in another module
        ("again", ""),
        ("Bare", ANYTHING),
        ("Stock.width", ANYTHING),
        ("borrowed", ANYTHING),
        ("renamed", ANYTHING),
        ("Adam", ANYTHING),
        ("LIMIT", ANYTHING),
    ],
)
def test_signature_is_that_of_the_definition(
    source: MegatronSource, path: str, parameters: str
) -> None:
    assert source.signature(f"megatron.core.module:{path}") == parameters


def test_folder_without_megatron_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError, match="give the folder that has megatron/core in it"):
        MegatronSource.at(tmp_path)
    package_info = tmp_path / "megatron" / "core" / "package_info.py"
    package_info.parent.mkdir(parents=True)
    package_info.write_text("MAJOR = 1\n")
    with pytest.raises(CompatibilityError, match="does not say MINOR"):
        MegatronSource.at(tmp_path)


def test_installed_source_agrees_with_the_imported_module() -> None:
    source = MegatronSource.installed()
    core = importlib.import_module("megatron.core")
    assert source.version == core.__version__.partition("+")[0]  # of a checkout around it
    assert source.core_root == Path(core.__path__[0]).resolve().parents[1]
    module = "megatron.core.pipeline_parallel.schedules"
    function = importlib.import_module(module).forward_backward_pipelining_with_interleaving
    found = source.signature(f"{module}:{function.__name__}")
    assert found is not None
    names = [word.partition("=")[0] for word in found.split(", ") if word != "*"]
    assert names == list(inspect.signature(function).parameters)

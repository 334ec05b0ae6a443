"""Megatron's source, read without importing it: where it is, its version, its signatures.

So a checkout or an unpacked wheel of any version can be checked, on any Python, without torch.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path
from typing import Final

from megatron_wlb.errors import CompatibilityError

_PACKAGE_INFO = Path("megatron", "core", "package_info.py")


ANYTHING: Final = "*args, **kwargs"
"""The parameters of a name that is no function of Megatron's: a constant, or of another package."""


@dataclass(frozen=True)
class MegatronSource:
    """A folder that holds ``megatron/core``, and in a checkout ``megatron/training``."""

    core_root: Path
    version: str

    @classmethod
    def at(cls, path: str | Path) -> MegatronSource:
        """The source in a checkout, a ``site-packages``, or an unpacked wheel.

        Raises :class:`CompatibilityError` where there is none, or it does not say its version.
        """
        root = Path(path).expanduser().resolve()
        if not (root / _PACKAGE_INFO).is_file():
            raise CompatibilityError(
                f"{path} has no {_PACKAGE_INFO}; give the folder that has megatron/core in it: a "
                "Megatron-LM checkout, or a site-packages"
            )
        return cls(root, _version(root / _PACKAGE_INFO))

    @classmethod
    def installed(cls) -> MegatronSource:
        """The source that ``import megatron.core`` would take.

        Raises :class:`CompatibilityError` where megatron-core is not installed.
        """
        try:
            spec = importlib.util.find_spec("megatron.core")
        except ModuleNotFoundError:  # no package megatron either
            spec = None
        locations = list(spec.submodule_search_locations or ()) if spec else []
        if not locations:
            raise CompatibilityError(
                "megatron-core is not installed; pip install 'megatron-core>=0.18', or put a "
                "Megatron-LM checkout on PYTHONPATH"
            )
        root = Path(locations[0]).resolve().parents[1]
        return cls(root, _version(root / _PACKAGE_INFO))

    @property
    def has_training(self) -> bool:
        """Whether ``megatron.training`` is there: of 0.18 on, but not in every tree of sources."""
        return (self.core_root / "megatron" / "training" / "training.py").is_file()

    def file(self, module: str) -> Path | None:
        """The file of a module of Megatron, or None where there is none."""
        path = self.core_root.joinpath(*module.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
        return None

    def signature(self, target: str) -> str | None:
        """The parameters of ``module:Class.name`` as they are written, defaults included, without
        annotations; None if the module has no such name.

        Those of a class are its ``__init__``'s. A name that another module of Megatron defines is
        looked up there. What is not known here is :data:`ANYTHING`.
        """
        module, _, path = target.partition(":")
        found: ast.AST | None = self._tree(module)
        for name in path.split("."):
            if found is None:
                return None
            found = _member(found, name)
        if isinstance(found, ast.ClassDef):
            found = _member(found, "__init__") or found
        match found:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for argument in ast.walk(found.args):
                    if isinstance(argument, ast.arg):
                        argument.annotation = None
                return ast.unparse(found.args)
            case ast.ImportFrom():
                (named,) = (a.name for a in found.names if (a.asname or a.name) == path)
                origin = "." * found.level + (found.module or "")
                file = self.file(module)
                is_package = file is not None and file.name == "__init__.py"
                package = module if is_package else module.rpartition(".")[0]
                origin = resolve_name(origin, package)
                is_ours = origin.startswith("megatron.")
                known = self.signature(f"{origin}:{named}") if is_ours else None
                return ANYTHING if known is None else known
        return None if found is None else ANYTHING

    def _tree(self, module: str) -> ast.Module | None:
        path = self.file(module)
        return None if path is None else _parsed(path.read_text(encoding="utf-8"))


@functools.cache
def _parsed(text: str) -> ast.Module:
    """A process that is forked from another one has its trees."""
    return ast.parse(text)


def _member(scope: ast.AST, name: str) -> ast.AST | None:
    """The last statement that binds ``name`` in a module or class, ``if`` and ``try`` included."""
    found: ast.AST | None = None
    for node in _statements(getattr(scope, "body", [])):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                bound = [node.name]
            case ast.Import() | ast.ImportFrom():
                bound = [(a.asname or a.name).partition(".")[0] for a in node.names]
            case ast.Assign():
                bound = [t.id for t in node.targets if isinstance(t, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=identifier)):
                bound = [identifier]
            case _:
                bound = []
        if name in bound:
            found = node
    return found


def _statements(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The statements of a body and of its branches, not of its functions and classes."""
    flat: list[ast.stmt] = []
    for node in body:
        flat.append(node)
        if isinstance(node, ast.If | ast.Try | ast.With):
            inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            for handler in getattr(node, "handlers", []):
                inner += handler.body
            flat += _statements(inner)
    return flat


def _version(package_info: Path) -> str:
    """``__version__`` of megatron-core, put together as its file does."""
    values: dict[str, object] = {}
    for node in ast.parse(package_info.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values |= {t.id: node.value.value for t in node.targets if isinstance(t, ast.Name)}
    try:
        numbers = ".".join(str(values[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    except KeyError as error:
        raise CompatibilityError(
            f"{package_info} does not say {error.args[0]}; it is not megatron-core's: reinstall it"
        ) from None
    return f"{numbers}{values.get('PRE_RELEASE', '')}"

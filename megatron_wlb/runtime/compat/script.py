"""Whether a script hands the code of Megatron's own ``pretrain_gpt.py`` or ``pretrain_hybrid.py``
to ``pretrain``.

Plans bring batches, a forward step and a loss of their own, so a script's own would not run. They
compute what Megatron's do; of any other code nobody could tell.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import logging
import sys
import textwrap
from pathlib import Path
from types import FunctionType
from typing import Any

from megatron_wlb.errors import refuse_all
from megatron_wlb.runtime.compat import hooks

logger = logging.getLogger(__name__)

_STAND_IN = str(Path(__file__).parents[2] / "pretrain_gpt.py")
_LIBRARIES = frozenset({"megatron", "torch"} | sys.stdlib_module_names)
_SAYS_NOTHING = frozenset({"ctx", "kind", "annotation", "returns", "type_comment", "type_params"})
"""Parts of a syntax tree that change no result, or that not every version of Python has."""


def check(version: str, forward_step: Any, datasets_provider: Any) -> None:
    """Compares what a script hands over with the known versions' own; any of them will do.

    Only warns with a version of which tests know less: it may bring another script.

    Raises :class:`ConfigError` for code that would be left out.
    """
    known = hooks.known(version)
    messages = []
    versions = hooks.VERSIONS.values()
    for function, own, what, remedy in (
        (
            forward_step,
            {own for v in versions for own in v.forward_steps},
            "forward step or loss",
            " with your loss in --wlb-loss FILE.py",
        ),
        (datasets_provider, {own for v in versions for own in v.datasets}, "data sets", ""),
    ):
        place = getattr(getattr(function, "__code__", None), "co_filename", "the script")
        if place != _STAND_IN and (found := fingerprint(function)) not in own:
            messages.append(
                f"{place} has {what} of its own ({found}), not those of Megatron-LM's "
                "pretrain_gpt.py or pretrain_hybrid.py, and they would not run: --wlb-packing "
                f"brings the plan's; run the checkout's unedited script{remedy}, or leave out the "
                "--wlb flags"
            )
    if known is not None and known.tested:
        refuse_all(messages)
    for message in messages:
        logger.warning("%s", message)


def fingerprint(function: Any) -> str:
    """A digest of a function and of all that it names outside Megatron, torch and Python's library.

    Layout, comments, docstrings and annotations do not count.
    """
    parts: dict[str, Any] = {}
    todo = [("", function)]
    while todo:
        name, value = todo.pop()
        if not isinstance(value, FunctionType):
            value = getattr(value, "__wrapped__", value)  # of functools.cache
        if type(value) in (int, float):
            parts[name] = value
        if not isinstance(value, FunctionType) or name in parts:
            continue
        if (value.__module__ or "").partition(".")[0] in _LIBRARIES:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(value.__code__)))
        except (OSError, SyntaxError):  # made at run time, or a lambda
            parts[name] = None
            continue
        parts[name] = _shape(tree.body)
        names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
        todo += [(n, value.__globals__[n]) for n in names if n in value.__globals__]
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:12]


def _shape(node: Any) -> Any:
    if isinstance(node, list):
        return [_shape(one) for one in node]
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    said = [(name, _shape(value)) for name, value in fields.items() if name not in _SAYS_NOTHING]
    return type(node).__name__, [(name, value) for name, value in said if value not in (None, [])]

"""The names of Megatron that this package calls or replaces, with all parameters and defaults, by
version.

Most are not public: a release may change them without a word. Some changes would not fail but
compute something else, as a new parameter does whose default is not what Megatron's own caller
passes. So all are checked once, before anything is built, and from the source, so that
`wlb doctor` can say of a checkout whether it fits before it is used.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.compat.megatron_lm import MegatronLM, MegatronLM018, MegatronLM019
from megatron_wlb.runtime.compat.source import MegatronSource

logger = logging.getLogger(__name__)

FILE: Final = Path(__file__).with_name("signatures.txt")
"""``module:name VERSION (parameters)`` a line, in force until the next line of the name.

``scripts/megatron_signatures.py`` writes it; each of its lines was looked at.
"""
_OF_PATCHES: Final = "shape_provider"
"""A parameter that the patches of ``patches/`` add."""
MISSING: Final = "missing"


@dataclass(frozen=True)
class Version:
    """What is hooked in one version, and how far that was tried."""

    tested: bool
    """Whether the launcher's tests and the ragged pipelines pass with it."""
    forward_steps: tuple[str, str]
    """The forward steps of its ``pretrain_gpt.py`` and ``pretrain_hybrid.py``, loss and batch
    included, as :func:`megatron_wlb.runtime.compat.script.fingerprint` names them."""
    datasets: tuple[str, str]
    """Their providers of data sets, likewise."""
    adapter: MegatronLM = field(default_factory=MegatronLM)
    """How ``megatron.training`` is spoken to."""


VERSIONS: Mapping[str, Version] = {
    "0.18.2": Version(
        True, ("cabe277b4b45", "02c5bcff629b"), ("313315a344a8", "19bac29d4ed3"), MegatronLM018()
    ),
    "0.19.2": Version(
        True, ("276656f016f4", "52bb6cf23439"), ("d999d1ae854a", "479bda76ea80"), MegatronLM019()
    ),
    "0.20.0": Version(  # not released: Megatron's main
        False, ("276656f016f4", "52bb6cf23439"), ("d999d1ae854a", "479bda76ea80")
    ),
}
"""One of each series; the others of the series count as it does."""


def known(version: str) -> Version | None:
    """The version of the series that a version is of, or None."""
    return next((VERSIONS[v] for v in VERSIONS if _series(v) == _series(version)), None)


def check(*, source: MegatronSource | None = None, allow_untested: bool = False) -> None:
    """Checks the installed megatron-core, or ``source``, against the table, and
    ``megatron.training`` where it is there.

    ``allow_untested`` warns of an unknown version, which is held against the nearest one below, and
    of other parameters. A name that is missing, or asks for more than we give, still is an error.

    Raises :class:`CompatibilityError` for a version that is not in the table, or a name that is
    missing or takes other parameters.
    """
    problems_of = problems if source else problems_of_installed
    source = source or MegatronSource.installed()
    version, found = source.version, known(source.version)
    if found is None:
        if not allow_untested:
            raise CompatibilityError(
                f"megatron-core {version} is installed; megatron-wlb knows {', '.join(VERSIONS)}: "
                "install one of them (constraints.txt has the tested one), or go on at your own "
                "risk with --wlb-allow-untested-megatron"
            )
        logger.warning(
            "megatron-core %s is unknown to megatron-wlb, which is checked with %s; compare the "
            "losses with a run of --wlb-packing original on a known version before you trust them",
            version,
            ", ".join(VERSIONS),
        )
    elif not found.tested:
        logger.warning(
            "megatron-core %s: names and signatures are checked, but training with it is tested "
            "less than with %s",
            version,
            ", ".join(v for v, known in VERSIONS.items() if known.tested),
        )
    for target, problem in problems_of(source).items():
        if problem is None:
            continue
        if not allow_untested or problem.startswith(("is missing", "asks for")):
            raise CompatibilityError(
                f"megatron-core {version}: {target} {problem}; it is not the released "
                f"one: install a release of {', '.join(VERSIONS)}; at your own risk "
                "--wlb-allow-untested-megatron goes on with other parameters"
            )
        logger.warning("megatron-core %s: %s %s", version, target, problem)


def problems(source: MegatronSource) -> dict[str, str | None]:
    """What is wrong with each name, in words that follow it; None where it fits. The names of
    ``megatron.training`` count only where the source has it.
    """
    return {
        target: _problem(source.signature(target), expected)
        for target, expected in expected_of(source.version).items()
        if source.has_training or not target.startswith("megatron.training")
    }


problems_of_installed = cache(problems)
"""What a process has imported stays as it is."""


def expected_of(version: str) -> dict[str, str]:
    """The parameters of each name in a version, or else in the nearest one below, or the first."""
    last, found = _series(_nearest(version)), dict[str, str]()
    for line in FILE.read_text(encoding="utf-8").splitlines():
        target, since, parameters = line.split(" ", 2)
        if _series(since) <= last:
            found[target] = parameters
    return {target: text[1:-1] for target, text in found.items() if text != MISSING}


def version_of(version: str) -> Version:
    """The entry of that version, or else of the nearest one below, or the first."""
    return VERSIONS[_nearest(version)]


def adapter() -> MegatronLM:
    """How the installed ``megatron.training`` is spoken to."""
    return version_of(MegatronSource.installed().version).adapter


def _series(version: str) -> tuple[int, ...]:
    """``0.20.0rc0`` -> ``(0, 20)``."""
    return tuple(int(part) for part in version.split(".")[:2])


def _nearest(version: str) -> str:
    below = [v for v in VERSIONS if _series(v) <= _series(version)]
    return (below or list(VERSIONS)[:1])[-1]


def _problem(found: str | None, expected: str) -> str | None:
    if found is None:
        return "is missing"
    if found == expected:
        return None
    theirs, ours = _parameters(found), _parameters(expected)
    theirs.pop(_OF_PATCHES, None)
    for name in ours.keys() - theirs.keys():
        return f"lacks the parameter {name}"
    if [name for name in theirs if name in ours] != list(ours):
        return f"takes its parameters in another order than {expected}"
    for name, default in sorted(theirs.items(), key=lambda item: item[1] is not None):
        if default is None and ours.get(name, "") is not None:
            return f"asks for the parameter {name} too"
        if name not in ours:
            return f"has the new parameter {name}={default}"
        if ours[name] != default:
            return f"has the default {name}={default}, not {ours[name]}"
    return None


def _parameters(text: str) -> dict[str, str | None]:
    """``a, b=1, *c`` -> names, with their defaults."""
    args = ast.parse(f"def _({text}): ...").body[0].args  # type: ignore[attr-defined]
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    pairs = [*zip(positional, defaults, strict=True)]
    pairs += zip(args.kwonlyargs, args.kw_defaults, strict=True)
    found = {a.arg: None if default is None else ast.unparse(default) for a, default in pairs}
    starred = (("*", args.vararg), ("**", args.kwarg))
    return found | {f"{star}{a.arg}": "" for star, a in starred if a}

"""Megatron's own recipe files (``model_config.yaml``) as command lines.

They are what Megatron-LM's functional tests run, and its shell scripts are the only definition:
environment variables are put into the text; then ``ENV_VARS`` are exported, and of
``MODEL_ENV_VARS`` those of the run; and each entry of ``MODEL_ARGS`` becomes arguments, with these
put in: ``--flag: true`` is the bare flag, ``[a b]`` are several values, ``(…)`` and anything with
spaces is one, and an empty value drops the flag. Numbers keep the form that they have in the file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import MOST_DEVICES, Loader, parse_mapping, read_text, shown, whole_number

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_LIST = re.compile(r"\[([^]]+)\]")


@dataclass(frozen=True)
class Recipe:
    """One run of a recipe file."""

    path: Path
    environment: Mapping[str, str]
    arguments: tuple[str, ...]
    test_type: str
    """Megatron's ``TEST_TYPE``: what its tests do with the run."""
    mode: str
    """``pretraining`` or ``inference``."""
    scripts: tuple[str, ...]
    """Shell code that the file has besides: ``BEFORE_SCRIPT``, ``AFTER_SCRIPT``. Never run here."""
    unresolved: tuple[str, ...]
    """Variables of the file that nobody has set."""

    @property
    def num_nodes(self) -> int:
        return self._count("NUM_NODES", 1)

    @property
    def devices_per_node(self) -> int:
        return self._count("GPUS_PER_NODE", 8)

    def require_resolved(self) -> None:
        """Raises :class:`ConfigError` if a variable has no value."""
        if self.unresolved:
            raise ConfigError(
                f"{self.path} has variables that are not set: {', '.join(self.unresolved)}; set "
                f"them in the environment, as in {self.unresolved[0]}=… wlb recipe run"
            )

    def _count(self, name: str, default: int) -> int:
        value = self.environment.get(name, str(default))
        if not value.isdecimal():
            raise ConfigError(f"{self.path}: {name} is {shown(value)}; give a number, at least 1")
        return whole_number(f"{self.path}: {name}", int(value[:20]), 1, MOST_DEVICES)


def read_recipe(path: str | Path, variables: Mapping[str, str], *, run_number: int = 1) -> Recipe:
    """The recipe in a file, with ``variables`` put in.

    A file whose runs differ, to test resuming, has ``MODEL_ARGS_2``, …: ``run_number`` chooses
    them where they are there.

    Raises:
        ConfigError: no such file, no YAML, or not a recipe of Megatron's own scripts.
    """
    path = Path(path)
    try:
        text = read_text(path)
        # Not expanded: what an unset variable is to become is for the run to say.
        used = {a or b for a, b in _VARIABLE.findall(text)}
        content = parse_mapping(_substituted(text, variables), loader=_TextLoader)
    except ConfigError as error:
        raise ConfigError(f"recipe {path}: {error}") from None
    if not isinstance(content.get("MODEL_ARGS"), Mapping):
        raise ConfigError(
            f"recipe {path}: there is no MODEL_ARGS; give a model_config.yaml as in Megatron-LM's "
            "tests/functional_tests/test_cases"
        )
    key = f"MODEL_ARGS_{run_number}"
    if run_number == 1 or key not in content:
        key = "MODEL_ARGS"
    chosen = content[key]
    if not isinstance(chosen, Mapping):
        raise ConfigError(f"recipe {path}: {key} is {shown(chosen)}; give `--flag: value` entries")
    exported = _entries(path, content, "ENV_VARS")
    exported = {**exported, **_entries(path, _entries(path, content, "MODEL_ENV_VARS"), key)}
    environment = {name: str(value) for name, value in exported.items()}
    arguments = tuple(
        _substituted(argument, environment)
        for flag, value in chosen.items()
        for argument in _arguments(path, flag, value)
    )
    own = {name for name in used if name in environment}  # an ENV_VAR that others refer to
    said = " ".join([*arguments, *environment.values()])
    unresolved = {a or b for a, b in _VARIABLE.findall(said)} & used - own
    return Recipe(
        path,
        environment,
        arguments,
        str(content.get("TEST_TYPE", "")),
        str(content.get("MODE", "pretraining")),
        tuple(name for name in ("BEFORE_SCRIPT", "AFTER_SCRIPT") if name in content),
        tuple(sorted(unresolved)),
    )


def launch_command(
    recipe: Recipe, script: Path | None, torchrun: Sequence[str], extra: Sequence[str] = ()
) -> list[str]:
    """``torchrun … -m megatron_wlb.launch [SCRIPT]``, the recipe's arguments, then ``extra``."""
    return [
        *("python", "-m", "megatron_wlb.torchrun", *torchrun),
        *("-m", "megatron_wlb.launch", *([] if script is None else [str(script)])),
        *recipe.arguments,
        *extra,
    ]


def quoted(word: str, variables: Collection[str]) -> str:
    """A word for a shell, which puts values in for references to ``variables`` and for no others.

    A value stays part of the one word, whatever is in it.
    """
    parts, end = [], 0
    for match in _VARIABLE.finditer(word):
        if (match[1] or match[2]) in variables:
            parts += [word[end : match.start()], match[0]]
            end = match.end()
    # Literal text and references take turns. Double quotes are for references alone: in them an
    # interactive shell also reads "!".
    literals = [shlex.quote(part) if part else "" for part in [*parts[::2], word[end:]]]
    references = [f'"{part}"' for part in parts[1::2]]
    return "".join(map("".join, zip(literals, [*references, ""], strict=True))) or "''"


class _TextLoader(Loader):
    """YAML whose scalars stay the text that they are: ``1.0e-5`` is passed on as ``1.0e-5``."""


_TextLoader.yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[2], match[0])

    return _VARIABLE.sub(value, text)


def _entries(path: Path, content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Entries that a recipe need not have."""
    found = content.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"recipe {path}: {name} is {shown(found)}; give `NAME: value` entries")
    return found


def _arguments(path: Path, flag: str, value: Any) -> list[str]:
    if not flag.startswith("--"):
        raise ConfigError(
            f"recipe {path}: {flag} is not a flag; a recipe of another framework (NeMo) does not "
            "run Megatron's scripts: give one whose MODEL_ARGS begin with --"
        )
    if isinstance(value, list):
        return [flag, *(word for item in value for word in _words(str(item)))]
    if not isinstance(value, str):
        raise ConfigError(f"recipe {path}: {flag} is {shown(value)}; give a plain value")
    if value == "":
        return []
    value = " ".join(_words(value))
    if value == "true":
        return [flag]
    if items := _LIST.fullmatch(value):
        return [flag, *_words(items[1])]
    if " " in value:
        return [flag, value]
    return [flag, *_words(value)]


def _words(text: str) -> list[str]:
    """The words of a shell; the text itself where its quotes do not pair up."""
    try:
        return shlex.split(text)
    except ValueError:
        return [text]

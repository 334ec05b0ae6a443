"""Command lines and YAML files -> settings: flags, their help and the rules come from the tree in
:mod:`megatron_wlb.settings.config`.

A setting of the YAML file (``--wlb-config``) is the flag's name without dashes in front; the
command line goes before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Literal, NoReturn

from megatron_wlb.errors import ConfigError, refuse_all
from megatron_wlb.reading import Several, decimal, parse_mapping, read_text, text_of_flag
from megatron_wlb.settings.config import Config, flag_of, from_flat, groups_of_settings, table


@cache
def megatron_flags() -> frozenset[str]:
    """Every flag of Megatron-LM's ``pretrain_gpt.py``, of 0.18 to 0.20."""
    text = resources.files("megatron_wlb.settings").joinpath("megatron_flags.txt")
    return frozenset(text.read_text().split())


class Parser(argparse.ArgumentParser):
    """A parser that raises :class:`ConfigError` instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        refuse_arguments(self, message)


_UNRECOGNIZED = "unrecognized arguments: "


def refuse_arguments(
    parser: argparse.ArgumentParser, message: str, reasons: Mapping[str, str] | None = None
) -> NoReturn:
    """What ``parser.error`` of argparse says, without its usage, as :class:`ConfigError`.

    Flags that are not the parser's are a line each: of ``reasons``, or with the nearest that is.
    """
    words = message.removeprefix(_UNRECOGNIZED).split()
    if message.startswith(_UNRECOGNIZED):
        refuse_all(unknown_flags(words, _flags_of(parser), reasons))
    raise ConfigError(" ".join(message.split()))


def _flags_of(parser: argparse.ArgumentParser) -> set[str]:
    flags = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags = flags.union(*map(_flags_of, action.choices.values()))
    return flags


def unknown_flags(
    words: Iterable[str], known: Iterable[str], reasons: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Says of each flag among ``words`` that is none of ``known`` why, or which is the nearest."""
    flags = sorted(known)
    for name in (word.split("=")[0] for word in words):
        if name in flags or not name.startswith("--"):
            continue
        if reasons and name in reasons:
            yield reasons[name]
        else:
            near = difflib.get_close_matches(name, flags, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; see --help"
            yield f"unknown flag {name}{hint}"


def _or_auto(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text == "auto" else convert(text)

    read.__name__ = convert.__name__  # which argparse's message has
    return read


def _type_options(hint: Any, *, auto: bool = False) -> dict[str, Any]:
    """Argparse options for an annotated type.

    With ``auto``, a number that may be left out may be that word as well: None.
    """
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        (hint,) = (a for a in typing.get_args(hint) if a is not types.NoneType)
    if hint is bool:
        return {"action": "store_true"}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        of = typing.get_args(hint)[0]
        if of is int:
            return {"action": Several, "of": int, "metavar": "X"}
        if of is float or typing.get_origin(of) is Literal:
            return {"nargs": "+", **_type_options(of)}
        return {"nargs": "+", "type": text_of_flag, "metavar": "X"}
    kinds: dict[type, tuple[Callable[[str], Any], str]]
    kinds = {int: (int, "N"), float: (decimal, "X"), str: (text_of_flag, "TEXT")}
    convert, metavar = kinds[hint]
    if auto and optional and hint is not str:
        convert, metavar = _or_auto(convert), f"auto|{metavar}"
    return {"type": convert, "metavar": metavar}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="SampleTrainer",
        description="A GPT on Megatron-core with workload-balanced micro-batches.",
        epilog="Flags without wlb- mean what they mean in Megatron-LM.",
        allow_abbrev=False,
    )
    for group_name, group_type in groups_of_settings().items():
        add_flags(parser, group_name, group_type)
    return parser


def add_flags(
    parser: argparse.ArgumentParser, title: str, group_type: type, *, defaults: bool = False
) -> None:
    """Adds the settings of one group of the tree; without ``defaults`` those not given are absent
    from what is parsed.
    """
    group = parser.add_argument_group(title, group_type.__doc__)
    for f in dataclasses.fields(group_type):
        options = argument(f.name, said(f.default))
        if defaults:
            options["default"] = f.default
        group.add_argument(flag_of(f.name), **options)


def said(default: Any) -> str:
    """A default as help shows it; nothing where it is no value."""
    # This compares identity, as 0 is a default worth showing, though it equals False.
    if default is None or default is False or default == ():
        return ""
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def argument(name: str, default: str) -> dict[str, Any]:
    """Argparse's options of a setting, which is absent from what is parsed if it is not given; its
    help says a ``default``.
    """
    traits = table()[name]
    about = (f"{choice}: {one.about}" for choice, one in traits.choices.items())
    help = ". ".join((traits.help, *about)).replace("%", "%%")
    help += f" (default: {default})" if default else ""
    options = _type_options(_hints()[name], auto=name.startswith("wlb_"))
    if traits.choices:
        options = {"choices": tuple(traits.choices)}
    return {"dest": name, "default": argparse.SUPPRESS, "help": help, **options}


@cache
def _hints() -> dict[str, Any]:
    """The types of all settings."""
    groups = groups_of_settings().values()
    return {name: x for group in groups for name, x in typing.get_type_hints(group).items()}


def _reject_unknown(flags: Sequence[str]) -> None:
    """Raises for flags that are not ours, saying whether they are Megatron's."""
    known = {"--help", *map(flag_of, table())}
    names = [flag.split("=")[0] for flag in flags]
    megatrons = [name for name in names if name in megatron_flags() - known]
    refuse_all(
        [
            f"{name} is a Megatron flag that is not honoured here; leave it out, or train by the "
            "launcher (docs/megatron-lm.md)"
            for name in megatrons
        ]
        + list(unknown_flags((name for name in names if name not in megatrons), known))
    )


def parse(argv: Sequence[str]) -> Config:
    """Reads settings from a command line (and from the YAML file that it names).

    Raises:
        ConfigError: an unknown flag (the nearest one is named), a Megatron flag that is not
            honoured, a bad value, or an unknown key in the file.
    """
    parser = build_parser()
    _reject_unknown(argv)
    values = vars(parser.parse_args(argv))
    if "wlb_config" in values:
        path = values["wlb_config"]
        try:
            arguments = yaml_arguments(path)  # one set of rules for both
            _reject_unknown(arguments)
            values = {**vars(parser.parse_args(arguments)), **values}
        except ConfigError as error:
            raise ConfigError(f"--wlb-config {path}: {error}") from None
    return from_flat(values)


def parse_known(
    argv: Sequence[str], defaults: Mapping[str, Any] | None = None
) -> tuple[Config, list[str]]:
    """What a command line of Megatron's ``pretrain_gpt.py`` says of these settings, and the rest:
    Megatron's other flags with their values. ``defaults`` go before ours.

    Raises:
        ConfigError: a bad value, or a flag that neither Megatron nor this project has.
    """
    parser = build_parser()
    argv, own = _without_megatrons_choices(argv)
    values, others = parser.parse_known_args(argv)
    others += own
    refuse_all(unknown_flags(others, _flags_of(parser) | megatron_flags()))
    return from_flat({**(defaults or {}), **vars(values)}), others


def _without_megatrons_choices(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words without a decay that Megatron's loop alone has, and the words that ask for it."""
    flag = flag_of("lr_decay_style")
    said, others = taken_out(flag, argv)
    if said is None or said not in ("WSD", "inverse-square-root"):
        return list(argv), []
    return others, [flag, said]


def yaml_arguments(path: str) -> list[str]:
    """The words of a command line that say what a YAML file says.

    Raises :class:`ConfigError` for one that cannot be read, or is no mapping.
    """
    switches = {  # given as on or off
        flag_of(name) for name, hint in _hints().items() if typing.get_args(hint) == ("on", "off")
    }
    arguments: list[str] = []
    for key, value in parse_mapping(read_text(path)).items():
        flag = flag_of(key.lstrip("-"))
        if flag in ("--help", "--wlb-config"):
            raise ConfigError(f"{flag} belongs on the command line; leave it out of the file")
        if isinstance(value, bool) and flag in switches:  # YAML reads on as true
            arguments += [flag, "on" if value else "off"]
        elif value is True:
            arguments.append(flag)
        elif value is not None and value is not False:  # 0 is neither
            values = value if isinstance(value, list) else [value]
            arguments += [flag, *map(str, values)]
    return arguments


def with_settings_file(flags: Sequence[str]) -> list[str]:
    """A command line of Megatron's script with the settings of ``--wlb-config`` before the others,
    which therefore win. Raises :class:`ConfigError` as :func:`yaml_arguments` does.
    """
    path, rest = taken_out("--wlb-config", flags)
    try:
        return rest if path is None else [*yaml_arguments(path), *rest]
    except ConfigError as error:
        raise ConfigError(f"--wlb-config {path}: {error}") from None


def taken_out(flag: str, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of a flag on a command line, the last one if there are several, and the rest."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value")
    known, rest = parser.parse_known_args(words)
    return known.value, rest

"""The one table of settings: what it says is what the package does."""

from __future__ import annotations

import re
from typing import Any, get_type_hints

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning import guards
from megatron_wlb.planning.guards import check_ranges
from megatron_wlb.settings.config import Config, WlbConfig, from_flat, table

DEFAULTS = Config().flat()
OUTSIDE = [
    (name, value)
    for name, known in table().items()
    for value in (
        *(() if known.least is None else (known.least - 1,)),
        *(() if known.most is None else (known.most + 1,)),
        *(() if known.within is None else known.within[1:]),
    )
]


@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_values_beyond_the_limits_are_refused(name: str, value: float) -> None:
    if isinstance(DEFAULTS[name], float):
        value = float(value)
    with pytest.raises(ConfigError, match=f"{name.replace('_', '-')} is "):
        check_ranges(from_flat(DEFAULTS | {name: value}))


@pytest.mark.parametrize(("name", "kind"), get_type_hints(WlbConfig).items())
def test_every_number_of_ours_has_a_limit_that_names_its_flag(name: str, kind: Any) -> None:
    hint = str(kind)
    if {"int", "float"} & set(re.findall(r"\w+", hint)):
        value = (-1,) if "tuple" in hint else -1
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is -1"):
            guards.check(from_flat(DEFAULTS | {name: value}), 1)


def test_defaults_are_within_the_limits() -> None:
    check_ranges(Config())

"""The one table of settings: what it says is what the package does."""

from __future__ import annotations

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.guards import check_ranges
from megatron_wlb.settings.config import Config, from_flat, table

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


def test_defaults_are_within_the_limits() -> None:
    check_ranges(Config())


def test_settings_follow_settings() -> None:
    assert {source for known in table().values() for source in known.follows} <= set(table())

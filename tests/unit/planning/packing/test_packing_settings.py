"""The settings of a packing: short names and flags are read back as what they were made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.packing import PACKINGS, PackingSettings, reads
from megatron_wlb.planning.packing.settings import _configured
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config, flag_of

WINDOW = 4096


def read_back(settings: PackingSettings) -> PackingSettings:
    """As the training command would."""
    return PackingSettings.of_config(parse(settings.flags()).wlb, settings.max_tokens)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fixed-greedy", {"fixed_batches": 3, "fixed_grouping": "arrival"}),
        ("fixed-solver", {"fixed_batches": 2, "solver_limit": 0.25}),
        ("wlb", {"queue_thresholds": (100, 200), "max_age": 7, "max_step_tokens": 40000}),
        ("wlb", {"shaped": True}),
        ("hold", {"tau": 1.0234567, "delay_price": 0.07, "look_ahead": 2, "shaped": True}),
        ("slim", {"units": 24, "slice_multiple": 64}),
    ],
)
def test_settings_come_back_from_their_own_flags(name: str, changes: dict[str, Any]) -> None:
    settings = PackingSettings(name, 2 * WINDOW, **changes)
    assert read_back(settings) == settings != PackingSettings(name, 2 * WINDOW)


@pytest.mark.parametrize("name", PACKINGS)
def test_flags_leave_out_what_the_packing_does_not_read(name: str) -> None:
    changes: dict[str, Any] = {"shaped": reads(name, "shaped"), "max_age": 7}
    changes |= {"fixed_batches": 4, "queue_thresholds": (9,), "solver_limit": 0.5, "look_ahead": 1}
    changes |= {"units": 24, "slice_multiple": 64, "delay_price": 0.5, "max_step_tokens": 40000}
    flags = PackingSettings(name, 2 * WINDOW, **changes).flags()
    read = {_configured(field) for field in ("max_tokens", *changes) if reads(name, field)}
    given = {flag for flag in flags if flag.startswith("--")}
    assert given == {"--wlb-packing", *map(flag_of, read)}


def test_original_reads_s_max_where_its_micro_batches_are_no_windows() -> None:
    chosen = PackingSettings.parse("original+auto", WINDOW, 3 * WINDOW)
    assert read_back(chosen) == chosen
    assert "--wlb-max-tokens" in chosen.flags()
    assert PackingSettings("original", 3 * WINDOW).flags() == ["--wlb-packing", "original"]


def test_defaults_are_those_of_training() -> None:
    chosen = replace(Config().wlb, wlb_packing="hold")
    assert PackingSettings.of_config(chosen, 9) == PackingSettings("hold", 9)
    with pytest.raises(ConfigError, match="is auto, but only a run can choose"):
        PackingSettings.of_config(Config().wlb, 9)


def test_short_name_tells_packing_number_and_shape() -> None:
    settings = PackingSettings.parse("hold:4+shape", WINDOW, 2 * WINDOW, max_age=3)
    assert settings == PackingSettings("hold", 2 * WINDOW, look_ahead=4, max_age=3, shaped=True)
    assert settings.title == "hold, look-ahead 4, shaped"
    with pytest.raises(ConfigError, match=r"packing wlb:x\+shape: 'x' is not a number"):
        PackingSettings.parse("wlb:x+shape", WINDOW, WINDOW)
    assert PackingSettings.parse("slim:24", WINDOW, WINDOW).title == "slim, 24 units"
    with pytest.raises(ConfigError, match="chooses sizes and order itself"):
        PackingSettings.parse("slim+shape", WINDOW, WINDOW)
    for text in ("original+shape", "fixed-greedy:2+shape"):
        with pytest.raises(ConfigError, match="windows, so they cannot be shaped"):
            PackingSettings.parse(text, WINDOW, WINDOW)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("fixed-greedy:4", {"fixed_batches": 4}),
        ("fixed-solver:2", {"fixed_batches": 2}),
        ("wlb", {}),
        ("wlb:1", {"queue_thresholds": (WINDOW // 2,)}),
        ("wlb:3", {"queue_thresholds": (WINDOW // 4, WINDOW // 2, WINDOW * 3 // 4)}),
        ("hold:4", {"look_ahead": 4}),
        ("hold:0", {}),
    ],
)
def test_setting_is_read_from_its_name_and_number(text: str, changes: dict) -> None:
    assert PackingSettings.parse(text, WINDOW, 2 * WINDOW) == PackingSettings(
        text.partition(":")[0], 2 * WINDOW, **changes
    )


@pytest.mark.parametrize(
    "text", ["wlb:0", "wlb:-1", "wlb:x", "wlb:", "fixed-greedy:0", "hold:1.5", f"wlb:{WINDOW}"]
)
def test_setting_of_an_impossible_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"packing {text}: "):
        PackingSettings.parse(text, WINDOW, 2 * WINDOW)
    with pytest.raises(ConfigError, match="original:2: it takes no number"):
        PackingSettings.parse("original:2", WINDOW, 2 * WINDOW)


def test_titles_tell_settings_apart() -> None:
    texts = ["original", "fixed-greedy:1", "fixed-greedy:2", "wlb", "wlb:1", "hold", "hold:1"]
    titles = [PackingSettings.parse(text, WINDOW, 2 * WINDOW).title for text in texts]
    assert titles[:3] == ["original", "fixed-greedy, 1 batch", "fixed-greedy, 2 batches"]
    assert len(set(titles)) == len(titles)

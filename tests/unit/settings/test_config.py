"""The tree of settings is a value, and its flat form says all of it."""

from __future__ import annotations

import dataclasses
import json

from megatron_wlb.settings.config import Config, DataConfig, WlbConfig, from_flat
from megatron_wlb.settings.megatron import ModelConfig

CONFIG = Config(
    model=ModelConfig(num_layers=6),
    data=DataConfig(data_path=("a", "b")),
    wlb=WlbConfig(wlb_max_tokens=9000),
)


def test_setting_names_are_unique_over_the_groups() -> None:
    groups = [getattr(CONFIG, group.name) for group in dataclasses.fields(CONFIG)]
    settings = {
        field.name: getattr(group, field.name)
        for group in groups
        for field in dataclasses.fields(group)
    }
    assert len(settings) == sum(len(dataclasses.fields(group)) for group in groups)
    assert CONFIG.flat() == settings


def test_flat_is_json_and_makes_the_same_config_again() -> None:
    assert from_flat(json.loads(json.dumps(CONFIG.flat()))) == CONFIG
    assert from_flat({}) == Config() != CONFIG

"""Chunks that Megatron has built are compared with those that plans are made for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.model import require_layers
from megatron_wlb.settings.command_line import parse

FLAGS = "--num-layers 6 --pipeline-model-parallel-size 2"
CONFIG = parse([*FLAGS.split(), "--pipeline-model-parallel-layout", "Et|tt||t*3L"])


def built(rank: int, *layers: int) -> Any:
    gpts = [SimpleNamespace(decoder=SimpleNamespace(layers=[None] * num)) for num in layers]
    pp = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
    return SimpleNamespace(gpts=gpts, groups=SimpleNamespace(pp=pp))


def test_chunks_of_other_layers_are_an_error_that_names_them() -> None:
    require_layers(CONFIG, built(0, 1, 0))
    require_layers(CONFIG, built(1, 2, 3))
    for model in (built(0, 2, 3), built(1, 2, 1), built(1, 5)):
        with pytest.raises(
            CompatibilityError, match=r"Megatron built model chunks of \[.*\] layers"
        ):
            require_layers(CONFIG, model)

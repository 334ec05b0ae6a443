"""Chunks that Megatron has built are compared with those that plans are made for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.gpt.build import require_layers
from megatron_wlb.settings.command_line import parse

FLAGS = "--num-layers 6 --pipeline-model-parallel-size 2"
CONFIG = parse([*FLAGS.split(), "--pipeline-model-parallel-layout", "Et|tt||t*3L"])


def built(rank: int, *layers: int, further: int = 0) -> Any:
    gpts = [
        SimpleNamespace(decoder=SimpleNamespace(layers=[None] * num), post_process=False)
        for num in layers
    ]
    gpts[-1].post_process = rank == 1
    if further:
        named = [SimpleNamespace(mtp_model_layer=None)] * further
        gpts[-1].mtp = SimpleNamespace(layers=named)
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


def test_prediction_layers_that_are_shared_are_an_error() -> None:
    config = parse([*FLAGS.split(), "--num-layers", "4", "--mtp-num-layers", "2"])
    require_layers(config, built(1, 2, further=2))
    with pytest.raises(CompatibilityError, match=r"\[1\] layers that predict further ahead"):
        require_layers(config, built(1, 2, further=1))

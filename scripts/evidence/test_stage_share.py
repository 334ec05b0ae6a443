"""A rank's share of a small model, measured on one process, beside what the models say."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from _stage_share import GROUPS, ShareRow, measure_share, share_of
from helpers.gloo import GlooPool

from megatron_wlb.cost import AnalyticModel, Execution, Parallelism, load_hardware
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.models import load_model, load_settings, shape_of
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config

LLAMA = """
--num-layers 24 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --vocab-size 4000
--group-query-attention --num-query-groups 4 --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights
"""
MODEL = parse(LLAMA.split())
WITH_BIASES = """
--num-layers 24 --hidden-size 256 --num-attention-heads 8 --vocab-size 2000
--position-embedding-type learned_absolute --max-position-embeddings 512
"""
GPT = parse(WITH_BIASES.split())
LENGTHS = [[90, 41, 64, 5], [120]]


def measured(model: Config, num_layers: int) -> list[ShareRow]:
    # Of operations that take seconds.
    with mock.patch("megatron_wlb.runtime.measuring.rates.NUM_REPEATS", 1):
        return measure_share(
            model,
            tp_size=2,
            num_layers=num_layers,
            lengths=LENGTHS,
            device="cpu",
            repeats=1,
            seed=3,
        )


def without_rates(model: Config, num_layers: int) -> list[ShareRow]:
    """As :func:`measured`, with made-up rates of the machine, which take seconds to measure."""
    from megatron_wlb.runtime.measuring.rates import Rates

    rates = Rates("cpu", "float32", 1, 0.1, 0.08, 0.07, 20.0, 18.0)
    with mock.patch("_stage_share.measure_rates", lambda _: rates):
        return measured(model, num_layers)


def test_share_is_measured_beside_what_the_models_say(gloo: GlooPool) -> None:
    (rows,) = gloo.run(1, measured, MODEL, 2)
    assert [(r.what, r.tokens, r.documents) for r in rows] == [
        (what, tokens, number) for tokens, number in ((200, 4), (120, 1)) for what in GROUPS
    ]
    for at in (0, len(GROUPS)):
        *groups, total = rows[at : at + len(GROUPS)]
        assert all(min(r.measured_us, r.modelled_us, r.assumed_us) > 0 for r in [*groups, total])
        assert sum(r.modelled_us for r in groups) == pytest.approx(total.modelled_us)
        assert sum(r.measured_us for r in groups) == pytest.approx(total.measured_us)
        assert max(r.measured_us for r in groups) == groups[0].measured_us  # matrix products
        assert 0.5 < total.modelled_us / total.measured_us < 2
        assert total.modelled_bytes == pytest.approx(total.measured_bytes, rel=0.03)
        assert all(r.measured_bytes is r.modelled_bytes is None for r in groups)
    assert json.loads(json.dumps([r.as_dict() for r in rows]))[0]["what"] == "linear"


def test_memory_of_a_share_is_predicted_for_a_gpt_with_biases_too(gloo: GlooPool) -> None:
    (rows,) = gloo.run(1, without_rates, GPT, 3)
    totals = [r for r in rows if r.what == "total"]
    assert len(totals) == 2
    for total in totals:
        assert total.modelled_bytes == pytest.approx(total.measured_bytes, rel=0.03)


@pytest.mark.parametrize(("name", "tp_size"), [("7b", 8), ("70b", 8)])
def test_share_has_the_work_of_a_rank(name: str, tp_size: int) -> None:
    whole = padded_vocabulary(load_model(name), tp_size)
    share = shape_of(share_of(load_settings(name), tp_size, 2))
    assert (share.num_layers, share.hidden_size) == (2, whole.hidden_size)
    hardware = load_hardware("h100-sxm")
    rank = AnalyticModel(whole, Execution(Parallelism(tp_size=tp_size)), hardware)
    alone = AnalyticModel(share, Execution(), hardware)
    for ours, theirs in ((alone.layer(), rank.layer()), (alone.head(), rank.head())):
        for part in ("matrix_us", "elementwise_us", "attention_us"):
            assert getattr(ours, part) == pytest.approx(getattr(theirs, part))
        assert ours.tp_us == ours.tp_backward_us == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_size": 3}, "ffn_hidden_size is 1408, which TP 3 does not divide; use less TP"),
        ({"lengths": [[5], []]}, "give documents of at least 1 token"),
        ({"lengths": [[5, 0]]}, "give documents of at least 1 token"),
        ({"lengths": []}, "give documents of at least 1 token"),
        ({"repeats": 0}, "0 repeats; give .* at least 1 repeat"),
        ({"model": "mixtral-8x7b"}, "layers are unlike"),
    ],
)
def test_share_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "model": MODEL, "tp_size": 2, "num_layers": 2, "lengths": LENGTHS, "device": "cpu",
        "repeats": 1, "seed": 0,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        measure_share(**given | changes)

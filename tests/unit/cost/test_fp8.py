"""Training in FP8: lengths that its products take, their time, and what they keep."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from helpers.machines import H100

from megatron_wlb.cost import AnalyticModel, Execution, Parallelism
from megatron_wlb.cost.activations import ActivationModel
from megatron_wlb.cost.fp8 import row_multiple
from megatron_wlb.cost.layers import Layer
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.plan.sharding.layout import length_multiple, rank_layout
from megatron_wlb.planning.from_config import (
    known_cost,
    make_evaluation_planner,
    make_planner,
    model_shape,
    run_of,
)
from megatron_wlb.planning.packing import PACKINGS, kind_of
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config

VOCAB = 1024
HIDDEN, FFN, QUERIES, KEYS = 256, 640, 256, 128
MODEL = (
    "--bf16 --num-layers 8 --hidden-size 256 --ffn-hidden-size 640 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --seq-length 4096 "
    "--global-batch-size 8"
)
TP2 = "--tensor-model-parallel-size 2"
WEIGHTS = HIDDEN * (QUERIES + 2 * KEYS + QUERIES + 3 * FFN)
"""Of a layer's matrix products."""
NAMES = [name for name in PACKINGS if name != "fixed-solver"]


class Lengths:
    prefix = "lengths"
    targets = None
    lengths = np.array([900, 3001, 47, 4500, 700, 20, 650, 1333, 5, 4096] * 30)


CORPORA = Corpora([Lengths()], 1000, {"train": [(0, 250)], "valid": [(250, 300)]})  # type: ignore[list-item]


def settings(*flags: str) -> Config:
    return parse(f"{MODEL} --wlb-packing hold {' '.join(flags)}".split())


def in_fp8(recipe: str = "delayed", *flags: str) -> Config:
    return settings("--fp8-format hybrid --fp8-recipe", recipe, *flags)


def layer_of(config: Config) -> Layer:
    return model_shape(config, VOCAB).runs[-1][1]


@pytest.mark.parametrize(
    ("layout", "recipe", "multiple"),
    [
        # TP, CP, sequence parallelism; a rank's tokens times the ranks, by hand.
        ((1, 1, False), "delayed", 16),
        ((4, 1, False), "tensorwise", 16),
        ((4, 1, True), "tensorwise", 4 * 16),
        ((4, 1, True), "blockwise", 4 * 128),
        ((4, 2, False), "blockwise", 2 * 16),
        ((4, 2, True), "mxfp8", 2 * 4 * 32),
        ((2, 4, True), "delayed", 4 * 2 * 16),
        ((1, 2, False), None, 4),
    ],
)
def test_lengths_are_multiples_of_rows_on_every_rank(
    layout: tuple[int, int, bool], recipe: str | None, multiple: int
) -> None:
    tp_size, cp_size, spread = layout
    rows = 1 if recipe is None else row_multiple(recipe, spread=spread)
    assert length_multiple(tp_size, cp_size, spread, rows) == multiple
    words = f"--tensor-model-parallel-size {tp_size} --context-parallel-size {cp_size}"
    words += " --sequence-parallel" * spread
    config = settings(words) if recipe is None else in_fp8(recipe, words)
    assert run_of(config, VOCAB, 2).length_multiple == multiple


@pytest.mark.parametrize("packing", NAMES)
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("delayed", ""),
        ("tensorwise", f"{TP2} --sequence-parallel --context-parallel-size 2"),
        ("blockwise", f"{TP2} --sequence-parallel --pipeline-model-parallel-size 2"),
        ("mxfp8", "--context-parallel-size 4 --wlb-cp-sharding hybrid"),
    ],
)
def test_every_micro_batch_has_whole_rows_on_every_rank(
    packing: str, recipe: str, layout: str
) -> None:
    long = "slice" if kind_of(packing).slices else "split"
    config = in_fp8(recipe, layout, "--wlb-packing", packing, "--wlb-long-documents", long)
    cost = known_cost(config, VOCAB)
    assert cost is not None
    p, sizes = config.parallel, set()
    spread = p.tensor_model_parallel_size if p.sequence_parallel else 1
    rows = row_multiple(recipe, spread=spread > 1)
    makers: list[Any] = [make_planner, make_evaluation_planner]
    for make in makers:
        planner = make(config, CORPORA, cost, 2)
        for plan in islice(iter(planner.next_plan, None), 4):
            for m in plan:
                cp_size = p.context_parallel_size * (len(m.replicas) or 1)
                ranks = [rank_layout(m.lengths, cp_size, r, m.sharding) for r in range(cp_size)]
                for rank in ranks:
                    assert len(rank.tokens) % (rows * spread) == 0
                sizes.add(m.length % rows)
                # No more than the layout asks for: runs together are divided in two more.
                assert m.padded_length - m.length < rows * spread * cp_size * 2
    assert sizes - {0}  # padding was needed


@pytest.mark.parametrize("layout", [Parallelism(), Parallelism(2, 2, sequence_parallel=True)])
def test_products_alone_are_faster_in_fp8(layout: Parallelism) -> None:
    config = in_fp8()
    shape = model_shape(config, VOCAB)
    model = AnalyticModel(shape, Execution(layout), H100)
    before, after = asdict(model.layer(shape.layer)), asdict(model.layer(layer_of(config)))
    assert H100.fp8_peak_tflops is not None and H100.fp8_linear_share is not None
    faster = H100.fp8_peak_tflops * H100.fp8_linear_share / H100.linear_tflops
    assert 1.2 < faster < 2
    assert after.pop("matrix_us") == pytest.approx(before.pop("matrix_us") / faster)
    # Less of the collectives is hidden where the products last less long.
    assert after.pop("tp_backward_us") >= before.pop("tp_backward_us")
    assert after == before


def test_first_and_last_layers_stay_out_of_fp8() -> None:
    flags = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2"
    shape = model_shape(in_fp8("tensorwise", flags), VOCAB)
    assert [(num, layer.precisions is None) for num, layer in shape.runs] == [
        (2, True), (5, False), (1, True),
    ]  # fmt: skip
    # Without the first flag the numbers say nothing.
    (run,) = model_shape(in_fp8("tensorwise", "--num-layers-at-start-in-bf16 2"), VOCAB).runs
    assert run[0] == 8 and run[1].precisions is not None
    # All of them: nothing is in FP8, and no length is rounded.
    flags = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 20"
    assert run_of(in_fp8("tensorwise", flags), VOCAB, 1).length_multiple == 1
    assert not settings().training.fp8_format and not model_shape(settings(), VOCAB).layers


@pytest.mark.parametrize(("recipe", "copies"), [("delayed", QUERIES), ("tensorwise", 0)])
def test_inputs_of_products_are_kept_in_fp8(recipe: str, copies: int) -> None:
    def saved(config: Config) -> float:
        shape = replace(model_shape(settings(), VOCAB), num_layers=2)
        model = ActivationModel(shape, Execution())
        runs = ((1, layer_of(config)), (1, shape.layer))
        return model.tape(first=False, last=False, layers=runs).saved_per_token

    # Two norms' outputs and the activation's take a byte less each; attention's output is kept as
    # it is, and by delayed scaling again.
    assert saved(settings()) - saved(in_fp8(recipe)) == 2 * HIDDEN + FFN - copies


def test_working_memory_has_quantised_copies_of_inputs_and_gradients() -> None:
    model = ActivationModel(model_shape(settings(), VOCAB), Execution())
    tapes = [
        model.tape(first=False, last=False, layers=((8, layer_of(config)),))
        for config in (settings(), in_fp8("tensorwise"))
    ]
    plain, fp8 = ({o.name: o for o in tape.operations} for tape in tapes)
    assert fp8["fc1"].forward - plain["fc1"].forward == 2 * HIDDEN
    assert fp8["fc1"].backward - plain["fc1"].backward == 2 * (HIDDEN + 2 * FFN)
    assert fp8["fc2"].forward - plain["fc2"].forward == 2 * FFN
    # Its input takes a byte less there, too.
    assert fp8["fc2"].backward - plain["fc2"].backward == 2 * HIDDEN - FFN


@pytest.mark.parametrize(
    ("flags", "more"), [("", 2), ("--fp8-param-gather", 0), ("--first-last-layers-bf16", 2 * 6 / 8)]
)
def test_weights_have_copies_in_fp8(flags: str, more: float) -> None:
    """Twice in FP8; their originals are left out where weights are gathered in FP8."""
    sharded = "--use-distributed-optimizer --pipeline-model-parallel-size 2", TP2
    before = run_of(settings(*sharded), VOCAB, 2).memory
    after = run_of(in_fp8("tensorwise", flags, *sharded), VOCAB, 2).memory
    for rank in range(2):
        was, now = before.state_bytes(rank), after.state_bytes(rank)
        assert now.weights - was.weights == 4 * WEIGHTS / 2 * more
        assert (now.gradients, now.optimizer) == (was.gradients, was.optimizer)

"""Unlike layers and stages against sums by hand, and precision by operation."""

import dataclasses
from collections.abc import Callable

import pytest
from helpers.machines import H100

from megatron_wlb.cost import (
    AnalyticModel,
    DocumentCost,
    Hardware,
    MemoryModel,
    ModelShape,
    Parallelism,
    Recompute,
    check_model,
)
from megatron_wlb.cost.activations import ActivationModel
from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.layers import Layer, Precision, Precisions, slices
from megatron_wlb.cost.parts import Attention, FeedForward
from megatron_wlb.cost.step_costs import StageCosts
from megatron_wlb.cost.table import model_identity
from megatron_wlb.errors import ConfigError

PLAIN = ModelShape(64, 160, 6, 4, 2, 16, 512, True, rms_norm=True, linear_bias=False)
USUAL = PLAIN.layer
ATTENTION, MLP = USUAL.parts
WIDE = Layer((ATTENTION, FeedForward(480, gated=False)))
LONE = Layer((FeedForward(160, gated=True),))  # no attention
UNLIKE = dataclasses.replace(PLAIN, layers=((1, WIDE), (2, LONE), (3, USUAL)))
NO_RECOMPUTE = Recompute()


def analytic(
    shape: ModelShape, layout: Parallelism, recompute: Recompute = NO_RECOMPUTE
) -> AnalyticModel:
    return AnalyticModel(shape, Execution(layout, recompute), H100)


def test_stages_are_consecutive_slices() -> None:
    assert list(slices(UNLIKE.runs, (2, 0, 3, 1))) == [
        ((1, WIDE), (1, LONE)),
        (),
        ((1, LONE), (2, USUAL)),
        ((1, USUAL),),
    ]
    stages = Parallelism(pp_size=3, stage_layers=(1, 3, 2)).stages(UNLIKE)
    assert [stage.num_layers for stage in stages] == [1, 3, 2]
    assert [(stage.first, stage.last) for stage in stages] == [
        (True, False),
        (False, False),
        (False, True),
    ]


def test_measured_costs_are_spread_over_chunks_of_which_one_has_no_layers() -> None:
    shape = dataclasses.replace(PLAIN, num_layers=8)
    layout = Parallelism(pp_size=2, vpp_size=2, stage_layers=(2, 5, 0, 1))
    measured = DocumentCost(1.0, 0.5, 2.0, 1.5, micro_batch_us=40.0)
    spread = StageCosts.spread(measured, analytic(shape, layout)).times_us([[30, 12]])
    by_layers = StageCosts.by_layers(measured, layout).times_us([[30, 12]])
    for times_us in (spread, by_layers):
        assert times_us.sum() == pytest.approx(measured.total_us([30, 12]))
    assert spread[:, 2].sum() == pytest.approx(40 / 4)  # what a micro-batch takes besides
    assert by_layers[:, 2].sum() == 0
    assert by_layers[:, 1] == pytest.approx(5 * by_layers[:, 3])


def test_block_recompute_runs_the_first_layers_of_each_stage_again() -> None:
    layout = Parallelism(pp_size=2)
    model = analytic(UNLIKE, layout, Recompute("full", "block", 1))
    plain = analytic(UNLIKE, layout).stage_costs()
    for cost, without, again in zip(model.stage_costs(), plain, (WIDE, USUAL), strict=True):
        layer = model.layer(again)
        assert cost.backward_linear_us == pytest.approx(
            without.backward_linear_us + layer.linear_us
        )
        assert cost.backward_quadratic_us == pytest.approx(
            without.backward_quadratic_us + layer.attention_us
        )


def test_recomputed_groups_are_of_their_own_layers() -> None:
    memory = MemoryModel(UNLIKE, Execution(Parallelism(pp_size=2), Recompute("full", "uniform", 2)))
    groups = [
        [inner.name for inner in operation.inner if inner.name in ("attention", "fc1")]
        for rank in (0, 1)
        for operation in memory.tapes[rank][0].operations
        if operation.inner
    ]
    assert groups == [
        ["attention", "fc1", "fc1"],
        ["fc1"],
        ["attention", "fc1"] * 2,
        ["attention", "fc1"],
    ]


@dataclasses.dataclass(frozen=True)
class WithFewerBits(Hardware):
    """A machine with a rate for another precision."""

    eight_bit_peak_tflops: float = 4 * H100.peak_tflops


ORDINARY, SHORT = Precision(2), Precision(1, "eight_bit_peak_tflops")


@pytest.mark.parametrize(
    ("operation", "changed"),
    [
        ("matrix", {"matrix_us": 1 / 4}),
        ("attention", {"attention_us": 1 / 4, "cp_us": 1 / 2, "cp_copy_us": 1 / 2}),
        ("elementwise", {"elementwise_us": 1 / 2}),
        ("collective", {"tp_us": 1 / 2, "tp_backward_us": 1 / 2}),
    ],
)
def test_precision_of_an_operation_changes_its_time_alone(
    operation: str, changed: dict[str, float]
) -> None:
    rates = {f.name: getattr(H100, f.name) for f in dataclasses.fields(H100)}
    rates["node_link_gb_s"] = 1e6  # so that products hide collectives however short they are
    layout = Parallelism(tp_size=2, cp_size=2)
    model = AnalyticModel(PLAIN, Execution(layout), WithFewerBits(**rates))
    mixed = dataclasses.replace(Precisions.same(2), **{operation: SHORT})
    before = dataclasses.asdict(model.layer(USUAL))
    after = dataclasses.asdict(model.layer(Layer(USUAL.parts, mixed)))
    assert after == pytest.approx({n: us * changed.get(n, 1) for n, us in before.items()})
    same = Layer(USUAL.parts, Precisions(ORDINARY, ORDINARY, ORDINARY, ORDINARY))
    assert dataclasses.asdict(model.layer(same)) == before


@pytest.mark.parametrize(
    ("operation", "fewer_bytes"),
    [
        # Both products' inputs out of norms, and the second of the MLP.
        ("matrix", 2 * 64 + 160),
        # Q, K, V as they come out of the product, Q and K rotated, the output.
        ("attention", (64 + 2 * 32) + (64 + 32) + 64),
        # Two residuals, and what the activation function reads.
        ("elementwise", 2 * 64 + 2 * 160),
        ("collective", 0),
    ],
)
def test_precision_of_an_operation_changes_what_it_keeps(operation: str, fewer_bytes: int) -> None:
    model = ActivationModel(PLAIN, Execution())

    def saved(precisions: Precisions | None) -> float:
        runs = ((1, Layer(USUAL.parts, precisions)), (1, USUAL))
        return model.tape(first=False, last=False, layers=runs).saved_per_token

    mixed = dataclasses.replace(Precisions.same(2), **{operation: SHORT})
    assert saved(Precisions.same(2)) == saved(None)
    assert saved(None) - saved(mixed) == fewer_bytes


def test_precision_that_a_machine_has_no_rate_for_is_refused() -> None:
    for operation in ("matrix", "attention"):
        mixed = dataclasses.replace(Precisions.same(2), **{operation: SHORT})
        shape = dataclasses.replace(PLAIN, layers=((5, USUAL), (1, Layer(USUAL.parts, mixed))))
        with pytest.raises(ConfigError, match="there is no figure eight_bit_peak_tflops"):
            analytic(shape, Parallelism()).cost()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: dataclasses.replace(UNLIKE, num_layers=7), "layers have 6, but num_layers is 7"),
        (lambda: dataclasses.replace(PLAIN, layers=((0, WIDE), (6, USUAL))), "a run is 0"),
        (lambda: Layer(()), "a layer has 0 parts; give at least 1"),
        (lambda: FeedForward(0, gated=True), "ffn_hidden_size is 0; give at least 1"),
        (lambda: Attention(6, 4, 16), "6 attention heads do not divide into 4 query groups"),
        (lambda: Precision(0), "element_bytes is 0; give at least 1"),
        (
            lambda: Parallelism(tp_size=2).stages(
                dataclasses.replace(
                    PLAIN, layers=((5, USUAL), (1, Layer((FeedForward(161, gated=True),))))
                )
            ),
            "ffn_hidden_size 161 does not divide over TP 2",
        ),
    ],
)
def test_impossible_layers_are_refused(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()


def test_cost_measured_with_other_layers_is_refused() -> None:
    check_model(model_identity(UNLIKE), UNLIKE)
    for measured, shape in ((PLAIN, UNLIKE), (UNLIKE, PLAIN)):
        with pytest.raises(ConfigError, match="measured for a model with layers") as refused:
            check_model(model_identity(measured), shape)
        assert len(str(refused.value)) < 400  # though layers are many

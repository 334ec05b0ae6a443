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


def test_unlike_layers_are_counted_one_by_one() -> None:
    q, k = 4 * 16, 2 * 16
    attention = 64 * (q + 2 * k) + q * 64
    wide, lone, usual = attention + 2 * 64 * 480, 3 * 64 * 160, attention + 3 * 64 * 160
    assert UNLIKE.linear_parameters == wide + 2 * lone + 3 * usual + 64 * 512
    # Four of six layers attend.
    assert UNLIKE.attention_flops(10) == 4 * 2 * q * 10**2
    forward = 2 * UNLIKE.linear_parameters * 30 + UNLIKE.attention_flops(10) * 5
    assert UNLIKE.training_flops([10, 20]) == 3 * forward


def test_runs_of_one_kind_are_the_plain_model() -> None:
    runs = dataclasses.replace(PLAIN, layers=((2, USUAL), (4, USUAL)))
    layout = Parallelism(tp_size=2, pp_size=2, sequence_parallel=True)
    assert runs.linear_flops == PLAIN.linear_flops
    for ours, theirs in zip(
        analytic(runs, layout).stage_costs(), analytic(PLAIN, layout).stage_costs(), strict=True
    ):
        assert dataclasses.astuple(ours) == pytest.approx(dataclasses.astuple(theirs))
    for rank in range(2):
        ours, theirs = (
            MemoryModel(runs, Execution(layout)),
            MemoryModel(PLAIN, Execution(layout)),
        )
        assert ours.state_bytes(rank) == theirs.state_bytes(rank)
        assert ours.tapes[rank][0] == theirs.tapes[rank][0]
    assert (
        MemoryModel(UNLIKE, Execution(layout)).tapes[0][0]
        != MemoryModel(PLAIN, Execution(layout)).tapes[0][0]
    )


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


def test_stage_costs_are_sums_over_their_layers() -> None:
    layout = Parallelism(tp_size=2, cp_size=2, pp_size=3, stage_layers=(1, 3, 2))
    model = analytic(UNLIKE, layout)
    wide, lone, usual = (model.layer(layer) for layer in (WIDE, LONE, USUAL))
    first, middle, last = model.stage_costs()
    ends = model.embedding().linear_us, model.head().linear_us
    assert first.forward_linear_us == pytest.approx(wide.linear_us + ends[0])
    assert middle.forward_linear_us == pytest.approx(2 * lone.linear_us + usual.linear_us)
    assert last.forward_linear_us == pytest.approx(2 * usual.linear_us + ends[1])
    assert [s.forward_quadratic_us / usual.attention_us for s in (first, middle, last)] == (
        pytest.approx([1, 1, 2])
    )
    # Without attention there is one norm, one addition, no exchange over CP and half the
    # collectives.
    assert lone.attention_us == lone.cp_us == lone.cp_copy_us == 0
    assert lone.tp_us == pytest.approx(usual.tp_us / 2)
    num_bytes = 2 * (5 * 64 + 3 * 160 / 2) / 2
    assert lone.elementwise_us == pytest.approx(H100.memory_us(num_bytes))
    swapped = dataclasses.replace(UNLIKE, layers=UNLIKE.layers[::-1])
    assert analytic(swapped, layout).stage_costs()[0] != first


@pytest.mark.parametrize(
    ("num_layers", "counts"),
    [
        (6, (1, 2, 2, 1)),  # --decoder-first-pipeline-num-layers 1, and the last
        (14, (3, 4, 4, 3)),  # --account-for-embedding-in-pipeline-split, and the loss
        (8, (0, 3, 3, 2)),
    ],
)
def test_uneven_stages_of_equal_layers_hold_their_share(
    num_layers: int, counts: tuple[int, ...]
) -> None:
    shape = dataclasses.replace(PLAIN, num_layers=num_layers)
    layout = Parallelism(pp_size=4, stage_layers=counts)
    model, memory = (
        analytic(shape, layout),
        MemoryModel(shape, Execution(layout)),
    )
    layer, ends = model.layer(), [model.embedding().linear_us, 0, 0, model.head().linear_us]
    weights = 64 * USUAL.matrix_numbers + 2 * 64
    at_ends = [512 * 64, 0, 0, 512 * 64 + 64]
    for stage, (count, cost) in enumerate(zip(counts, model.stage_costs(), strict=True)):
        assert cost.forward_linear_us == pytest.approx(count * layer.linear_us + ends[stage])
        assert cost.forward_quadratic_us == pytest.approx(count * layer.attention_us)
        assert memory.num_parameters(stage) == count * weights + at_ends[stage]
    even = Parallelism(pp_size=2)
    assert sum(
        MemoryModel(shape, Execution(even)).num_parameters(rank) for rank in range(2)
    ) == sum(memory.num_parameters(rank) for rank in range(4))


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


def test_memory_counts_the_layers_of_each_stage() -> None:
    memory = MemoryModel(UNLIKE, Execution(Parallelism(pp_size=3, stage_layers=(1, 3, 2))))
    mlp = 64 + 3 * 64 * 160
    attention = 64 + 64 * (64 + 64) + 64 * 64
    assert memory.num_parameters(1) == 2 * mlp + (attention + mlp)
    assert memory.num_parameters(0) == attention + 64 + 2 * 64 * 480 + 512 * 64

    def saved(*layers: Layer) -> float:
        model = ActivationModel(UNLIKE, Execution())
        runs = tuple((1, layer) for layer in layers)
        return model.tape(first=False, last=False, layers=runs).saved_per_token

    # A layer more before the others keeps what its operations keep.
    usual = saved(USUAL, USUAL) - saved(USUAL)
    lone = saved(LONE, USUAL) - saved(USUAL)
    assert memory.tapes[1][0].saved_per_token == pytest.approx(2 * lone + saved(USUAL))
    # Residual, norm and statistic; gate and factor, and their product.
    assert lone == 2 * (64 + 64) + 4 + 2 * (2 * 160 + 160)
    assert usual > lone


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

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost import Execution, MemoryModel, ModelShape, Parallelism
from megatron_wlb.cost.memory import GIB
from megatron_wlb.errors import ConfigError

LLAMA2_7B = ModelShape(
    4096, 11008, 32, 32, 32, 128, 32000, True, rms_norm=True, linear_bias=False,
    tied_embeddings=False,
)  # fmt: skip
SMALL = ModelShape(64, 192, 8, 4, 2, 16, 512, True, rms_norm=True, linear_bias=False)


def small(**layout: int) -> MemoryModel:
    return MemoryModel(SMALL, Execution(Parallelism(**layout)))


def test_parameters_are_those_of_llama2_7b() -> None:
    assert MemoryModel(LLAMA2_7B, Execution()).num_parameters(0) == 6_738_415_616
    halves = MemoryModel(LLAMA2_7B, Execution(Parallelism(pp_size=2)))
    assert halves.num_parameters(0) + halves.num_parameters(1) == 6_738_415_616
    assert halves.num_parameters(1) - halves.num_parameters(0) == 4096  # the final norm


def test_state_is_eighteen_bytes_a_parameter_in_bf16() -> None:
    layout = Parallelism(dp_size=4)
    num = MemoryModel(LLAMA2_7B, Execution()).num_parameters(0)
    apart = Execution(layout, distributed_optimizer=False)
    plain = MemoryModel(LLAMA2_7B, apart).state_bytes(0)
    assert (plain.weights, plain.gradients, plain.optimizer) == (2 * num, 4 * num, 12 * num)
    sharded = MemoryModel(LLAMA2_7B, Execution(layout)).state_bytes(0)
    assert (sharded.weights, sharded.gradients, sharded.optimizer) == (2 * num, 4 * num, 3 * num)
    assert MemoryModel(LLAMA2_7B, Execution(bf16=False)).state_bytes(0).total == 16 * num
    assert MemoryModel(LLAMA2_7B, Execution(optimizer="sgd")).state_bytes(0).total == 14 * num


def test_micro_batches_in_flight_are_those_of_the_schedule() -> None:
    """Rank r of 1F1B keeps PP - r micro-batches; the one in backward is the oldest of them."""
    model = small(pp_size=4)
    lengths = [700, 500, 900, 300, 100, 200]
    for rank in range(4):
        tape = model.tapes[rank][0]
        most = max(
            sum(lengths[oldest + 1 : oldest + 4 - rank]) * tape.saved_per_token
            + tape.peak_bytes(lengths[oldest], backward=True)
            for oldest in range(len(lengths))
        )
        peak = model.activation_peak_bytes(rank, lengths)
        # A long micro-batch may need more while it runs forward than a short one backward.
        assert (1 - 1e-9) * most <= peak < 1.1 * most


@settings(max_examples=40)
@given(
    gib=st.floats(0.02, 2.0),
    num_micro_batches=st.sampled_from([2, 4, 6, 16, 64]),
    layout=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
    multiple=st.sampled_from([1, 8]),
)
def test_longest_micro_batch_fits_and_no_longer_one(
    gib: float, num_micro_batches: int, layout: tuple[int, int], multiple: int
) -> None:
    pp_size, vpp_size = layout
    if vpp_size > 1 and num_micro_batches % pp_size:
        num_micro_batches = 2 * pp_size
    model = small(pp_size=pp_size, vpp_size=vpp_size)
    longest = model.max_tokens(gib * GIB, num_micro_batches, multiple=multiple)
    assert longest % multiple == 0

    def peak(length: int) -> float:
        lengths = [length] * num_micro_batches
        return max(model.peak_bytes(rank, lengths) for rank in range(pp_size))

    assert peak(longest) <= gib * GIB < peak(longest + multiple)


@pytest.mark.parametrize(
    ("limit_gib", "complaint"),
    [
        (1, "weights, gradients and optimizer of pipeline rank 0 take .* above the limit of 1.00"),
        (139, "not even micro-batches of 65536 tokens fit 139.00 GiB; recompute"),
    ],
)
def test_memory_that_holds_nothing_is_an_error(limit_gib: float, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        MemoryModel(LLAMA2_7B, Execution()).max_tokens(limit_gib * GIB, 4, multiple=65536)

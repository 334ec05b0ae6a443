import dataclasses

import pytest

from megatron_wlb.cost import Execution, ModelShape, Parallelism, Recompute
from megatron_wlb.cost.activations import ActivationModel
from megatron_wlb.cost.tape import Operation

# A GPT with dropout, learned positions and no gate: the model of Korthikanti et al. (2022).
GPT = ModelShape(
    1024, 4096, 4, 16, 16, 64, 51200, False, rotary_percent=0.0, learned_positions=2048,
    dropout=True,
)  # fmt: skip
LLAMA = dataclasses.replace(
    GPT, gated=True, rms_norm=True, linear_bias=False, rotary_percent=1.0, learned_positions=0,
    dropout=False,
)  # fmt: skip


def per_layer(
    shape: ModelShape = GPT,
    parallelism: Parallelism | None = None,
    recompute: Recompute | None = None,
    kernels: str = "fused",
) -> float:
    """Bytes a token that one layer more keeps, in hidden sizes."""

    def saved(num_layers: int) -> float:
        model = ActivationModel(
            dataclasses.replace(shape, num_layers=num_layers),
            Execution(parallelism or Parallelism(), recompute or Recompute(), kernels=kernels),
        )
        return model.tape(first=False, last=False).saved_per_token

    return (saved(6) - saved(2)) / 4 / shape.hidden_size


def test_fused_kernels_keep_what_the_literature_counts() -> None:
    """34 h bytes a layer and token (bf16); by flash attention without the 5·a·s² of its scores.

    Statistics come on top: 2 fp32 a norm, one fp32 a head.
    """
    statistics = (2 * 8 + 16 * 4) / 1024
    assert per_layer() == pytest.approx(34 + statistics)


def test_tensor_and_sequence_parallelism_share_as_the_literature_counts() -> None:
    """(10 + 24/t)·h with TP t, 34·h/t with sequence parallelism."""
    tp = per_layer(parallelism=Parallelism(tp_size=8))
    sp = per_layer(parallelism=Parallelism(tp_size=8, sequence_parallel=True))
    assert tp == pytest.approx(10 + 24 / 8, rel=0.01)
    assert sp == pytest.approx(34 / 8, rel=0.02)


def test_full_recompute_keeps_one_hidden_state_a_group() -> None:
    one = per_layer(recompute=Recompute("full", "uniform", 1))
    two = per_layer(recompute=Recompute("full", "uniform", 2))
    assert (one, two) == (pytest.approx(2), pytest.approx(1))
    # With `block` the layers beyond the first are kept as without recompute.
    assert per_layer(recompute=Recompute("full", "block", 2)) == pytest.approx(per_layer())


def test_selective_recompute_keeps_nothing_of_the_kernel_but_its_output() -> None:
    selective = Recompute("selective")
    for kernels in ("fused", "torch"):
        less = per_layer(kernels=kernels) - per_layer(recompute=selective, kernels=kernels)
        assert less == pytest.approx(16 * 4 / 1024)  # log-sum-exp


def test_context_parallelism_shares_the_tokens() -> None:
    halves = per_layer(parallelism=Parallelism(cp_size=2))
    assert halves == pytest.approx(per_layer() / 2)
    full = Recompute("full", "uniform", 1)
    tapes = [
        ActivationModel(LLAMA, Execution(Parallelism(cp_size=cp), full, kernels="torch")).tape(
            first=True, last=True
        )
        for cp in (1, 2)
    ]
    # Of twice the tokens as much, but for gradients of weights.
    assert tapes[1].backward_peak_bytes(2000) == pytest.approx(tapes[0].backward_peak_bytes(1000))


def test_last_chunk_has_the_logits() -> None:
    model = ActivationModel(LLAMA, Execution(Parallelism(pp_size=2)))
    middle = model.tape(first=False, last=False)
    last = model.tape(first=False, last=True)
    more = last.saved_per_token - middle.saved_per_token
    # The fp32 softmax, the norm's input and output, labels.
    assert more == pytest.approx(4 * 51200 + 2 * 2 * 1024, rel=0.001)
    # bf16 logits beside it while it is made.
    forward = last.forward_peak_bytes(1) - last.saved_per_token
    assert forward == pytest.approx(2 * 51200)


def test_llama_keeps_what_its_operations_read() -> None:
    """bf16, h = 1024, f = 4 h, in hidden sizes; 16 heads of 64."""
    residuals, norms, qkv, rotated, attended, fc1, product = 2, 2, 3, 2, 1, 8, 4
    statistics = (2 * 4 + 16 * 4) / 1024
    fused = 2 * (residuals + norms + qkv + rotated + attended + fc1 + product) + statistics
    assert per_layer(LLAMA) == pytest.approx(fused)
    # Torch: of each norm's input a copy and a normalised one in fp32 instead of the input, cos and
    # sin for queries and for keys, SiLU's output and its factor.
    extra = 2 * (4 + 4) - 2 * residuals + 2 * 4 * 64 / 1024 + 2 * 2 * 4
    assert per_layer(LLAMA, kernels="torch") == pytest.approx(fused + extra)
    grouped = dataclasses.replace(LLAMA, num_query_groups=4)
    # Keys and values are a quarter: two of them unrotated, one rotated.
    assert per_layer(LLAMA) - per_layer(grouped) == pytest.approx(2 * 0.75 * 3)


def test_gradients_of_keys_summed_in_fp32_take_more_in_backward() -> None:
    """With CP=4: those of all tokens, and those that are received, in fp32 instead of in bf16."""

    def most(reduce_in_fp32: bool) -> float:
        layout = Parallelism(cp_size=4, tp_size=2)
        sums = {"reduce_in_fp32": reduce_in_fp32}
        model = ActivationModel(LLAMA, Execution(layout, attention_kernel="sdpa", **sums))
        return exchange(model).backward

    def exchange(model: ActivationModel) -> Operation:
        return LLAMA.layer.parts[0]._exchanged(model, 0.0, 0.0)

    numbers = 2 * LLAMA.layer.key_size / 2
    copy, rows, local = 4 * 9 / 8 * 2 * numbers, 4 * numbers, numbers
    query = 2 * LLAMA.layer.query_size / 2
    # Document by document: chunks' gradients and all of them in one, or then their exchange.
    assert most(False) == 3 * copy > copy + 2 * (rows + local) + query
    assert most(True) == copy + 4 * (rows + local) + query


def test_kept_keys_are_those_that_a_rank_attends_to() -> None:
    """Of CP=4: (2·4 + 1)/(2·4) of all tokens' keys and values, on each rank."""
    layout = Parallelism(cp_size=4, tp_size=2)

    def kept(keep_gathered: bool) -> float:
        model = ActivationModel(LLAMA, Execution(layout, keep_gathered=keep_gathered))
        return model.tape(first=False, last=False).saved_per_token

    keys_and_values = 2 * LLAMA.layer.key_size / 2 * 2
    assert kept(True) - kept(False) == pytest.approx(4 * 9 / 8 * keys_and_values)
    assert kept(False) == pytest.approx(
        ActivationModel(LLAMA, Execution(Parallelism(tp_size=2)))
        .tape(first=False, last=False)
        .saved_per_token
        / 4
    )

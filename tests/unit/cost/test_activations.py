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

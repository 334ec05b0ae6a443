import dataclasses

import pytest
from helpers.machines import H100

from megatron_wlb.cost import AnalyticModel, Hardware, ModelShape, Parallelism, Recompute
from megatron_wlb.cost.execution import Execution

LLAMA2_7B = ModelShape(
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_layers=32,
    num_attention_heads=32,
    num_query_groups=32,
    kv_channels=128,
    vocab_size=32000,
    gated=True,
    rms_norm=True,
    linear_bias=False,
    tied_embeddings=False,
)
WINDOW = 131072
REFERENCE_LAYOUT = Parallelism(tp_size=8, cp_size=2, sequence_parallel=True)


def model(
    shape: ModelShape = LLAMA2_7B,
    parallelism: Parallelism = REFERENCE_LAYOUT,
    recompute: Recompute | None = None,
) -> AnalyticModel:
    return AnalyticModel(shape, Execution(parallelism, recompute or Recompute()), H100)


def test_layer_is_the_reference_formula() -> None:
    """W(d) = x + 3.27 x², x = d/131072: the layers of LLaMA2-7B on 16 H100, TP8 × CP2.

    The reference has no exchange and copy of K and V over CP, and hides nine tenths of the TP
    collectives, as ``--tp-comm-overlap`` would.
    """
    layer = model().layer()
    quadratic = WINDOW * layer.attention_us
    without = layer.linear_us - layer.cp_us - layer.cp_copy_us - 0.9 * layer.tp_us
    assert quadratic / without == pytest.approx(3.27, rel=0.01)
    # Its parts: 2·4096·d² FLOPs at 400 TF/s, 404.75 MFLOP at 600 TF/s, collectives at 350 GB/s,
    # element-wise operations at 3 TB/s; on 16 GPUs, 128K tokens, in ms.
    assert quadratic * WINDOW / 1e3 == pytest.approx(21.99, rel=0.01)
    assert layer.matrix_us * WINDOW / 1e3 == pytest.approx(5.53, rel=0.01)
    assert layer.tp_us * WINDOW / 1e3 == pytest.approx(5.37, rel=0.01)
    # 60 bytes a hidden number there; counted from the operations here.
    assert layer.elementwise_us * WINDOW / 1e3 == pytest.approx(0.671, rel=0.1)


def test_forward_collectives_show_and_backward_ones_hide_behind_products() -> None:
    """Of 4 a layer forward all, of 6 backward two and what is not hidden of four."""
    fast = dataclasses.replace(H100, node_link_gb_s=10 * H100.node_link_gb_s)
    layer = AnalyticModel(LLAMA2_7B, Execution(REFERENCE_LAYOUT), fast).layer()
    one_us = layer.tp_us / 4
    assert layer.tp_backward_us == pytest.approx((2 + (1 - H100.tp_overlap) * 4) * one_us)
    assert layer.backward_linear_us == pytest.approx(
        2 * (layer.linear_us - layer.tp_us) + layer.tp_backward_us
    )
    # All-reduces of whole tensors: an output's gradient is there already.
    whole = dataclasses.replace(REFERENCE_LAYOUT, sequence_parallel=False)
    layer = AnalyticModel(LLAMA2_7B, Execution(whole), fast).layer()
    assert layer.tp_backward_us == pytest.approx((1 - H100.tp_overlap) * 4 * one_us)
    # Products hide no more than they last: on links as slow as those between nodes next to nothing.
    slow = dataclasses.replace(H100, node_link_gb_s=1.0)
    layer = AnalyticModel(LLAMA2_7B, Execution(REFERENCE_LAYOUT), slow).layer()
    assert layer.tp_backward_us == pytest.approx(6 / 4 * layer.tp_us, rel=0.02)


def test_exchange_of_one_head_group_is_not_hidden() -> None:
    def shown(num_query_groups: int, num_head_groups: int | None = None) -> float:
        shape = dataclasses.replace(LLAMA2_7B, num_query_groups=num_query_groups)
        layout = Parallelism(tp_size=8, cp_size=2)

        def exchange_us(machine: Hardware) -> float:
            execution = Execution(layout, num_head_groups=num_head_groups)
            return AnalyticModel(shape, execution, machine).layer().cp_us

        return exchange_us(H100) / exchange_us(dataclasses.replace(H100, cp_overlap=0.0))

    # TP ranks of 32 groups have 4, which run in two head groups; those of 8 have one.
    assert shown(32) == pytest.approx(1 - 0.9 / 2)
    assert shown(8) == pytest.approx(1)
    assert shown(32, 4) == pytest.approx(1 - 0.9 * 3 / 4)


def test_one_device_without_collectives_computes_flops_at_its_rates() -> None:
    layer = model(parallelism=Parallelism()).layer()
    assert layer.tp_us == layer.cp_us == 0
    flops = 2 * LLAMA2_7B.layer.weights(4096)
    assert layer.matrix_us == pytest.approx(flops / (H100.linear_tflops * 1e6))
    attention = LLAMA2_7B.attention_flops(1) / LLAMA2_7B.num_layers
    assert layer.attention_us == pytest.approx(attention / (H100.attention_tflops * 1e6))


def test_work_is_shared_and_collectives_come_with_it() -> None:
    one, tp, cp = (
        model(parallelism=p).layer()
        for p in (Parallelism(), Parallelism(tp_size=4), Parallelism(cp_size=4))
    )
    for shared in (tp, cp):
        assert shared.matrix_us == pytest.approx(one.matrix_us / 4)
        assert shared.attention_us == pytest.approx(one.attention_us / 4)
    assert tp.tp_us > 0 and tp.cp_us == 0
    assert cp.cp_us > 0 and cp.tp_us == 0
    # Without sequence parallelism each TP rank norms and adds all hidden numbers.
    spread = model(parallelism=Parallelism(tp_size=4, sequence_parallel=True)).layer()
    assert one.elementwise_us / 4 == pytest.approx(spread.elementwise_us)
    assert tp.elementwise_us > spread.elementwise_us
    assert tp.tp_us == pytest.approx(spread.tp_us)


@pytest.mark.parametrize(("cp_size", "element_bytes", "times"), [(4, 2, 3), (4, 4, 2), (1, 2, 2)])
def test_gradients_of_keys_in_fp32_are_exchanged_for_twice_as_long(
    cp_size: int, element_bytes: int, times: int
) -> None:
    """Backward gathers as forward does, and reduces as many numbers, which are of fp32 or not."""
    shape, layout = LLAMA2_7B, Parallelism(cp_size=cp_size)
    plain = AnalyticModel(shape, Execution(layout, bf16=element_bytes == 2), H100).cost()
    exact = AnalyticModel(
        shape, Execution(layout, bf16=element_bytes == 2, reduce_in_fp32=True), H100
    ).cost()
    layer = AnalyticModel(shape, Execution(layout, bf16=element_bytes == 2), H100).layer()
    assert (layer.cp_us > 0) == (cp_size > 1)
    longer_us = exact.backward_linear_us - plain.backward_linear_us
    assert longer_us == pytest.approx((times - 2) * 32 * layer.cp_us)
    assert exact.forward_linear_us == plain.forward_linear_us


def test_kernels_cost_a_micro_batch_whatever_its_length() -> None:
    """20 kernels a dense layer forward, twice as many backward; once more where recomputed."""
    slow = dataclasses.replace(H100, kernel_us=5.0)
    execution = Execution(REFERENCE_LAYOUT)
    cost = AnalyticModel(LLAMA2_7B, execution, slow).cost()
    assert cost.micro_batch_us == pytest.approx(3 * 20 * 32 * 5.0)
    assert dataclasses.replace(cost, micro_batch_us=0.0) == model().cost()
    again = dataclasses.replace(execution, recompute=Recompute("full", "uniform", 1))
    assert AnalyticModel(LLAMA2_7B, again, slow).cost().micro_batch_us == pytest.approx(
        4 * 20 * 32 * 5.0
    )


def test_products_wait_for_what_their_arithmetic_does_not_hide() -> None:
    """Of TP 8 × CP 2, a token: each product's input and output, 2 bytes a number, at 3 TB/s."""
    shown = dataclasses.replace(H100, product_overlap=0.25)
    layer = AnalyticModel(LLAMA2_7B, Execution(REFERENCE_LAYOUT), shown).layer()
    numbers = 4 * 4096 + (3 * 4096 + 4096 + 3 * 11008) / 8
    waited_us = 0.75 * numbers * 2 / 2 / (3350 * 0.896 * 1e3)
    assert layer.matrix_us - model().layer().matrix_us == pytest.approx(waited_us)


def test_overlap_of_all_tensor_parallel_collectives_leaves_a_tenth() -> None:
    """``--tp-comm-overlap``, with links on which products last longer than collectives."""
    fast = dataclasses.replace(H100, node_link_gb_s=10 * H100.node_link_gb_s)
    execution = Execution(REFERENCE_LAYOUT)
    plain = AnalyticModel(LLAMA2_7B, execution, fast).layer()
    overlapped = dataclasses.replace(execution, tp_overlapped=True)
    layer = AnalyticModel(LLAMA2_7B, overlapped, fast).layer()
    assert layer.tp_us == pytest.approx(0.1 * plain.tp_us)
    # Of six collectives, two of which are never hidden otherwise.
    assert plain.tp_backward_us == pytest.approx((2 + 0.1 * 4) / 4 * plain.tp_us)
    assert layer.tp_backward_us == pytest.approx(0.1 * 6 / 4 * plain.tp_us)
    # On slower links it hides no more than products last.
    slow = dataclasses.replace(H100, node_link_gb_s=H100.node_link_gb_s / 10)
    layer = AnalyticModel(LLAMA2_7B, overlapped, slow).layer()
    assert layer.tp_us > 0.5 * AnalyticModel(LLAMA2_7B, execution, slow).layer().tp_us

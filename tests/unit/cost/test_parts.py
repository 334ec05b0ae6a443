"""A made-up kind of part, which no file of the package knows, against sums by hand."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.machines import H100

from megatron_wlb.cost import (
    AnalyticModel,
    MemoryModel,
    ModelShape,
    Parallelism,
)
from megatron_wlb.cost.blocks import Blocks
from megatron_wlb.cost.execution import Executed, Execution
from megatron_wlb.cost.layers import Divided, Layer, Part
from megatron_wlb.cost.tape import Operation
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError
from megatron_wlb.simulator.trial import Steps
from megatron_wlb.study.search import Space, search

LAYOUT = Parallelism(tp_size=2, sequence_parallel=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Recurrence(Part):
    """A linear recurrence over tokens: no keys, so no work that grows with a document's square."""

    state_size: int

    @property
    def columns(self) -> int:
        return 3 * self.state_size

    @property
    def rows(self) -> int:
        return self.state_size

    @property
    def elementwise_numbers(self) -> int:
        return 4 * self.state_size

    def divided(self, p: Parallelism) -> Divided:
        yield "state_size", self.state_size, "TP", p.tp_size

    def operations(self, on: Blocks) -> list[Operation]:
        state = on.elementwise * self.state_size / on.parallelism.tp_size
        return [
            on.into("gates", 3 * state, self.columns, bias=False),
            Operation("recurrence", state, backward=on.hidden + 4 * state),
            on.out_of("out", state, self.rows),
        ]

    def parameters(self, on: Executed) -> int:
        decays = self.state_size // on.parallelism.tp_size
        return self.matrix_parameters(on, bias=False) + decays


PLAIN = ModelShape(
    hidden_size=512, ffn_hidden_size=1536, num_layers=8, num_attention_heads=8, num_query_groups=4,
    kv_channels=64, vocab_size=8192, gated=True, rms_norm=True, linear_bias=False,
)  # fmt: skip
ATTENTION, MLP = PLAIN.layer.parts
MIXED = dataclasses.replace(PLAIN, layers=((6, Layer((Recurrence(768), MLP))), (2, PLAIN.layer)))


def test_a_new_kind_is_in_flops_and_time() -> None:
    weights = 512 * 4 * 768 - 512 * (2 * 512 + 2 * 256)  # in place of six layers' attention
    assert MIXED.linear_parameters - PLAIN.linear_parameters == 6 * weights
    assert MIXED.attention_flops(1000) == PLAIN.attention_flops(1000) // 4
    ours, plain = (AnalyticModel(shape, Execution(LAYOUT), H100).cost() for shape in (MIXED, PLAIN))
    assert ours.forward_quadratic_us == pytest.approx(plain.forward_quadratic_us / 4)
    assert ours.forward_linear_us > plain.forward_linear_us


def test_a_new_kind_is_in_memory() -> None:
    ours, plain = (MemoryModel(shape, Execution(LAYOUT)) for shape in (MIXED, PLAIN))
    own, attention = 512 * 4 * 768 // 2 + 768 // 2, 512 * (2 * 512 + 2 * 256) // 2
    assert ours.num_parameters(0) - plain.num_parameters(0) == 6 * (own - attention)
    saved = {o.name: o.saved for o in ours.tapes[0][0].operations}
    assert saved["recurrence"] == 2 * 768 / 2  # bf16, over TP
    assert ours.peak_bytes(0, [4096]) != plain.peak_bytes(0, [4096])


def test_a_new_kind_says_what_a_layout_must_divide() -> None:
    odd = dataclasses.replace(PLAIN, layers=((8, Layer((Recurrence(769), MLP))),))
    with pytest.raises(ConfigError, match="state_size 769 does not divide over TP 2"):
        MemoryModel(odd, Execution(LAYOUT))


def test_layouts_of_a_new_kind_are_searched() -> None:
    space = Space(
        shape=MIXED, execution=Execution(), hardware=H100, num_devices=4, memory_gib=8.0,
        window=8192, num_micro_batches=(4,),
    )  # fmt: skip
    reference = LengthSource.of_distribution("reference")
    found = search(space, Steps(reference, num=2), num_refined=1, num_tuned=1)
    assert found.candidates and all(c.scenario.shape.layers for c in found.candidates)

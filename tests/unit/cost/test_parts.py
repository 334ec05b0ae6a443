"""Every kind of part keeps one contract. A made-up one, in no file, equals sums by hand."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

import pytest
from helpers.machines import H100
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from megatron_wlb.cost import AnalyticModel, MemoryModel, ModelShape, Parallelism, Recompute, parts
from megatron_wlb.cost.blocks import Blocks
from megatron_wlb.cost.execution import Executed, Execution
from megatron_wlb.cost.layers import Divided, Layer, Part
from megatron_wlb.cost.tape import Operation
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError
from megatron_wlb.simulator.trial import Steps
from megatron_wlb.study.search import Space, search

LAYOUT = Parallelism(tp_size=2, sequence_parallel=True, etp_size=1)


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


KINDS = [kind for name in parts.__all__ if issubclass(kind := getattr(parts, name), Part)]
SIZES = {
    int: st.sampled_from([8, 16, 32]), int | None: st.sampled_from([None, 8, 64]),
    bool: st.booleans(), float: st.sampled_from([0.0, 0.5, 1.0]),
}  # fmt: skip


@st.composite
def made(draw: st.DrawFn, kind: type[Any]) -> Any:
    """One of any sizes; what it is made of, too."""
    hints = get_type_hints(kind)
    own = {f.name: hints[f.name] for f in dataclasses.fields(kind)}
    try:
        return kind(**{n: draw(SIZES[of] if of in SIZES else made(of)) for n, of in own.items()})
    except ConfigError:
        reject()


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


def test_layouts_of_a_new_kind_are_searched() -> None:
    space = Space(
        shape=MIXED, execution=Execution(), hardware=H100, num_devices=4, memory_gib=8.0,
        window=8192, num_micro_batches=(4,),
    )  # fmt: skip
    reference = LengthSource.of_distribution("reference")
    found = search(space, Steps(reference, num=2), num_refined=1, num_tuned=1)
    assert found.candidates and all(c.scenario.shape.layers for c in found.candidates)


@pytest.mark.parametrize("kind", [*KINDS, Recurrence])
@settings(max_examples=25)
@given(data=st.data())
def test_every_kind_keeps_its_promises(kind: type[Part], data: st.DataObject) -> None:
    part = data.draw(made(kind))
    reach = part.reach_tokens
    shape = dataclasses.replace(PLAIN, reach_tokens=reach, layers=((8, Layer((part,))),))
    one, two = (Blocks(shape, Execution(p)) for p in (Parallelism(), LAYOUT))
    h, tape, halves = shape.hidden_size, part.operations(one), part.operations(two)
    for o in (*tape, *halves):
        assert min(o.saved - max(o.cached, o.stays), o.forward, o.backward, o.weight_bytes) >= 0, o
    weights = sum(o.weight_bytes for o in tape) / 2  # bf16
    whole, half = (part.parameters(on) + part.routed_parameters(on) for on in (one, two))
    assert 0 <= whole - weights < h + part.columns, "beside norms and biases"
    assert part.routed_weights(h) or weights == part.weights(h)
    assert whole / 2 <= half <= whole
    saved, saved_here = (sum(o.saved for o in operations) for operations in (tape, halves))
    assert saved / 2 - 1 <= saved_here <= 0.75 * saved, "tensor parallelism divides most"
    assert not any(size % shards for _, size, _, shards in part.divided(LAYOUT))
    assert any(size % shards for _, size, _, shards in part.divided(Parallelism(tp_size=3)))
    keys, cp = sum(o.keys for o in tape), Parallelism(cp_size=2)
    assert keys >= 4 * part.key_size and sum(o.gradients for o in tape) >= keys
    grouped = part.head_groups(1, None) is not None
    exchanges = part.sent_numbers(cp) > 0 and part.copied_numbers(cp) > 0
    assert {grouped, keys > 0, part.key_size > 0} == {part.query_size > 0}
    assert exchanges == (part.query_size > 0 or part.state_products > 0)
    again = MemoryModel(shape, Execution(recompute=Recompute("mlp"))).tapes[0][0]
    model, plain = AnalyticModel(shape, Execution(), H100), MemoryModel(shape, Execution())
    assert (again.saved_per_token < plain.tapes[0][0].saved_per_token) == part.is_mlp
    assert (model.mlps_us()[0] > 0) == part.is_mlp
    assert (model.cost().forward_quadratic_us > 0) == (part.query_size > 0)
    assert model.cost().forward_linear_us > 0

"""Runs whose planner is reloaded from its saved state, held against the same runs left alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from helpers.promises import Promises
from helpers.strategies import costs
from megatron_wlb.cost import DocumentCost, Parallelism
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.documents import LongDocuments
from megatron_wlb.planning.from_config import batch, make_planner, padded_vocab_size, run_of
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.planner import Planner
from megatron_wlb.settings import packings
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config

SOLVER = {"fixed-solver": {"solver_limit": 0.02}}
PACKINGS: dict[str, dict[str, Any]] = {
    **{name: {} for name in packings.PACKINGS if name not in SOLVER},
    "fixed-greedy, ahead": {"fixed_batches": 3},
    "fixed-greedy, arrival": {"fixed_batches": 2, "fixed_grouping": "arrival"},
    "wlb, three queues": {"queue_thresholds": (2, 5, 9)},
    "hold, ahead": {"look_ahead": 3},
    "hold, far ahead": {"look_ahead": 7, "delay_price": 0.05},
    "slim, in few units": {"units": 3, "slice_multiple": 1},
}
"""Settings by what is before the comma, the packing, and a word for them."""
AUTO: dict[str, dict[str, Any]] = {
    "hold, auto": {"micro_batches": "auto"},
    "original, auto": {"micro_batches": "auto"},
    "hold, shaped": {"shaped": True},
    "wlb, shaped, auto": {"shaped": True, "micro_batches": "auto"},
}
"""Settings that only a pipeline gives a meaning."""
MODEL = "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --disable-bias-linear"
MEETING = "--use-torch-fsdp2"
"""All replicas meet in each pass."""
AHEAD = 8
"""Steps that packings look ahead, and one."""


@dataclass(frozen=True)
class Soak:
    """A run of ``num_steps`` steps, or of all there are."""

    packing: str
    """One of :data:`PACKINGS`."""
    lengths: tuple[tuple[int, ...], ...]
    """Lengths of the stored documents by corpus."""
    weights: tuple[float, ...] | None
    """Weights by corpus; None streams all as one corpus."""
    num_epochs: int | None
    long_documents: LongDocuments
    window: int
    num_micro_batches: int
    max_tokens: int
    max_step_tokens: int | None
    max_age: int
    cost: DocumentCost
    num_steps: int
    seed: int
    flags: str = ""
    """More flags of the run: its layout, and how its batches grow."""
    dp_size: int = 1
    steps_a_load: int = 1
    """Steps after which the planner is read back from its state."""

    @cached_property
    def config(self) -> Config:
        packing = PackingSettings(
            self.packing.partition(",")[0],
            self.max_tokens,
            max_step_tokens=self.max_step_tokens,
            max_age=self.max_age,
            **(PACKINGS | AUTO | SOLVER)[self.packing],
        )
        size = self.num_micro_batches
        return parse(
            [*MODEL.split(), *packing.flags(), "--seq-length", f"{self.window}", "--seed",
             f"{self.seed}", "--global-batch-size", f"{size}", "--wlb-long-documents",
             self.long_documents, *self.flags.split()]
        )  # fmt: skip

    def planner(self) -> Planner:
        """Makes a new planner, at step 0."""
        corpora = corpora_of(self.lengths, self.weights)
        return make_planner(self.config, corpora, self.cost, self.dp_size, self.num_epochs)

    def promises(self) -> Promises:
        """What its plans are held to."""
        planner, config = self.planner(), self.config
        run = run_of(config, padded_vocab_size(config, 1), self.dp_size)
        windows, ramp = batch(config, self.dp_size)

        def number(step: int) -> int:
            arriving = windows if ramp is None else ramp.windows(step)
            return arriving // config.training.micro_batch_size

        return Promises(
            planner.packer.limits.max_tokens,
            run.length_multiple,
            self.dp_size,
            run.alike,
            None if planner.slicing else planner.packer,
            number=number,
            dealt=planner.shaping is not None,
            cost=self.cost,
            waits=run.parallelism.cp_size > 1,
        )

    def run(self) -> int:
        """Plans its steps as :func:`hold_to` does; their number."""
        return hold_to(self.promises(), self.planner, self.num_steps, self.steps_a_load)


def corpora_of(
    lengths: Sequence[Sequence[int]], weights: tuple[float, ...] | None = None
) -> Corpora:
    """Corpora whose documents have such lengths, and no tokens."""
    corpora: list[Any] = [
        SimpleNamespace(prefix=f"corpus {number}", lengths=np.array(own), targets=None)
        for number, own in enumerate(lengths)
    ]
    ranges = {"train": [(0, len(own)) for own in lengths]}
    return Corpora(corpora, 1, ranges, {"train": weights})


def hold_to(
    promises: Promises, make: Callable[[], Any], num_steps: int, steps_a_load: int = 1
) -> int:
    """Plans steps twice, with one planner that is read back now and then, and that skips every
    third step; the number of steps.

    Raises :class:`AssertionError` where plans or states differ, or a promise is broken.
    """
    alone, reloaded, stream = make(), make(), make().stream
    for step in range(num_steps):
        if not step % steps_a_load:
            state = json.loads(json.dumps(reloaded.state_dict()))
            reloaded = make()
            reloaded.load_state_dict(state)
            assert json.loads(json.dumps(reloaded.state_dict())) == state, f"state of {step}"
        plan = again = alone.next_plan()
        if plan is not None and step % 3 == 2 and hasattr(reloaded, "skip"):
            reloaded.skip()
        else:
            again = reloaded.next_plan()
        while not stream.exhausted and (plan is None or stream.step <= plan.step + AHEAD):
            promises.give(stream.next_step())
        if plan is None or again is None:
            assert plan is again, f"one ends at step {step}"
            promises.end()
            return step
        assert plan.digest == again.digest, f"plans of step {step} differ"
        assert alone.state_dict() == reloaded.state_dict(), f"states after step {step} differ"
        promises.see(plan)
    return num_steps


@st.composite
def soaks(draw: st.DrawFn, num_steps: int = 40, packing: str | None = None) -> Soak:
    """Draws one to three corpora of uneven documents, many of them longer than the window."""
    layout, multiple, each = draw(layouts(packing in AUTO))
    window = draw(st.integers(max(2, multiple // 2), 40))  # the default S_max is two windows
    is_slim = (packing or "").startswith("slim")
    longest = (5 if is_slim else draw(st.sampled_from([1, 2, 5]))) * window
    num_corpora = draw(st.integers(1, 3))
    corpus = st.lists(st.integers(1, longest), min_size=1, max_size=30)
    lengths = draw(st.lists(corpus, min_size=num_corpora, max_size=num_corpora))
    weight = st.sampled_from([0.1, 0.3, 1, 7]) | st.floats(0.01, 10)
    weights = draw(st.none() | st.lists(weight, min_size=num_corpora, max_size=num_corpora))
    num_micro_batches = each * layout.dp_size * draw(st.integers(1, 5 if layout == ONE else 2))
    flags = flags_of(layout)
    if is_slim:
        lengths[0].append(longest)  # which outweighs a replica, maybe
    name = packing or draw(st.sampled_from(sorted(PACKINGS)))
    num_windows = draw(st.sampled_from([1, 1, 1, 2, 3]))
    flags += f" --micro-batch-size {num_windows}"
    row = num_windows * window
    step_tokens = num_micro_batches * row
    least = each * layout.dp_size
    if least < num_micro_batches and draw(st.booleans()) and not name.startswith("slim"):
        begins = draw(st.integers(1, 6)) * least * row
        sizes = least * num_windows, num_micro_batches * num_windows
        flags += f" --step-batch-size-schedule 0:{sizes[0]},{begins}:{sizes[1]}"
    flags += draw(st.sampled_from(["", f" --window-size {window // 2},0"]))
    if name.startswith("slim"):
        flags += draw(st.sampled_from(["", " --wlb-dp-merge off", f" {MEETING}"]))
        if layout.cp_size > 1:
            flags += draw(st.sampled_from(["", " --wlb-slice-cache divided"]))
    least_tokens = -(-row // multiple)
    return Soak(
        name,
        tuple(map(tuple, lengths)),
        None if weights is None else tuple(weights),
        draw(st.integers(1, 3)) if weights is None else None,
        draw(st.sampled_from(["slice"] if is_slim else ["split", "truncate", "slice"])),
        window,
        num_micro_batches * num_windows,
        multiple * draw(st.integers(least_tokens, 3 * least_tokens)),
        draw(st.none() | st.integers(step_tokens, 2 * step_tokens)),
        draw(st.integers(0, 6)),
        draw(costs()),
        num_steps,
        draw(st.integers(0, 99)),
        flags,
        layout.dp_size,
        draw(st.sampled_from([1, 5])) if layout == ONE else 5,
    )


ONE = Parallelism()


@st.composite
def layouts(draw: st.DrawFn, is_pipeline: bool = False) -> tuple[Parallelism, int, int]:
    """A layout, what it pads lengths to a multiple of, and what micro-batches are one of."""
    if not is_pipeline and draw(st.booleans()):
        return ONE, 1, 1
    pp_size = draw(st.sampled_from([2, 4] if is_pipeline else [1, 2, 4]))
    vpp_size = draw(st.sampled_from([1, 2])) if pp_size > 1 else 1
    tp_size, cp_size = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)]))
    dp_size = draw(st.sampled_from([1, 2, 4]))
    layout = Parallelism(
        tp_size=tp_size, cp_size=cp_size, pp_size=pp_size, vpp_size=vpp_size, dp_size=dp_size,
        ep_size=draw(st.sampled_from([1, dp_size])), sequence_parallel=tp_size > 1,
    )  # fmt: skip
    multiple = tp_size * (2 * cp_size if cp_size > 1 else 1)
    return layout, multiple, pp_size if vpp_size > 1 else 1


def flags_of(layout: Parallelism) -> str:
    """How a user asks for it."""
    flags = (
        f"--tensor-model-parallel-size {layout.tp_size} --context-parallel-size {layout.cp_size} "
        f"--pipeline-model-parallel-size {layout.pp_size}"
    )
    if layout.vpp_size > 1:
        flags += f" --num-virtual-stages-per-pipeline-rank {layout.vpp_size}"
    if layout.ep_size > 1:
        flags += (
            f" --num-experts 8 --moe-ffn-hidden-size 32 --expert-model-parallel-size "
            f"{layout.ep_size} --expert-tensor-parallel-size 1"
        )
    return flags + " --sequence-parallel" * layout.sequence_parallel

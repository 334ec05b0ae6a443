"""Predicted memory against the tensors that are alive in real steps, on the CPU.

Each case runs two training steps and counts every tensor's bytes in the second. Activations are
held to 5 % apart from weights and optimizer state, which are known to the byte but for tables of
positions and the like.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from random import Random
from typing import Any
from unittest import mock

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import WORKLOAD, Layout, further, some_of
from helpers.memory import (
    VOCAB_SIZE,
    WINDOW_BYTES,
    MeasuredMemory,
    built,
    measure_shared,
    measure_step,
    sharing,
)
from helpers.plans import sliced_for
from helpers.ranks import build_runner

from megatron_wlb.cost import MemoryModel, Recompute
from megatron_wlb.cost.schedule.order import sliced
from megatron_wlb.cost.slices import HOST, LAYERS, MLPS, Slice, Unit, UnitTable
from megatron_wlb.planning.from_config import padded_vocab_size, run_of
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config
from megatron_wlb.simulator.step import unit

TOLERANCE = 0.05
EXACT = 0.03
"""Where no layer is recomputed whole, and nothing is sent while the rank computes: how long a
tensor lives that is being sent is gloo's affair."""

SIZES = "--hidden-size 128 --num-attention-heads 4 --num-layers 4 --seq-length 256"
LLAMA = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --ffn-hidden-size 352 "
    "--untie-embeddings-and-output-weights"
)
GROUPED = f"{LLAMA} --group-query-attention --num-query-groups 2"
GATED = "--attention-output-gate"
QK_NORM = f"{GROUPED} {GATED} --qk-layernorm --add-qkv-bias"
LATENT = (
    f"{LLAMA} --multi-latent-attention --kv-lora-rank 48 --qk-head-dim 24 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 28"
)
LOW = f"{LATENT} --q-lora-rank 56 --qk-layernorm"
PP = "--pipeline-model-parallel-size 2"
VPP = f"{PP} --num-virtual-stages-per-pipeline-rank 2"
ACCOUNTS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
CP = "--context-parallel-size 2"
BF16 = "--bf16"
SHARDED = "--use-distributed-optimizer"
SELECTIVE = "--recompute-granularity selective"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PAIRS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"

ONE = [[256, 100, 41]]
RAGGED = [[256, 100, 44], [177], [90, 1, 76], [30, 9]]
RISING = RAGGED[::-1]
PADDING = 3

CASES = {
    # No pipeline.
    "gpt": ("--position-embedding-type learned_absolute", ONE),
    "llama": (LLAMA, ONE),
    "grouped-norm": (QK_NORM, ONE),
    "dropout": (f"{LLAMA} --hidden-dropout 0.1", ONE),
    "sgd": (f"{LLAMA} --optimizer sgd", RAGGED),
    "bf16": (f"{GROUPED} {BF16}", ONE),
    "large-vocabulary": (f"{LLAMA} {BF16} --make-vocab-size-divisible-by 2048", ONE),
    "selective": (f"{LLAMA} {SELECTIVE}", ONE),
    "full": (f"{LLAMA} {PAIRS}", ONE),
    "full-block": (f"{LLAMA} {BLOCK}", ONE),
    "full-bf16": (f"{GROUPED} {BF16} {FULL}", ONE),
    "hybrid": (f"{GROUPED} {BF16} --hybrid-layer-pattern *-**-*--/*-", ONE),
    # Optimizer state over data-parallel ranks.
    "sharded": (f"{LLAMA} {SHARDED}", ONE),
    "sharded-bf16": (f"{LLAMA} {SHARDED} {BF16}", ONE),
    # Tensor parallelism.
    "tp": (f"{LLAMA} {TP}", ONE),
    "sp": (f"{SP} {BF16}", ONE),
    # Context parallelism.
    "cp": (f"{LLAMA} {CP}", ONE),
    "cp-grouped-sharded": (f"{QK_NORM} {CP} {SHARDED}", ONE),
    "cp-keep": (f"{CP} --wlb-cp-keep-gathered", ONE),
    "cp-selective-bf16": (f"{GROUPED} {CP} {SELECTIVE} {BF16}", ONE),
    # Multi-latent attention.
    "latent": (LATENT, ONE),
    "latent-low-bf16": (f"{LOW} {BF16}", ONE),
    "latent-selective": (f"{LOW} {SELECTIVE}", ONE),
    "latent-full": (f"{LATENT} {FULL}", ONE),
    "latent-tp": (f"{LOW} {TP}", ONE),
    "latent-sp": (f"{LATENT} {SP} {BF16}", ONE),
    "latent-cp": (f"{LATENT} {CP}", ONE),
    "latent-cp-keep": (f"{LOW} {CP} --wlb-cp-keep-gathered", ONE),
    "latent-cp-selective": (f"{LATENT} {CP} {SELECTIVE}", ONE),
    "latent-pp": (f"{LATENT} {PP}", RAGGED),
    # 1F1B.
    "pp": (f"{LLAMA} {PP}", RAGGED),
    "pp-rising": (f"{GROUPED} {PP} {GATED}", RISING),
    "pp-bf16": (f"{GROUPED} {PP} {BF16}", RAGGED),
    "pp-selective": (f"{PP} {SELECTIVE}", RAGGED),
    "pp-full": (f"{LLAMA} {PP} {FULL}", RAGGED),
    "pp-uneven": (f"{LLAMA} {PP} --decoder-last-pipeline-num-layers 1", RAGGED),
    "pp-hybrid": (f"{LLAMA} {PP} --hybrid-layer-pattern *-*|-**--", RAGGED),
    "pp-ends-only": (f"{GROUPED} {PP} --pipeline-model-parallel-layout Et*4|L", RAGGED),
    # Layers that predict further ahead, on the last rank.
    "ahead": (f"{LLAMA} --mtp-num-layers 2", ONE),
    "pp-ahead-bf16": (f"{PP} {BF16} --mtp-num-layers 1", RAGGED),
    "pp-ahead-full": (f"{LLAMA} {PP} {FULL} --mtp-num-layers 2", RAGGED),
    "sp-ahead": (f"{LLAMA} {SP} --mtp-num-layers 1", ONE),
    # Interleaved.
    "vpp": (f"{LLAMA} {VPP}", RAGGED),
    "vpp-selective": (f"{VPP} {SELECTIVE}", [*RISING, [200], [100]]),
    "vpp-full": (f"{LLAMA} {VPP} {FULL}", RAGGED),
    "vpp-full-gpt": (f"{VPP} {FULL}", RAGGED),
    "vpp-uneven": (f"{VPP} --num-layers 6 {ACCOUNTS}", RAGGED),
    "vpp-empty-chunk": (f"{LLAMA} {PP} --pipeline-model-parallel-layout Et|tt||tL", RAGGED),
}
FURTHER = {
    "full-bf16", "sharded-bf16", "cp-grouped-sharded", "cp-selective-bf16", "latent-low-bf16",
    "latent-sp", "latent-cp-keep", "latent-cp-selective", "pp-rising", "pp-bf16", "pp-ahead-bf16",
    "vpp-full-gpt",
}  # fmt: skip


KINDS = {
    "gpt": "",
    "llama": "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights",
    "latents": LATENT,
    "low-latents": LOW,
    "prediction": f"{LLAMA} --mtp-num-layers 2",
    "experts": f"{LLAMA} {GATED} --num-experts 6 --moe-layer-freq [0]+[1]*3",
    "shared": f"{LLAMA} --num-experts 4 --moe-layer-freq 2 --qk-layernorm",
}


def drawn(kind: str, random: Random) -> str:
    """Flags of a model of a kind, of whatever sizes."""
    groups, head = random.randint(1, 3), random.choice([8, 16, 24])
    heads = groups * random.randint(1, 3)
    flags = f"{KINDS[kind]} --hidden-size {head * random.randint(2, 9)} --seq-length 512"
    flags += f" --num-attention-heads {heads} --ffn-hidden-size {random.randint(20, 300)}"
    if "latents" not in kind:
        flags += f" --kv-channels {head} --group-query-attention --num-query-groups {groups}"
    if "--num-experts" in flags:
        topk, ffn = random.randint(2, 3), random.randint(20, 90)
        flags += f" --moe-router-topk {topk} --moe-ffn-hidden-size {ffn}"
    if kind == "shared":
        flags += f" --moe-shared-expert-intermediate-size {random.randint(20, 90)}"
        flags += f" --moe-latent-size {random.randint(20, 90)}"
    return flags


def test_parameters_and_products_are_those_of_built_models(gloo: GlooPool) -> None:
    """Not one more or less, of whatever sizes a model has."""
    random = Random(5)
    configs = {f"{kind} {n}": settings(drawn(kind, random), 1) for kind in KINDS for n in range(3)}
    (found,) = gloo.run(1, built, [*configs.values()])
    counted = {}
    for name, config in configs.items():
        model = run_of(config, padded_vocab_size(config, VOCAB_SIZE), 1)
        counted[name] = model.memory.num_parameters(0), model.shape.linear_flops
    assert counted == dict(zip(configs, found, strict=True))


def settings(flags: str, num_micro_batches: int, dp_size: int = 1) -> Config:
    return parse(f"{SIZES} --global-batch-size {num_micro_batches * dp_size} {flags}".split())


def run(
    gloo: GlooPool, config: Config, lengths: list[list[int]], dp_size: int = 1
) -> tuple[MemoryModel, list[MeasuredMemory]]:
    """The model of a layout, and what was measured on the first TP, CP and DP rank of a stage."""
    p = config.parallel
    tp_size = p.tensor_model_parallel_size * p.context_parallel_size
    world_size = tp_size * dp_size * p.pipeline_model_parallel_size
    measured = gloo.run(world_size, measure_step, config, lengths, PADDING)
    model = run_of(config, padded_vocab_size(config, VOCAB_SIZE), dp_size).memory
    return model, measured[:: tp_size * dp_size]


@pytest.mark.parametrize("case", some_of(CASES, *(CASES.keys() - FURTHER)))
def test_predicted_memory_is_what_a_step_holds(gloo: GlooPool, case: str) -> None:
    flags, lengths = CASES[case]
    dp_size = 2 if SHARDED in flags and CP not in flags else 1
    config = settings(flags, len(lengths), dp_size)
    model, measured = run(gloo, config, lengths, dp_size)
    padded = [sum(documents) + PADDING for documents in lengths]
    for rank, found in enumerate(measured):
        assert model.num_parameters(rank) == found.num_parameters
        activations = model.activation_peak_bytes(rank, padded)
        tolerance = TOLERANCE if any(word in case for word in ("full", "vpp", "cp")) else EXACT
        assert activations == pytest.approx(found.activations, rel=tolerance)
        peak = found.held + max(found.activations, found.update)
        assert model.peak_bytes(rank, padded) == pytest.approx(peak, rel=TOLERANCE)


CHAINS, SLICED = (3, 1, 2), [[100], [80], [60, 20], [90, 31], [120], [40, 25]]
EVEN = [[100], [80], [60, 20], [92, 32], [120], [40, 24]]


AGAIN = 0, 2, 3


@pytest.mark.parametrize(
    ("flags", "again", "divided", "what"),
    [
        (f"{LLAMA} {VPP}", (), False, 0),
        further(f"{GROUPED} {PP}", (), False, 0),
        (f"{LLAMA} {PP}", AGAIN, False, LAYERS),
        further(f"{GROUPED} {PP}", AGAIN, False, LAYERS),
        (f"{LLAMA} {PP}", AGAIN, False, MLPS),
        further(f"{LLAMA} {PP} {BF16} {GATED}", AGAIN, False, MLPS),
        (f"{LLAMA} {PP}", AGAIN, False, HOST),
        further(f"{LLAMA} {PP} {CP}", range(6), True, HOST),
        further(f"{LLAMA} {CP}", AGAIN, False, HOST),
        (f"{LLAMA} {PP} {CP}", (), False, 0),
        (f"{LLAMA} {PP} {CP}", (), True, 0),
        (f"{LLAMA} {PP} {CP}", AGAIN, True, LAYERS),
        further(f"{LLAMA} {VPP} {CP} {BF16}", (), True, 0),
        further(f"{LLAMA} {CP}", (), True, 0),
    ],
)
def test_predicted_memory_of_slices_is_what_a_step_holds(
    gloo: GlooPool, flags: str, again: tuple[int, ...], divided: bool, what: int
) -> None:
    for found, predicted in in_slices(gloo, flags, again, divided, what):
        assert predicted == pytest.approx(found, rel=TOLERANCE)


def test_the_hosts_memory_saves_what_is_predicted(gloo: GlooPool) -> None:
    # Between virtual stages gloo keeps what it sends, and after hosting there is little else.
    case = gloo, f"{GROUPED} {VPP} {BF16}"
    without, within = in_slices(*case, (), False, 0), in_slices(*case, range(6), False, HOST)
    for (found, predicted), (less, predicted_less) in zip(without, within, strict=True):
        assert less < 0.6 * found
        assert predicted - predicted_less == pytest.approx(found - less, rel=2 * EXACT)


def in_slices(
    gloo: GlooPool, flags: str, again: Collection[int], divided: bool, what: int
) -> list[tuple[float, float]]:
    """Measured and predicted bytes of activations on each pipeline rank."""
    config = settings(flags, len(SLICED))
    p = config.parallel
    pp_size, cp_size = p.pipeline_model_parallel_size, p.context_parallel_size
    world_size = pp_size * cp_size
    lengths, padding = (SLICED, PADDING) if cp_size == 1 else (EVEN, 4)
    known = config, lengths, padding, CHAINS, again, divided, what
    measured = gloo.run(world_size, measure_step, *known)[::cp_size]
    model = run_of(config, padded_vocab_size(config, VOCAB_SIZE), 1).memory
    units: list[Unit] = []
    at = 0
    for number in CHAINS:
        own, at = lengths[at : at + number], at + number
        length, start = sum(one[0] for one in own), 0
        for one in own:
            cut = Slice(0, start, start + one[0], length) if number > 1 else None
            unit = Unit(sum(one) + padding, cut, recomputed=what * (len(units) in again))
            units.append(unit._replace(divided=divided and cut is not None))
            start += one[0]
    uses = [
        model.program_bytes(rank, actions, UnitTable.of(units), WINDOW_BYTES)
        for rank, actions in enumerate(sliced(pp_size, CHAINS, p.vpp_size))
    ]
    predicted = [max(own.peak) for own in uses]
    return [(own.activations, most) for own, most in zip(measured, predicted, strict=True)]


@pytest.mark.parametrize(
    ("flags", "cuts"),
    [
        (f"{LLAMA} {PP}", ()),
        (f"{GROUPED} {PP} {BF16}", ()),
        (f"{GROUPED} {PP} {BF16}", (90, 200, 290)),
        (f"{LLAMA} {VPP}", (90, 200, 290)),
    ],
)
def test_predicted_memory_of_samples_that_share_is_what_a_step_holds(
    gloo: GlooPool, flags: str, cuts: tuple[int, ...]
) -> None:
    config = settings(flags, 4)
    answers = [60, 25, 40, 8, 70]
    measured = gloo.run(2, measure_shared, config, answers, cuts, PADDING)
    model = run_of(config, padded_vocab_size(config, VOCAB_SIZE), 1).memory
    micro_batches, chains, _ = sharing(answers, cuts, PADDING)
    for rank, found in enumerate(measured):
        if not cuts:
            predicted = model.activation_peak_bytes(rank, [micro_batches[0].padded_length])
        else:
            actions = sliced(2, chains, config.parallel.vpp_size)[rank]
            units = UnitTable.of(map(unit, micro_batches))
            uses = model.program_bytes(rank, actions, units, 0.0)
            predicted = max(uses.peak)
        assert predicted == pytest.approx(found.activations, rel=TOLERANCE)


def bytes_of_states(config: Config) -> list[int]:
    """Of each state that a step of slices leaves."""
    from megatron_wlb.runtime.gpt import states

    found: list[int] = []
    right = states._Give.forward

    def noting(ctx: Any, out: Any, state: Any, *rest: Any) -> Any:
        found.append(state.numel() * state.element_size())
        return right(ctx, out, state, *rest)

    runner = build_runner(config, WORKLOAD)
    with mock.patch.object(states._Give, "forward", staticmethod(noting)):
        runner.run(sliced_for(config, WORKLOAD, 2, 0))
    return found


def test_states_that_slices_leave_are_counted(gloo: GlooPool) -> None:
    case = Layout("states", 3, cp=2, ep=2)
    found, same = gloo.run(2, bytes_of_states, case.config)
    assert found == same
    (tape,) = run_of(case.config, 64, 1).memory.tapes[0]
    num_slices = len(found) // 2 // 3  # of three layers, and a halo besides
    assert num_slices > 3
    assert sum(found) == pytest.approx(
        num_slices * sum(o.state for o in tape.operations), rel=EXACT
    )
    units = UnitTable.of([Unit(9, Slice(0, a, a + 9, 27)) for a in (0, 9, 18)])
    kept = run_of(case.config, 64, 1).memory.unit_bytes(tape, "F", units)[:, 2]
    assert kept[1] - kept[0] == pytest.approx(sum(found) / num_slices, rel=EXACT)
    # Branches inside a micro-batch that is no slice.
    whole = UnitTable.of([Unit(9, states=(2, 0)), Unit(9)])
    own, none = run_of(case.config, 64, 1).memory.unit_bytes(tape, "F", whole)[:, 1:]
    assert own - none == pytest.approx([2 * sum(found) / num_slices] * 2, rel=EXACT)


def test_longest_micro_batches_fill_the_memory_they_were_made_for(gloo: GlooPool) -> None:
    config = settings(f"{LLAMA} {PP}", 3)
    model, (first, _) = run(gloo, config, RAGGED[:3])
    limit = 3 * first.held
    longest = model.max_tokens(limit, num_micro_batches=3)
    documents = [[longest - PADDING - 100, 60, 40]] * 3
    _, measured = run(gloo, config, documents)
    fullest = max(found.held + found.activations for found in measured)
    assert fullest == pytest.approx(limit, rel=TOLERANCE)


# That the cases can tell.


def test_prediction_for_another_run_is_off(gloo: GlooPool) -> None:
    config = settings(f"{LLAMA} {PP} {SELECTIVE}", len(RAGGED))
    model, (found, _) = run(gloo, config, RAGGED)
    padded = [sum(documents) + PADDING for documents in RAGGED]

    def is_off(other: MemoryModel, lengths: list[int]) -> bool:
        predicted = other.activation_peak_bytes(0, lengths)
        return predicted != pytest.approx(found.activations, rel=EXACT)

    narrow = dataclasses.replace(model.shape, ffn_hidden_size=320)
    assert not is_off(model, padded)
    assert is_off(model.executed(recompute=Recompute("full", "uniform", 1)), padded)
    assert is_off(dataclasses.replace(model, shape=narrow), padded)
    assert is_off(model.executed(kernels="fused"), padded)
    assert is_off(model, sorted(padded))  # another order is other micro-batches in flight
    assert is_off(model, padded[:1])

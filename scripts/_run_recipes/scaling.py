"""A recipe's command line made small: for a few processes on a CPU, and for one to compare with.

Every flag that is changed, added or left out is noted with what it was and why. Ratios stay: query
groups, feed-forward widths, virtual stages, recomputation. All else is passed on as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_wlb.settings.pattern import FLAG as PATTERN
from megatron_wlb.settings.pattern import MAMBA

MOST_PROCESSES = 4
NUM_STEPS = 3
WINDOW_TOKENS = 128
VOCAB_SIZE = 511
"""Every TP up to 4 pads it to 512. Its last token ends documents of mock data, and of no corpus."""
MIDDLES = {"prefix": 256, "middle": 257, "suffix": 258, "pad": 259, "eod": 0}
"""Tokens of fill-in-the-middle, which NullTokenizer knows by number: ids from 256 on are no bytes
of the corpus, whose documents end with 0."""
HEAD_DIM = 8
STATE_DIM = 16
MOST_EXPERTS = 8
LOSS_OF_EXPERTS = "0.5"
"""The coefficient of an auxiliary loss: so large that the gradient's norm tells of it."""

Value = tuple[str, ...]
"""What stands behind a flag; nothing behind a switch."""

SCALED, LAYOUT, DATA, CHECKPOINT = "scaled", "layout", "data", "checkpoint"
FP32, GPU, DROPOUT, LOGS, FAULTS = "fp32", "needs a GPU", "dropout", "logs", "faults"
ROUTING, PACKAGE = "routing", "needs a package"
LEFT_OUT = {
    DATA: """data-path train-data-path valid-data-path test-data-path data-args-path
        per-split-data-args-path vocab-file merge-file tokenizer-model
        tiktoken-pattern tiktoken-num-special-tokens""",
    CHECKPOINT: """save load use-checkpoint-args pretrained-checkpoint auto-detect-ckpt-format
        use-persistent-ckpt-worker""",
    FP32: """bf16 fp16 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis
        grad-reduce-in-bf16""",
    GPU: """first-last-layers-bf16 te-rng-tracker apply-layernorm-1p
        defer-embedding-wgrad-compute wgrad-deferral-limit reuse-grad-buf-for-mxfp8-param-ag
        moe-router-padding-for-quantization
        moe-grouped-gemm moe-permute-fusion moe-router-fusion""",
    FAULTS: "error-injection-rate error-injection-type",
    LOGS: "wandb-project wandb-exp-name wandb-entity wandb-save-dir",
}  # fmt: skip
LEFT_OUT_PREFIXES = {GPU: "--fp8-", CHECKPOINT: "--async-"}

ON_CPU: Mapping[str, Value] = {
    "--distributed-backend": ("gloo",),
    "--transformer-impl": ("local",),
    "--no-gradient-accumulation-fusion": (),
    "--no-persist-layer-norm": (),
    "--no-masked-softmax-fusion": (),
    "--no-bias-gelu-fusion": (),
    "--no-bias-swiglu-fusion": (),
    "--no-bias-dropout-fusion": (),
    "--no-rope-fusion": (),
}

OF_LAYOUT = """
    tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
    sequence-parallel num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
    microbatch-group-size-per-virtual-pipeline-stage decoder-first-pipeline-num-layers
    decoder-last-pipeline-num-layers account-for-embedding-in-pipeline-split
    account-for-loss-in-pipeline-split pipeline-model-parallel-layout
    hierarchical-context-parallel-sizes cp-comm-type expert-tensor-parallel-size
    expert-model-parallel-size num-distributed-optimizer-instances use-tp-pp-dp-mapping
    use-distributed-optimizer overlap-grad-reduce overlap-param-gather
    overlap-param-gather-with-optimizer-step align-grad-reduce align-param-gather
    overlap-p2p-communication-warmup-flush no-overlap-p2p-communication
    defer-embedding-wgrad-compute wgrad-deferral-limit tp-comm-overlap tp-comm-overlap-cfg
    ddp-average-in-collective ddp-bucket-size use-torch-fsdp2 use-megatron-fsdp
    data-parallel-sharding-strategy ckpt-format init-model-with-meta-device
    check-weight-hash-across-dp-replicas-interval recompute-granularity recompute-method
    recompute-num-layers recompute-activations recompute-modules
"""
"""Flags that change where and when the same numbers are computed: one process runs without."""


@dataclass(frozen=True)
class Change:
    """What became of one flag; empty where it was not there, or is no longer."""

    flag: str
    before: str
    after: str
    kind: str


@dataclass(frozen=True)
class Scaled:
    """Two small runs of a recipe: in its layout, and in one process."""

    words: tuple[str, ...]
    alone: tuple[str, ...]
    num_processes: int
    layout: str
    """As in ``TP2 PP2 DP1``."""
    changes: tuple[Change, ...]


class DoesNotFitError(Exception):
    """A layout that cannot be halved to fit the processes."""


def scale(words: Sequence[str], num_devices: int, corpus: str) -> Scaled:
    """Makes a recipe's ``words``, which are for ``num_devices``, small.

    Raises :class:`DoesNotFitError` with the reason.
    """
    flags = _Flags(words)
    _leave_out(flags)
    given_pp = flags.number("--pipeline-model-parallel-size", 1)
    tp, pp, cp, dp = _scale_layout(flags, num_devices)
    given_layers = flags.number("--num-layers", 1)
    if PATTERN in flags.values:
        _scale_pattern(flags, given_pp // pp, tp * cp)
    else:
        flags.put("--num-layers", _scale_layers(flags, pp), SCALED)
    _scale_model(flags, tp)
    if "--num-experts" in flags.values:
        _scale_experts(flags, given_layers, tp, tp * cp * dp)
    else:  # Megatron checks it all the same.
        etp = min(flags.number("--expert-tensor-parallel-size", 1), tp * cp * dp)
        flags.put_if_given("--expert-tensor-parallel-size", etp, LAYOUT)
    _scale_batch(flags, pp, dp)
    for flag, value in ON_CPU.items():
        flags.put(flag, value, GPU)
    flags.put_if_given("--cross-entropy-fusion-impl", ("native",), GPU)
    if "muon" in flags.values.get("--optimizer", ("",))[0]:
        flags.put("--optimizer", ("adam",), PACKAGE)
    for flag in ("--hidden-dropout", "--attention-dropout"):
        flags.put(flag, ("0.0",), DROPOUT)
    if "--mock-data" not in flags.values:
        flags.put("--data-path", (corpus,), DATA)
    flags.put("--tokenizer-type", ("NullTokenizer",), DATA)
    flags.put("--vocab-size", (str(VOCAB_SIZE),), DATA)
    if "--fim-data" in flags.values:
        for name, token in MIDDLES.items():
            flags.put(f"--fim-{name}-token", token, DATA)
    of_layout = {f"--{name}" for name in OF_LAYOUT.split()}
    alone = {flag: value for flag, value in flags.values.items() if flag not in of_layout}
    if PATTERN in alone:
        alone[PATTERN] = (alone[PATTERN][0].replace("|", ""),)
    named = {"TP": tp, "PP": pp, "CP": cp, "DP": dp}
    return Scaled(
        _words(flags.values), _words(alone), tp * pp * cp * dp,
        " ".join(f"{name}{size}" for name, size in named.items() if size > 1) or "one process",
        tuple(flags.changes()),
    )  # fmt: skip


def fewest(words: Sequence[str]) -> int:
    """Devices that a recipe's experts take in all stages."""
    flags = _Flags(words)
    names = ("expert-model-parallel", "expert-tensor-parallel", "pipeline-model-parallel")
    return math.prod(flags.number(f"--{name}-size", 1) for name in names)


def grouped(words: Sequence[str]) -> dict[str, Value]:
    """Flags with what stands behind them; of one that is given twice the last counts."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            values = found[flag] = [value] if equals else []
        else:
            values.append(word)
    return {flag: tuple(values) for flag, values in found.items()}


class _Flags:
    """A command line that notes each change."""

    def __init__(self, words: Sequence[str]) -> None:
        self.values = grouped(words)
        self._given = dict(self.values)
        self._kinds: dict[str, str] = {}

    def number(self, flag: str, default: int) -> int:
        return int(self.values.get(flag, (str(default),))[0])

    def put(self, flag: str, value: Value | int, kind: str) -> None:
        value = (str(value),) if isinstance(value, int) else value
        if self.values.get(flag) != value:
            self.values[flag] = value
            self._kinds[flag] = kind

    def put_if_given(self, flag: str, value: Value | int, kind: str) -> None:
        if flag in self.values:
            self.put(flag, value, kind)

    def leave_out(self, flag: str, kind: str) -> None:
        if self.values.pop(flag, None) is not None:
            self._kinds[flag] = kind

    def changes(self) -> list[Change]:
        return [
            Change(flag, _shown(self._given.get(flag)), _shown(self.values.get(flag)), kind)
            for flag, kind in self._kinds.items()
            if self._given.get(flag) != self.values.get(flag)
        ]


def _shown(value: Value | None) -> str:
    return "" if value is None else " ".join(value) or "given"


def _words(values: Mapping[str, Value]) -> tuple[str, ...]:
    return tuple(word for flag, value in values.items() for word in (flag, *value))


def _leave_out(flags: _Flags) -> None:
    for kind, names in LEFT_OUT.items():
        for name in names.split():
            flags.leave_out(f"--{name}", kind)
    for kind, prefix in LEFT_OUT_PREFIXES.items():
        for flag in [flag for flag in flags.values if flag.startswith(prefix)]:
            flags.leave_out(flag, kind)


def _scale_layout(flags: _Flags, num_devices: int) -> tuple[int, int, int, int]:
    """TP, PP, CP and DP: fewer replicas first, then the largest of the others is halved."""
    names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    given = [flags.number(f"--{name}", 1) for name in names]
    sizes = list(given)
    while (shards := sizes[0] * sizes[1] * sizes[2]) > MOST_PROCESSES:
        largest = sizes.index(max(sizes))
        if sizes[largest] % 2:
            raise DoesNotFitError(f"TP × PP × CP = {shards} cannot be halved")
        sizes[largest] //= 2
    for name, size, before in zip(names, sizes, given, strict=True):
        if size != before:
            flags.put(f"--{name}", size, LAYOUT)
    tp, pp, cp = sizes
    replicas = max(1, num_devices // (given[0] * given[1] * given[2]))
    dp = min(replicas, MOST_PROCESSES // shards)
    if cp != given[2]:
        flags.put_if_given("--hierarchical-context-parallel-sizes", ("1", str(cp)), LAYOUT)
    if flags.number("--num-distributed-optimizer-instances", 1) > dp * cp:
        flags.put("--num-distributed-optimizer-instances", dp * cp, LAYOUT)
    return tp, pp, cp, dp


def _scale_pattern(flags: _Flags, joined: int, most_groups: int) -> None:
    """Leaves a stage, of ``joined`` in the recipe, and a depth one layer of each symbol."""
    stages, *depths = flags.values[PATTERN][0].split("/")
    segments = stages.split("|")
    segments = ["".join(segments[at : at + joined]) for at in range(0, len(segments), joined)]
    few = ["".join(dict.fromkeys(part)) for part in (*segments, *depths)]
    stages = "|".join(few[: len(segments)])
    flags.put(PATTERN, ("/".join([stages, *few[len(segments) :]]),), SCALED)
    flags.leave_out("--num-layers", SCALED)  # Megatron counts symbols
    if MAMBA in stages:
        flags.put("--mamba-head-dim", HEAD_DIM, SCALED)
        flags.put("--mamba-state-dim", STATE_DIM, SCALED)
        flags.put("--mamba-num-groups", max(2, most_groups), SCALED)
        flags.leave_out("--mamba-num-heads", SCALED)  # as many as the width has


def _scale_model(flags: _Flags, tp: int) -> None:
    hidden, heads = flags.number("--hidden-size", 1), flags.number("--num-attention-heads", 1)
    groups = flags.number("--num-query-groups", heads)
    few_groups = groups if groups < 4 else max(4, tp)
    few_heads = few_groups * max(1, heads // groups)
    small = few_heads * HEAD_DIM

    def shrunk(flag: str, by: float, multiple: int) -> None:
        if flag in flags.values:
            size = flags.number(flag, 0) * by / multiple
            flags.put(flag, max(1, round(size)) * multiple, SCALED)

    flags.put_if_given("--num-attention-heads", few_heads, SCALED)
    flags.put_if_given("--num-query-groups", few_groups, SCALED)
    flags.put_if_given("--hidden-size", small, SCALED)
    shrunk("--kv-channels", HEAD_DIM / (hidden / heads), 2)
    for name in (
        "ffn-hidden-size", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size",
        "moe-latent-size",
    ):  # fmt: skip
        shrunk(f"--{name}", small / hidden, 8)
    if "--multi-latent-attention" in flags.values:
        _scale_latent(flags)
    shrunk("--mup-base-hidden-size", small / hidden, 8)
    if flags.number("--make-vocab-size-divisible-by", 128) > 128:
        flags.put("--make-vocab-size-divisible-by", 128, SCALED)
    longest = flags.number("--max-position-embeddings", 0) // max(
        1, flags.number("--seq-length", 1)
    )
    flags.put_if_given("--max-position-embeddings", max(1, longest) * WINDOW_TOKENS, SCALED)
    flags.put_if_given("--seq-length", WINDOW_TOKENS, SCALED)


def _scale_latent(flags: _Flags) -> None:
    """Heads of multi-latent attention as other heads, in their ratios, and ranks as heads.

    TP divides what down projections give.
    """
    head = flags.number("--qk-head-dim", 128)
    for name, default in (
        ("qk-head-dim", 128), ("qk-pos-emb-head-dim", 64), ("v-head-dim", 128),
        ("kv-lora-rank", 32), ("q-lora-rank", 0),
    ):  # fmt: skip
        size = flags.number(f"--{name}", default) * HEAD_DIM / head
        if size:
            flags.put(f"--{name}", max(1, round(size / 4)) * 4, SCALED)


def _scale_experts(flags: _Flags, given_layers: int, tp: int, num_ranks: int) -> None:
    """Fewer experts, over ``num_ranks``: the processes of a pipeline stage."""
    num_layers = flags.number("--num-layers", 1)
    if num_layers != given_layers and "[" in flags.values.get("--moe-layer-freq", ("",))[0]:
        flags.put("--moe-layer-freq", (f"[0]+[1]*{num_layers - 1}",), SCALED)
    num_experts = min(flags.number("--num-experts", 1), MOST_EXPERTS)
    flags.put("--num-experts", num_experts, SCALED)
    _scale_groups(flags, num_experts)
    if flags.number("--moe-router-topk", 2) > num_experts:
        flags.put("--moe-router-topk", num_experts // 2, SCALED)
    modules = flags.values.get("--recompute-modules", ())
    if "moe_act" in modules:  # of grouped kernels; whole layers of experts do without
        modules = tuple(dict.fromkeys("moe" if one == "moe_act" else one for one in modules))
        flags.put("--recompute-modules", modules, GPU)
    etp = min(flags.number("--expert-tensor-parallel-size", tp), num_ranks)
    ep = min(flags.number("--expert-model-parallel-size", 1), num_experts)
    instances = flags.number("--num-distributed-optimizer-instances", 1)
    while ep * etp > 1 and num_ranks % (ep * etp * instances):
        ep, etp = (ep, etp // 2) if etp > 1 else (ep // 2, etp)
    flags.put_if_given("--expert-model-parallel-size", ep, LAYOUT)
    if etp != flags.number("--expert-tensor-parallel-size", tp):
        flags.put("--expert-tensor-parallel-size", etp, LAYOUT)
    if flags.values.get("--moe-router-load-balancing-type") == ("sinkhorn",):
        flags.put("--moe-router-load-balancing-type", ("none",), ROUTING)
        if flags.number("--moe-router-topk", 2) == 1:
            # The scores that sinkhorn gives one expert; Megatron refuses softmax's there.
            flags.put("--moe-router-score-function", ("sigmoid",), ROUTING)
    for flag in ("--moe-aux-loss-coeff", "--moe-z-loss-coeff"):
        if any(map(float, flags.values.get(flag, ()))):
            flags.put(flag, (LOSS_OF_EXPERTS,) * len(flags.values[flag]), SCALED)


def _scale_groups(flags: _Flags, num_experts: int) -> None:
    """As many groups of experts as leave each those that a token takes of it; in their ratios."""
    names = ("--moe-router-num-groups", "--moe-router-group-topk", "--moe-router-topk")
    if not flags.values.keys() >= set(names):
        return
    groups, chosen, topk = (flags.number(name, 1) for name in names)
    while chosen * num_experts < topk * groups:
        groups, chosen, topk = (max(1, number // 2) for number in (groups, chosen, topk))
        for name, number in zip(names, (groups, chosen, topk), strict=True):
            flags.put(name, number, SCALED)


def _scale_layers(flags: _Flags, pp: int) -> int:
    """As few layers as the layout takes: each stage has one at least, a virtual one as many as in
    the recipe.
    """
    if "--pipeline-model-parallel-layout" in flags.values:  # it names each layer
        return flags.number("--num-layers", 1)
    stages = pp
    per_stage = flags.number("--num-layers-per-virtual-pipeline-stage", 0)
    if per_stage:
        stages = 2 * pp  # of all numbers of virtual stages two are enough
    elif "--num-virtual-stages-per-pipeline-rank" in flags.values:
        stages = pp * flags.number("--num-virtual-stages-per-pipeline-rank", 1)
    ends = [flags.number(f"--decoder-{end}-pipeline-num-layers", 0) for end in ("first", "last")]
    if any(ends):
        between = pp - sum(map(bool, ends))
        per_middle = max(1, (stages // pp) * (per_stage or 1))
        return sum(ends) + between * per_middle
    counted = sum(
        f"--account-for-{part}-in-pipeline-split" in flags.values for part in ("embedding", "loss")
    )
    fewest = stages * (per_stage or (2 if stages == 1 else 1)) - counted
    return fewest if fewest > 1 else fewest + stages


def _scale_batch(flags: _Flags, pp: int, dp: int) -> None:
    micro = min(2, flags.number("--micro-batch-size", 1))
    group = flags.number("--microbatch-group-size-per-virtual-pipeline-stage", pp)
    batch = 2 * max(group, pp) * dp * micro
    flags.put_if_given("--micro-batch-size", micro, SCALED)
    flags.put_if_given("--global-batch-size", batch, SCALED)
    flags.put_if_given("--eval-global-batch-size", batch, SCALED)
    first = batch
    if "--step-batch-size-schedule" in flags.values:
        first = batch // 2
        grown = first * flags.number("--seq-length", 1)
        flags.put("--step-batch-size-schedule", (f"0:{first} {grown}:{batch}",), SCALED)
    flags.put_if_given("--train-iters", NUM_STEPS, SCALED)
    flags.put_if_given("--train-samples", first + (NUM_STEPS - 1) * batch, SCALED)
    # A rate that is there from the first steps on, so that they depend on the gradients before.
    for flag, value in (
        ("--lr-decay-iters", 100), ("--lr-decay-samples", 100 * batch),
        ("--lr-warmup-iters", 1), ("--lr-warmup-samples", batch),
        ("--eval-iters", 1), ("--log-interval", 1),
    ):  # fmt: skip
        if flags.number(flag, 0) > value:
            flags.put(flag, value, SCALED)

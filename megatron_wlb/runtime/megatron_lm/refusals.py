"""Flags of Megatron-LM that cannot run with step plans, refused before any process group forms.

Some of them Megatron would run and silently compute something else. A flag that is not in the table
works as it does in Megatron, or changes nothing (``docs/limits.md`` says which).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_wlb.errors import ConfigError, refuse_all
from megatron_wlb.planning.packing.settings import kind_in
from megatron_wlb.planning.refusal import Refusal, below, given, lines, other_than
from megatron_wlb.runtime.saving.newest import newest_step
from megatron_wlb.runtime.saving.sealed import is_store
from megatron_wlb.settings.command_line import megatron_flags
from megatron_wlb.settings.pattern import OTHERS, STATES
from megatron_wlb.settings.split import PipelineSplit

logger = logging.getLogger(__name__)

_NAMES = {
    "--fp8-format": "fp8",
    "--fp4-format": "fp4",
    "--no-overlap-p2p-communication": "overlap_p2p_comm",
}
"""Flags whose attributes are not called as they are."""


class Given(argparse.Namespace):
    """Megatron's arguments as they were typed; those that conditions below ask for have a type.

    What this version does not have, or was not given, has the default here.
    """

    world_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    pipeline_model_parallel_layout: str | None = None
    hybrid_layer_pattern: str | None = None
    overlap_p2p_comm: bool = False
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    dist_ckpt_optim_fully_reshardable: bool = False
    enable_gloo_process_groups: bool = True
    bf16: bool = False
    fp16: bool = False
    fp8: str | None = None
    fp8_recipe: str | None = None
    transformer_impl: str | None = None
    add_bias_linear: bool = False
    mtp_num_layers: int | None = None
    num_experts: int | None = None
    moe_enable_deepep: bool = False
    moe_flex_dispatcher_backend: str | None = None
    recompute_granularity: str | None = None
    data_path: Sequence[str] | None = None
    data_args_path: str | None = None
    train_data_path: Sequence[str] | None = None
    per_split_data_args_path: str | None = None
    mock_data: bool = False
    ckpt_format: str | None = None
    load: str | None = None
    save: str | None = None
    no_load_optim: bool = False
    no_save_optim: bool = False
    finetune: bool = False
    skip_train: bool = False
    train_iters: int | None = None
    train_samples: int | None = None
    lr: float | None = None
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_samples: int | None = None
    vocab_size: int | None = None
    eval_interval: int | None = None
    wlb_host_gib: float | None = None

    def __init__(
        self, args: argparse.Namespace, form: str = "{} does not work with --wlb-packing:"
    ) -> None:
        """``form`` is how a line begins, with the flag in the braces."""
        super().__init__(**{name: v for name, v in vars(args).items() if v is not None})
        self.form = form

    def value(self, name: str) -> Any:
        """What a flag says; None where it was not given."""
        return getattr(self, attribute(name), None)

    def begins(self, name: str) -> str:
        """The flag as it was typed, in the form."""
        value = self.value(name)
        value = getattr(value, "name", value)  # of an enumeration
        if isinstance(value, list | tuple):
            value = " ".join(map(str, value))
        has_none = isinstance(value, bool) or value is None
        return self.form.format(name if has_none else f"{name} {value}")

    @property
    def wsd_decays(self) -> bool:
        return self.lr_wsd_decay_iters is not None or self.lr_wsd_decay_samples is not None

    @property
    def names_corpora(self) -> bool:
        own = self.train_data_path or self.per_split_data_args_path
        return bool(self.data_path or self.data_args_path or own)

    @property
    def shards(self) -> int:
        """Over how many processes one model is divided."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )


def attribute(flag: str) -> str:
    """The attribute that a flag sets."""
    return _NAMES.get(flag) or flag[2:].replace("-", "_")


def _mixes_up(a: Given, _: Any) -> bool:
    split = PipelineSplit(
        pipeline_model_parallel_layout=a.pipeline_model_parallel_layout,
        hybrid_layer_pattern=a.hybrid_layer_pattern,
    )
    is_virtual = (
        a.num_layers_per_virtual_pipeline_stage is not None
        or a.num_virtual_stages_per_pipeline_rank is not None
        or (split.vpp_size(a.pipeline_model_parallel_size) or 1) > 1
    )
    return a.pipeline_model_parallel_size == 2 and is_virtual and not a.overlap_p2p_comm


def _cannot_load(a: Given, is_sharded: Any) -> bool:
    saves_state = is_sharded and a.save and not a.no_save_optim
    resharded = a.ckpt_format == "torch_dist" and a.dist_ckpt_optim_fully_reshardable
    return bool(saves_state and not (a.bf16 or a.fp16) and not resharded)


def _loads_newer_state(a: Given, step: Any) -> bool:
    loads_state = not (a.no_load_optim or a.finetune or a.skip_train)
    shards_state = a.use_distributed_optimizer and loads_state
    if not (step and a.load and a.ckpt_format == "torch" and shards_state):
        return False
    return is_store(a.load) or newest_step(a.load) != step


def _other_layers(_: Given, pattern: Any) -> str:
    return "; ".join(reason for sign, reason in OTHERS.items() if sign in str(pattern))


_BALANCING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"}


def _balances_else(_: Given, kinds: Any) -> bool:
    return bool(({kinds} if isinstance(kinds, str) else {*(kinds or ())}) - _BALANCING)


def _gathers_tokens(a: Given, kind: Any) -> bool:
    return bool(kind == "allgather" and a.num_experts)


def _recomputes_biases(a: Given, modules: Any) -> bool:
    is_selective = a.recompute_granularity == "selective" and not a.num_experts
    return bool(is_selective and "mlp" in (modules or []) and a.add_bias_linear)


def _runs_deepep(a: Given, kind: Any) -> bool:
    backend = a.moe_flex_dispatcher_backend or "deepep"
    return kind == "flex" and (a.moe_enable_deepep or backend == "deepep")


def _pads_experts(a: Given, kind: Any) -> bool:
    return kind not in (None, "alltoall", "allgather") and not _runs_deepep(a, kind)


_OTHER_LAYERS = "cost and memory models know attention, feed-forward parts and experts only"
_OWN_PACKING = "it chooses which documents run together, and on how many ranks, as plans do"
_OTHER_DATA = "plans are made of the documents of .bin/.idx corpora"
_ONE_GRAPH = "a graph has one length, lengths of micro-batches vary"
_ONE_BUFFER = "its buffers have one length, lengths of micro-batches vary"
_OTHER_ORDER = "its schedule receives in another order"
_OWN_DATA_PARALLEL = (
    "ranks that share weights so train other micro-batches, which plans do not know"
)
_OWN_ORDER = "logits belong to documents in Megatron's order"
_OWN_RANKS = "ranks compare their plans"
_NO_LOGITS = "packed attention does not report its logits"

_YAML = Refusal("--yaml-cfg", given, "it replaces all flags, ours too", "use flags")

_LEAST = {
    "--tensor-model-parallel-size": 1, "--pipeline-model-parallel-size": 1,
    "--context-parallel-size": 1, "--log-interval": 1, "--tensorboard-log-interval": 1,
    "--lr-decay-iters": 1, "--manual-gc-interval": 0, "--weight-decay": 0, "--init-method-std": 0,
}  # fmt: skip
"""Numbers that must not be smaller."""

REFUSALS: tuple[Refusal[Given], ...] = (
    # Settings and what is trained.
    _YAML,
    Refusal("--perform-rl-step", given, _OTHER_DATA),
    Refusal("--vision-pretraining", given, _OTHER_DATA),
    Refusal("--export-kd-teacher-load", given, "distillation has a loss of its own"),
    Refusal("--ckpt-convert-format", given, "nothing is trained", "convert alone"),
    Refusal("--fake-process-group", given, _OWN_RANKS),
    Refusal("--lazy-mpu-init", given, _OWN_RANKS),
    Refusal("", lambda a, _: a.shards > 0 and a.world_size % a.shards,
        "{f.world_size} processes do not divide by TP × PP × CP = {f.shards}",
        "start a multiple of that"),
    # The model.
    Refusal("--cache-mla-latents", given, "it is for inference"),
    Refusal("--mla-down-proj-fusion", given, "attention runs Megatron's separate down projections"),
    Refusal("--hybrid-override-pattern", given, "its name is another today",
        "use --hybrid-layer-pattern"),
    Refusal("--hybrid-layer-pattern", _other_layers, "{found}",
        "leave out the --wlb flags for such a model"),
    Refusal("--enable-mhc-connections", given, _OTHER_LAYERS),
    Refusal("--heterogeneous-layers-config-path", given, _OTHER_LAYERS),
    Refusal("--experimental-attention-variant", given, "a GPTModel runs softmax attention here",
        "leave it out; pretrain_hybrid.py runs gated delta nets (G in --hybrid-layer-pattern)"),
    Refusal("--mtp-standalone", given, "its stage has a schedule of its own"),
    Refusal("--mtp-use-repeated-layer", given,
        "cost and memory models know a layer for each depth"),
    Refusal("--mtp-detach-heads", given, "it was not compared with one process"),
    Refusal("--position-embedding-type", other_than("rope", "learned_absolute", "none"),
        "positions are by document", "use rope, learned_absolute or none"),
    Refusal("--softmax-type", other_than("vanilla"), "packed attention has the plain softmax",
        "use vanilla"),
    Refusal("--qk-clip", given, _NO_LOGITS),
    Refusal("--log-max-attention-logit", given, _NO_LOGITS),
    Refusal("--transformer-impl", other_than("local", "transformer_engine"),
        "it is made for inference", "use local or transformer_engine"),
    Refusal("--use-kitchen-attention", given, "packed attention takes its place"),
    # Kernels that are made for one length.
    Refusal("--fp8-format", lambda a, fp8: fp8 and a.transformer_impl == "local",
        "local layers would train in bf16 without a warning",
        "use --transformer-impl transformer_engine"),
    Refusal("--fp4-format", given,
        "it needs Blackwell GPUs, and the cost model has no data for them", "use --fp8-format"),
    Refusal(
        "--moe-shared-expert-overlap", lambda a, overlaps: overlaps and a.wlb_host_gib,
        "its passes run on a stream of their own, and with --wlb-host-gib memory that comes back "
        "goes to other streams too early",
        "leave one of the two out",
    ),
    Refusal("--fine-grained-activation-offloading", given,
        "it keeps the host's buffers of every length that it has met, and lengths of micro-batches "
        "vary"),
    Refusal("--cpu-offloading-num-layers", given, _ONE_BUFFER),
    Refusal(
        "--defer-embedding-wgrad-compute", lambda a, defers: defers and a.sequence_parallel
        and a.tensor_model_parallel_size > 1, "with --sequence-parallel it gathers all "
        "micro-batches at the length of the first, and lengths of micro-batches vary"),
    Refusal("--recompute-modules", _recomputes_biases,
        "Megatron's recomputation of mlp returns the bias itself, whose gradient then needs "
        "itself: the first backward pass never ends",
        "use --disable-bias-linear, or leave mlp out"),
    # The layout.
    Refusal("--hybrid-context-parallel", given, _OWN_PACKING),
    Refusal("--dynamic-context-parallel", given, _OWN_PACKING),
    Refusal("--sequence-packing-scheduler", given, _OWN_PACKING),
    Refusal("--no-overlap-p2p-communication", _mixes_up,
        "with 2 pipeline stages and virtual stages, activations and gradients of one batch would "
        "be mixed up", "leave it out, or use other than 2 stages"),
    Refusal("--overlap-moe-expert-parallel-comm", given, _OTHER_ORDER),
    Refusal("--moe-token-dispatcher-type", _pads_experts,
        "the buffers of HybridEP hold as many tokens of each rank as of this one, but lengths of "
        "micro-batches vary",
        "use alltoall, or --moe-flex-dispatcher-backend deepep"),
    Refusal("--moe-pad-expert-input-to-capacity", given,
        "ranks would exchange as many tokens as their own micro-batch has, and lengths of "
        "micro-batches vary",
        "leave it out: --moe-expert-capacity-factor alone drops tokens too"),
    Refusal("--mlp-chunks-for-training", lambda a, num: (num or 1) > 1 and a.num_experts,
        "experts would be chosen for one part of a micro-batch after another, but their losses and "
        "counts are by document"),
    Refusal("--moe-router-load-balancing-type", _balances_else,
        "its quantiles are of a sequence, not a document",
        "use aux_loss, seq_aux_loss, global_aux_loss, sinkhorn or none"),
    Refusal("--use-megatron-fsdp", given,
        "its wrapper runs on CUDA devices alone, where it was not compared with one process",
        "use --use-torch-fsdp2 or --use-distributed-optimizer"),
    Refusal(
        "--use-torch-fsdp2", lambda a, wraps: wraps and (a.num_experts or a.mtp_num_layers),
        "with --num-experts or --mtp-num-layers it was not compared with one "
        "process", "use --use-distributed-optimizer"),
    Refusal("--tensor-parallel-num-weight-shards", given, _OWN_DATA_PARALLEL),
    Refusal("--expert-tensor-parallel-num-weight-shards", given, _OWN_DATA_PARALLEL),
    # What Megatron finds later, by an assertion or a division by 0.
    *(
        Refusal[Given](
            flag, below(least), "Megatron-LM counts or divides by it", f"use {least} or more")
        for flag, least in _LEAST.items()
    ),
    Refusal("--loss-scale", lambda a, scale: a.fp16 and scale is not None and scale < 0,
        "losses would be multiplied by it", "use a number above 0, or 0 for a dynamic scale"),
    Refusal("--initial-loss-scale", lambda a, scale: a.fp16 and scale is not None and scale <= 0,
        "losses would be multiplied by it", "use a number above 0"),
    Refusal("--lr-warmup-fraction", lambda _, part: part is not None and not 0 <= part < 1,
        "the learning rate would never decay", "use a number in [0, 1)"),
    Refusal("--lr-decay-style",
        lambda a, style: style == "WSD" and not a.wsd_decays and not a.skip_train,
        "nothing says when it decays", "give --lr-wsd-decay-iters"),
    *(
        Refusal[Given](flag, lambda a, num: num is not None and num < (0 if a.skip_train else 1),
            "there is nothing to train", "use 1 or more")
        for flag in ("--train-iters", "--train-samples")
    ),
    Refusal("", lambda a, _: a.train_iters is a.train_samples is None and not a.skip_train,
        "nothing says how long to train", "give --train-iters"),
    Refusal("", lambda a, _: a.lr is None and not a.skip_train,
        "--lr is missing, and Megatron-LM has no default for it", "give it, as in --lr 1e-4"),
    Refusal("--tokenizer-type", lambda a, kind: kind == "NullTokenizer" and a.vocab_size is None,
        "it has no vocabulary of its own", "give --vocab-size"),
    # The data.
    Refusal("", lambda a, _: not (a.names_corpora or a.mock_data),
        "no corpus is given", "give --data-path with the prefix of a .bin/.idx corpus, or "
        "--mock-data"),
    Refusal("--mock-data", lambda a, mocks: mocks and a.names_corpora,
        "it stands for a corpus, and one is given", "leave one of them out"),
    Refusal("--use-varlen-dataset", given, _OTHER_DATA, "use --data-path, or --sft with its files"),
    Refusal("--logits-load-dir", given, _OWN_ORDER),
    Refusal("--logits-save-dir", given, _OWN_ORDER),
    Refusal("--dataloader-inter-document-masking", given,
        "attention stays inside each document already"),
    Refusal("--object-storage-cache-path", given, "corpora must be files"),
    Refusal("", lambda a, _: not (a.eval_interval or a.skip_train),
        "--eval-interval is missing, and Megatron-LM needs it even without evaluations",
        "add --eval-interval 1000"),
    Refusal("--full-validation", given, "an evaluation has a fixed number of steps",
        "use --eval-iters"),
    Refusal("--multiple-validation-sets", given, "an evaluation uses one blend"),
    Refusal("--phase-transition-iterations", given, "a stream of documents has one phase"),
    # Checkpoints.
    Refusal("--override-ckpt-iteration", given,
        "only a saved step knows which documents were trained",
        "give --ckpt-step with a saved one"),
    Refusal("--use-distributed-optimizer", _cannot_load,
        "in fp32 Megatron saves a form of its state that it cannot load",
        "add --dist-ckpt-optim-fully-reshardable with --ckpt-format torch_dist, or train in "
        "--bf16"),
    Refusal("--ckpt-step", _loads_newer_state,
        "in the format torch Megatron loads the optimizer's state of the newest checkpoint with it",
        "write that step into latest_checkpointed_iteration.txt of --load"),
    Refusal("--ckpt-format", other_than("torch_dist", "torch"),
        "the planner's state is saved in two formats", "use torch_dist or torch"),
    Refusal("--non-persistent-ckpt-type", other_than("global"),
        "the planner's state is saved in files that all ranks see", "use global"),
)  # fmt: skip

_IN_STORE = "weights and optimizer state are in a store that is sharded over all ranks"
_OWN_STEPS = "a step's documents are those of a batch of one size"

OF_STRATEGIES: tuple[Refusal[Given], ...] = (
    Refusal(
        "--ckpt-format", other_than("torch_dist"), "checkpoints know no layout", "use torch_dist"
    ),
    Refusal("--use-torch-fsdp2", given, _IN_STORE),
    Refusal("--use-precision-aware-optimizer", given, _IN_STORE),
    Refusal("--optimizer-cpu-offload", given, _IN_STORE),
    Refusal("--optimizer", other_than("adam", "sgd"), _IN_STORE, "use adam or sgd"),
    Refusal("--init-model-with-meta-device", given, _IN_STORE),
    Refusal("--fp8-param-gather", given, _IN_STORE),
    Refusal("--check-weight-hash-across-dp-replicas-interval", given, _IN_STORE),
    Refusal("--save-wgrads-interval", given, _IN_STORE),
    Refusal("--save-params-interval", given, _IN_STORE),
    Refusal("--freeze-all-layers", given, "nothing would be trained"),
    Refusal("--step-batch-size-schedule", given, _OWN_STEPS),
    Refusal("--decrease-batch-size-if-needed", given, _OWN_STEPS),
    Refusal(
        "--moe-use-upcycling", given, "it needs layers of one layout", "upcycle in a run without it"
    ),
    Refusal(
        "--moe-router-enable-expert-bias",
        given,
        "biases of experts are no parameters, which the store "
        "would keep, and count the tokens of all replicas",
    ),
)
"""Flags that cannot run with ``--wlb-strategies``."""

STORED: tuple[Refusal[Given], ...] = (
    Refusal("--use-distributed-optimizer", given, _IN_STORE),
    Refusal("--overlap-grad-reduce", given, "gradients go to the store layer by layer already"),
    Refusal("--overlap-param-gather", given, "weights come from the store layer by layer already"),
)
"""Flags without effect there, which are turned off."""

NO_EFFECT: tuple[Refusal[Given], ...] = (
    Refusal("--reset-position-ids", given, "positions start anew in each document already"),
    Refusal("--reset-attention-mask", given, "attention stays inside each document already"),
    Refusal("--eod-mask-loss", given, "the last token of a document predicts nothing already"),
    Refusal("--dataloader-type", other_than("single", "external"),
        "documents come from our own stream (order and epochs: docs/data-and-checkpoints.md)"),
    Refusal("--per-dataset-sequences-path", given,
        "every corpus's own .idx file is read, which says how many sequences it has"),
    Refusal("--ddp-average-in-collective", given,
        "a loss per token divides gradients once, by the tokens of the step"),
    Refusal("--rampup-batch-size", given,
        "Megatron-LM ignores it, and has --step-batch-size-schedule instead"),
    Refusal("--hierarchical-context-parallel-sizes", given,
        "keys and values are gathered over all context-parallel ranks at once"),
    Refusal("--cp-comm-type", other_than(["p2p"], ["all_gather"], "p2p"),
        "keys and values are gathered over all context-parallel ranks at once"),
    Refusal("--enable-cuda-graph", given, _ONE_GRAPH),
    Refusal("--external-cuda-graph", given, _ONE_GRAPH),
    Refusal("--cuda-graph-impl", other_than("none"), _ONE_GRAPH),
    Refusal("--tp-comm-overlap", given, _ONE_BUFFER),
    Refusal("--moe-token-dispatcher-type", _gathers_tokens,
        "it gathers one length from all ranks, and alltoall, which "
        "computes the same, takes its place"),
)  # fmt: skip
"""Flags without which the same numbers are computed: told, and left alone or turned off."""

TOLD: tuple[Refusal[Given], ...] = (
    Refusal("--attention-dropout", given,
        "the kernels flash-attn-3 and torch-cpu have no dropout, and attention has no head start "
        "with it",
        "give --attention-dropout 0 if speed counts more (Megatron's default is 0.1)"),
    Refusal("--moe-token-dispatcher-type", _runs_deepep,
        "DeepEP exchanges the numbers of tokens, which lengths that vary need, but nobody has "
        "tried it with plans yet",
        "compare the first losses with those of alltoall"),
    Refusal("--disable-gloo-process-groups", lambda a, _: not a.enable_gloo_process_groups,
        "Megatron makes no groups of gloo, but ranks still open two, to compare plans between "
        "their hosts without waiting for GPUs",
        "let their connections through (GLOO_SOCKET_IFNAME names the network)"),
    Refusal("--fp8-format",
        lambda a, fp8: fp8 and a.fp8_recipe in (None, "delayed") and a.world_size > a.shards,
        "with delayed scaling data-parallel ranks wait for each other at each micro-batch",
        "--fp8-recipe tensorwise avoids that"),
    Refusal("--hybrid-layer-pattern", lambda a, text: text and STATES & set(text) and a.fp8,
        "nobody has tried --fp8-format with Mamba-2 or gated delta nets and plans yet",
        "compare the first losses with those of bf16"),
)  # fmt: skip
"""Flags that run, and what they cost here or what is still made in spite of them."""


def _unconditional(row: Refusal[Given]) -> str:
    """What is said of a flag that is refused wherever it is given."""
    return row.line(Given(argparse.Namespace(**{attribute(row.name): True})))


OF_OTHER_VERSIONS: dict[str, str] = {
    **{flag: f"{flag} is of another version of Megatron-LM; leave it out, or use that version"
       for flag in megatron_flags()},
    **{row.name: _unconditional(row) for row in REFUSALS if row.when is given},
}  # fmt: skip
"""What is said of flags that this version does not have: of those that plans cannot run with in any
version, why."""

_TURNED_OFF: dict[str, Any] = {
    "ddp_average_in_collective": False,
    "hierarchical_context_parallel_sizes": None,
    "cp_comm_type": ["p2p"],  # a2a+p2p asks for these sizes
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "cuda_graph_impl": "none",
    "tp_comm_overlap": False,
}


def check(args: argparse.Namespace, others: Sequence[str] = ()) -> None:
    """Refuses flags as they were given, before Megatron's own checks change them, and ``others``
    that are known by then. Warns of those without effect.

    Raises :class:`ConfigError` for flags that cannot run, a line each: its name, the reason and the
    remedy.
    """
    refuse_all([*_refusals(args), *others])
    stored = STORED if _has_strategies(args) else ()
    needless = lines((*NO_EFFECT, *stored), Given(args, "{} has no effect with --wlb-packing:"))
    for line in (*needless, *lines(TOLD, Given(args, "{}:"))):
        logger.warning("%s", line)


def _refusals(args: argparse.Namespace) -> Iterator[str]:
    yield from lines(REFUSALS, Given(args))
    yield from of_packing(args, getattr(args, "wlb_packing", None))
    if _has_strategies(args):
        yield from lines(OF_STRATEGIES, Given(args, "{} does not work with --wlb-strategies:"))


def of_packing(args: argparse.Namespace, packing: str | None) -> Iterator[str]:
    """Lists the flags that cannot run with a packing."""
    cannot = kind_in(packing).cannot if packing else {}
    rows = (Refusal[Given](flag, given, reason) for flag, reason in cannot.items())
    return lines(rows, Given(args))


def of_choice(args: argparse.Namespace, packing: str) -> Iterator[str]:
    """Lists why ``--wlb-packing auto`` does not take a packing."""
    yield from of_packing(args, packing)
    if getattr(args, "sft", False) and kind_in(packing).windows:
        yield "its windows cut conversations (--sft)"


def _has_strategies(args: argparse.Namespace) -> bool:
    return getattr(args, "wlb_strategies", None) is not None


def turn_off(args: argparse.Namespace) -> None:
    """Turns off what has no effect but would fail; :func:`check` has told of it.

    Megatron's fused rotation of latents, which is on unless it is turned off, takes a token's row
    for its position.
    """
    for name, value in _TURNED_OFF.items():
        if hasattr(args, name):
            setattr(args, name, value)
    if _has_strategies(args):
        vars(args).update(dict.fromkeys((attribute(row.name) for row in STORED), False))
    if _gathers_tokens(Given(args), getattr(args, "moe_token_dispatcher_type", None)):
        args.moe_token_dispatcher_type = "alltoall"
    if getattr(args, "multi_latent_attention", False):
        args.apply_rope_fusion = False


def check_words(words: Sequence[str]) -> None:
    """Refuses what must be refused before Megatron's parser sees the command line.

    Raises :class:`ConfigError` for ``--yaml-cfg``, from which parsing returns without any of our
    flags.
    """
    if any(word.split("=")[0] == _YAML.name for word in words):
        raise ConfigError(_unconditional(_YAML))

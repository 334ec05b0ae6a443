"""Flags of Megatron-LM that cannot run with step plans, refused before any process group forms.

Some of them Megatron would run and silently compute something else. A flag that is not in the table
works as it does in Megatron, or changes nothing (``docs/limits.md`` says which).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_wlb.errors import ConfigError, refuse_all
from megatron_wlb.planning.packing.settings import kind_in
from megatron_wlb.settings.command_line import megatron_flags
from megatron_wlb.settings.split import PipelineSplit

logger = logging.getLogger(__name__)

_NAMES = {
    "--fp8-format": "fp8",
    "--fp4-format": "fp4",
    "--no-overlap-p2p-communication": "overlap_p2p_comm",
}
"""Flags whose attributes are not called as they are."""


@dataclass(frozen=True)
class Refusal:
    """One flag, when it cannot run, why, and what to do."""

    flag: str
    reason: str
    remedy: str = "leave it out"
    allowed: tuple[Any, ...] = ()
    """Values that can run. None given: the flag's absence (None, False, 0, an empty list)."""
    refused: Callable[[_Given], Any] | None = None
    """Decides instead, if given."""

    @property
    def name(self) -> str:
        """The attribute that the flag sets."""
        return _NAMES.get(self.flag) or self.flag[2:].replace("-", "_")

    def applies(self, args: argparse.Namespace) -> bool:
        if self.refused is not None:
            return bool(self.refused(_Given(args)))
        value = getattr(args, self.name, None)
        if self.allowed:
            return value not in (None, *self.allowed)
        return value is not None and value is not False and value != 0 and value != []

    def given(self, args: argparse.Namespace) -> str:
        """The flag as it was typed."""
        value = getattr(args, self.name, None)
        value = getattr(value, "name", value)  # of an enumeration
        if isinstance(value, list | tuple):
            value = " ".join(map(str, value))
        return self.flag if isinstance(value, bool) or value is None else f"{self.flag} {value}"

    def message(self, args: argparse.Namespace, ours: str = "--wlb-packing") -> str:
        return f"{self.given(args)} does not work with {ours}: {self.reason}; {self.remedy}"


class _Given:
    """Megatron's arguments; what this version does not have, or was not given, is None."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name, None)


def _mixes_up(args: _Given) -> bool:
    split = PipelineSplit(pipeline_model_parallel_layout=args.pipeline_model_parallel_layout)
    is_virtual = (
        args.num_layers_per_virtual_pipeline_stage is not None
        or args.num_virtual_stages_per_pipeline_rank is not None
        or (split.vpp_size(args.pipeline_model_parallel_size) or 1) > 1
    )
    return args.pipeline_model_parallel_size == 2 and is_virtual and not args.overlap_p2p_comm


def _cannot_load(args: _Given) -> bool:
    saves_state = args.use_distributed_optimizer and args.save and not args.no_save_optim
    resharded = args.ckpt_format == "torch_dist" and args.dist_ckpt_optim_fully_reshardable
    return bool(saves_state and not (args.bf16 or args.fp16) and not resharded)


_BALANCING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"}


def _balances_else(args: _Given) -> bool:
    kinds = args.moe_router_load_balancing_type or []
    return bool(({kinds} if isinstance(kinds, str) else {*kinds}) - _BALANCING)


def _gathers_tokens(args: _Given) -> bool:
    return bool(args.moe_token_dispatcher_type == "allgather" and args.num_experts)


def _recomputes_biases(args: _Given) -> bool:
    is_selective = args.recompute_granularity == "selective" and not args.num_experts
    return bool(is_selective and "mlp" in (args.recompute_modules or []) and args.add_bias_linear)


def _runs_deepep(args: _Given) -> bool:
    backend = args.moe_flex_dispatcher_backend or "deepep"
    is_deepep = args.moe_enable_deepep or backend == "deepep"
    return is_deepep and args.moe_token_dispatcher_type == "flex"


def _pads_experts(args: _Given) -> bool:
    kind = args.moe_token_dispatcher_type
    return kind not in (None, "alltoall", "allgather") and not _runs_deepep(args)


def _names_corpora(args: _Given) -> bool:
    names = ("data_path", "data_args_path", "train_data_path", "per_split_data_args_path")
    return any(getattr(args, name) for name in names)


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

_YAML = Refusal("--yaml-cfg", "it replaces all flags, ours too", "use flags")

REFUSALS: tuple[Refusal, ...] = (
    # Settings and what is trained.
    _YAML,
    Refusal("--perform-rl-step", _OTHER_DATA),
    Refusal("--vision-pretraining", _OTHER_DATA),
    Refusal("--export-kd-teacher-load", "it has shapes of its own"),
    Refusal("--ckpt-convert-format", "nothing is trained", "convert alone"),
    Refusal("--fake-process-group", _OWN_RANKS),
    Refusal("--lazy-mpu-init", _OWN_RANKS),
    # The model.
    Refusal("--cache-mla-latents", "it is for inference"),
    Refusal("--mla-down-proj-fusion", "attention runs Megatron's separate down projections"),
    Refusal("--is-hybrid-model", _OTHER_LAYERS),
    Refusal("--hybrid-override-pattern", _OTHER_LAYERS),
    Refusal("--hybrid-layer-pattern", _OTHER_LAYERS),
    Refusal("--enable-mhc-connections", _OTHER_LAYERS),
    Refusal("--heterogeneous-layers-config-path", _OTHER_LAYERS),
    Refusal("--experimental-attention-variant", _OTHER_LAYERS),
    Refusal("--mtp-standalone", "its stage has a schedule of its own"),
    Refusal("--mtp-use-repeated-layer", "cost and memory models know a layer for each depth"),
    Refusal("--mtp-detach-heads", "it was not compared with one process"),
    Refusal("--position-embedding-type", "positions are by document",
        "use rope, learned_absolute or none", ("rope", "learned_absolute", "none")),
    Refusal("--softmax-type", "packed attention has the plain softmax", "use vanilla", ("vanilla",)
    ),
    Refusal("--qk-clip", _NO_LOGITS),
    Refusal("--log-max-attention-logit", _NO_LOGITS),
    Refusal("--attention-output-gate", _OTHER_LAYERS),
    Refusal("--transformer-impl", "it is made for inference", "use local or transformer_engine",
        ("local", "transformer_engine")),
    Refusal("--use-kitchen-attention", "packed attention takes its place"),
    # Kernels that are made for one length.
    Refusal("--fp8-format", "local layers would train in bf16 without a warning",
        "use --transformer-impl transformer_engine",
        refused=lambda a: a.fp8 and a.transformer_impl == "local"),
    Refusal("--fp4-format", "it needs Blackwell GPUs, and the cost model has no data for them",
        "use --fp8-format"),
    Refusal(
        "--moe-shared-expert-overlap", "its passes run on a stream of their own, and with "
        "--wlb-host-gib memory that comes back goes to other streams too early",
        "leave one of the two out",
        refused=lambda a: a.moe_shared_expert_overlap and a.wlb_host_gib,
    ),
    Refusal(
        "--fine-grained-activation-offloading", "it keeps the host's buffers of every length that "
        "it has met, and lengths of micro-batches vary"),
    Refusal("--cpu-offloading-num-layers", _ONE_BUFFER),
    Refusal(
        "--defer-embedding-wgrad-compute", "with --sequence-parallel it gathers all micro-batches "
        "at the length of the first, and lengths of micro-batches vary",
        refused=lambda a: a.defer_embedding_wgrad_compute and a.sequence_parallel
        and a.tensor_model_parallel_size > 1),
    Refusal(
        "--recompute-modules", "Megatron's recomputation of mlp returns the bias itself, whose "
        "gradient then needs itself: the first backward pass never ends",
        "use --disable-bias-linear, or leave mlp out", refused=_recomputes_biases),
    # The layout.
    Refusal("--hybrid-context-parallel", _OWN_PACKING),
    Refusal("--dynamic-context-parallel", _OWN_PACKING),
    Refusal("--sequence-packing-scheduler", _OWN_PACKING),
    Refusal("--no-overlap-p2p-communication",
        "with 2 pipeline stages and virtual stages, activations and gradients of one batch would "
        "be mixed up", "leave it out, or use other than 2 stages", refused=_mixes_up),
    Refusal("--overlap-moe-expert-parallel-comm", _OTHER_ORDER),
    Refusal(
        "--moe-token-dispatcher-type", "the buffers of HybridEP hold as many tokens of each rank "
        "as of this one, but lengths of micro-batches vary",
        "use alltoall, or --moe-flex-dispatcher-backend deepep", refused=_pads_experts),
    Refusal(
        "--moe-pad-expert-input-to-capacity", "ranks would exchange as many tokens as their own "
        "micro-batch has, and lengths of micro-batches vary",
        "leave it out: --moe-expert-capacity-factor alone drops tokens too"),
    Refusal("--mlp-chunks-for-training", "experts would be chosen for one part of a micro-batch "
        "after another, but their losses and counts are by document",
        refused=lambda a: (a.mlp_chunks_for_training or 1) > 1 and a.num_experts),
    Refusal("--moe-router-load-balancing-type", "its quantiles are of a sequence, not a document",
        "use aux_loss, seq_aux_loss, global_aux_loss, sinkhorn or none", refused=_balances_else),
    Refusal("--use-megatron-fsdp",
        "its wrapper runs on CUDA devices alone, where it was not compared with one process",
        "use --use-torch-fsdp2 or --use-distributed-optimizer"),
    Refusal(
        "--use-torch-fsdp2", "with --num-experts or --mtp-num-layers it was not compared with one "
        "process", "use --use-distributed-optimizer",
        refused=lambda a: a.use_torch_fsdp2 and (a.num_experts or a.mtp_num_layers)),
    Refusal("--tensor-parallel-num-weight-shards", _OWN_DATA_PARALLEL),
    Refusal("--expert-tensor-parallel-num-weight-shards", _OWN_DATA_PARALLEL),
    # The data.
    Refusal("--data-path", _OTHER_DATA, "give --data-path with the prefix of one",
        refused=lambda a: not (_names_corpora(a) or a.mock_data)
    ),
    Refusal("--mock-data", "it stands for a corpus, and one is given", "leave one of them out",
        refused=lambda a: a.mock_data and _names_corpora(a)),
    Refusal("--use-varlen-dataset", _OTHER_DATA, "use --data-path, or --sft with its files"),
    Refusal("--logits-load-dir", _OWN_ORDER),
    Refusal("--logits-save-dir", _OWN_ORDER),
    Refusal("--dataloader-inter-document-masking", "attention stays inside each document already"),
    Refusal("--dataloader-save", "the state of the data is in the checkpoint itself"),
    Refusal("--object-storage-cache-path", "corpora must be files"),
    Refusal("--full-validation", "an evaluation has a fixed number of steps", "use --eval-iters"),
    Refusal("--multiple-validation-sets", "an evaluation uses one blend"),
    Refusal("--phase-transition-iterations", "a stream of documents has one phase"),
    # Checkpoints.
    Refusal("--override-ckpt-iteration", "only a saved step knows which documents were trained",
        "give --ckpt-step with a saved one"),
    Refusal("--use-distributed-optimizer",
        "in fp32 Megatron saves a form of its state that it cannot load",
        "add --dist-ckpt-optim-fully-reshardable with --ckpt-format torch_dist, or train in --bf16",
        refused=_cannot_load),
    Refusal(
        "--ckpt-format", "the packer's state is saved in two formats", "use torch_dist or torch",
        ("torch_dist", "torch")),
    Refusal("--non-persistent-ckpt-type", "the packer's state is saved in files that all ranks see",
        "use global", ("global",)),
)  # fmt: skip

_IN_STORE = "weights and optimizer state are in a store that is sharded over all ranks"
_OWN_STEPS = "a step's documents are those of a batch of one size"

OF_STRATEGIES: tuple[Refusal, ...] = (
    Refusal("--ckpt-format", "checkpoints know no layout", "use torch_dist", ("torch_dist",)),
    Refusal("--use-torch-fsdp2", _IN_STORE),
    Refusal("--use-precision-aware-optimizer", _IN_STORE),
    Refusal("--optimizer-cpu-offload", _IN_STORE),
    Refusal("--optimizer", _IN_STORE, "use adam or sgd", ("adam", "sgd")),
    Refusal("--init-model-with-meta-device", _IN_STORE),
    Refusal("--fp8-param-gather", _IN_STORE),
    Refusal("--check-weight-hash-across-dp-replicas-interval", _IN_STORE),
    Refusal("--save-wgrads-interval", _IN_STORE),
    Refusal("--save-params-interval", _IN_STORE),
    Refusal("--freeze-all-layers", "nothing would be trained"),
    Refusal("--step-batch-size-schedule", _OWN_STEPS),
    Refusal("--decrease-batch-size-if-needed", _OWN_STEPS),
    Refusal("--moe-use-upcycling", "it needs layers of one layout", "upcycle in a run without it"),
    Refusal(
        "--moe-router-enable-expert-bias",
        "biases of experts are no parameters, which the store "
        "would keep, and count the tokens of all replicas",
    ),
)
"""Flags that cannot run with ``--wlb-strategies``."""

STORED: tuple[Refusal, ...] = (
    Refusal("--use-distributed-optimizer", _IN_STORE),
    Refusal("--overlap-grad-reduce", "gradients go to the store layer by layer already"),
    Refusal("--overlap-param-gather", "weights come from the store layer by layer already"),
)
"""Flags without effect there, which are turned off."""

NO_EFFECT: tuple[Refusal, ...] = (
    Refusal("--reset-position-ids", "positions start anew in each document already"),
    Refusal("--reset-attention-mask", "attention stays inside each document already"),
    Refusal("--eod-mask-loss", "the last token of a document predicts nothing already"),
    Refusal("--dataloader-type",
        "documents come from our own stream (order and epochs: docs/data-and-checkpoints.md)",
        allowed=("single", "external")),
    Refusal("--per-dataset-sequences-path",
        "every corpus's own .idx file is read, which says how many sequences it has"),
    Refusal("--ddp-average-in-collective",
        "a loss per token divides gradients once, by the tokens of the step"),
    Refusal("--rampup-batch-size",
        "Megatron-LM ignores it, and has --step-batch-size-schedule instead"),
    Refusal("--hierarchical-context-parallel-sizes",
        "keys and values are gathered over all context-parallel ranks at once"),
    Refusal("--cp-comm-type",
        "keys and values are gathered over all context-parallel ranks at once",
        allowed=(["p2p"], ["all_gather"], "p2p")),
    Refusal("--enable-cuda-graph", _ONE_GRAPH),
    Refusal("--external-cuda-graph", _ONE_GRAPH),
    Refusal("--cuda-graph-impl", _ONE_GRAPH, allowed=("none",)),
    Refusal("--tp-comm-overlap", _ONE_BUFFER),
    Refusal("--moe-token-dispatcher-type",
        "it gathers one length from all ranks, and alltoall, which "
        "computes the same, takes its place",
        refused=_gathers_tokens),
)  # fmt: skip
"""Flags without which the same numbers are computed: told, and left alone or turned off."""

TOLD: tuple[Refusal, ...] = (
    Refusal("--attention-dropout",
        "the kernels flash-attn-3 and torch-cpu have no dropout, and attention has no head start "
        "with it",
        "give --attention-dropout 0 if speed counts more (Megatron's default is 0.1)"),
    Refusal("--moe-token-dispatcher-type",
        "DeepEP exchanges the numbers of tokens, which lengths that vary need, but nobody has "
        "tried it with plans yet",
        "compare the first losses with those of alltoall",
        refused=_runs_deepep),
    Refusal("--disable-gloo-process-groups",
        "Megatron makes no groups of gloo, but ranks still open two, to compare plans between "
        "their hosts without waiting for GPUs",
        "let their connections through (GLOO_SOCKET_IFNAME names the network)",
        refused=lambda a: a.enable_gloo_process_groups is False),
)  # fmt: skip
"""Flags that run, and what they cost here or what is still made in spite of them."""

OF_OTHER_VERSIONS: dict[str, str] = {
    **{flag: f"{flag} is of another version of Megatron-LM; leave it out, or use that version"
       for flag in megatron_flags()},
    **{one.flag: one.message(argparse.Namespace())
       for one in REFUSALS if not (one.allowed or one.refused)},
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
    for ignored in (*NO_EFFECT, *(STORED if _has_strategies(args) else ())):
        if ignored.applies(args):
            logger.warning(
                "%s has no effect with --wlb-packing: %s", ignored.given(args), ignored.reason
            )
    for told in TOLD:
        if told.applies(args):
            logger.warning("%s: %s; %s", told.given(args), told.reason, told.remedy)
    given = _Given(args)
    scales_late = given.fp8 and given.fp8_recipe in (None, "delayed")
    if scales_late and args.world_size > _shards(args):
        logger.warning(
            "--fp8-format: with delayed scaling data-parallel ranks wait for each other at each "
            "micro-batch; --fp8-recipe tensorwise avoids that"
        )


def _refusals(args: argparse.Namespace) -> Iterator[str]:
    yield from (refusal.message(args) for refusal in REFUSALS if refusal.applies(args))
    yield from of_packing(args, getattr(args, "wlb_packing", None))
    if _has_strategies(args):
        yield from (
            one.message(args, "--wlb-strategies") for one in OF_STRATEGIES if one.applies(args)
        )
    if not getattr(args, "eval_interval", True) and not getattr(args, "skip_train", False):
        yield (
            "--eval-interval is missing, and Megatron-LM needs it even without evaluations; add "
            "--eval-interval 1000"
        )
    shards = _shards(args)
    if args.world_size % shards:
        yield (
            f"{args.world_size} processes do not divide by TP × PP × CP = {shards}; start a "
            "multiple of that"
        )


def of_packing(args: argparse.Namespace, packing: str | None) -> Iterator[str]:
    """Lists the flags that cannot run with a packing."""
    for flag, reason in (kind_in(packing).cannot if packing else {}).items():
        if (refusal := Refusal(flag, reason)).applies(args):
            yield refusal.message(args)


def of_choice(args: argparse.Namespace, packing: str) -> Iterator[str]:
    """Lists why ``--wlb-packing auto`` does not take a packing."""
    yield from of_packing(args, packing)
    if getattr(args, "sft", False) and kind_in(packing).windows:
        yield "its windows cut conversations (--sft)"


def _shards(args: argparse.Namespace) -> int:
    """Over how many processes one model is divided."""
    size: int = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    return size


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
        vars(args).update(dict.fromkeys((one.name for one in STORED), False))
    if _gathers_tokens(_Given(args)):
        args.moe_token_dispatcher_type = "alltoall"
    if getattr(args, "multi_latent_attention", False):
        args.apply_rope_fusion = False


def check_words(words: Sequence[str]) -> None:
    """Refuses what must be refused before Megatron's parser sees the command line.

    Raises :class:`ConfigError` for ``--yaml-cfg``, from which parsing returns without any of our
    flags.
    """
    if any(word.split("=")[0] == _YAML.flag for word in words):
        raise ConfigError(_YAML.message(argparse.Namespace()))

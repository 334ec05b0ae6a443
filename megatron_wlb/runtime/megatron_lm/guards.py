"""Flags of Megatron-LM that cannot run with step plans, refused before any process group forms.

Some of them Megatron would run and silently compute something else. A flag that is not in the table
works as it does in Megatron, or has no meaning left (``docs/megatron-lm.md`` says which).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_wlb.errors import ConfigError, refuse_all

logger = logging.getLogger(__name__)

Condition = Callable[[argparse.Namespace], bool]


@dataclass(frozen=True)
class Refusal:
    """One flag, when it cannot run, why, and what to do."""

    flag: str
    name: str
    """The attribute that the flag sets."""
    reason: str
    remedy: str = "leave it out"
    refused: Condition | None = None
    """None: whatever is not the flag's absence (None, False, 0, an empty list)."""

    def applies(self, args: argparse.Namespace) -> bool:
        if self.refused is not None:
            return self.refused(args)
        value = getattr(args, self.name, None)
        return value is not None and value is not False and value != 0 and value != []

    def given(self, args: argparse.Namespace) -> str:
        """The flag as it was typed."""
        value = getattr(args, self.name, None)
        value = getattr(value, "name", value)  # of an enumeration
        if isinstance(value, list | tuple):
            value = " ".join(map(str, value))
        return self.flag if isinstance(value, bool) or value is None else f"{self.flag} {value}"

    def message(self, args: argparse.Namespace) -> str:
        return f"{self.given(args)} does not work with --wlb-packing: {self.reason}; {self.remedy}"


def _is(name: str, *allowed: Any) -> Condition:
    """Whether an attribute has a value that is none of ``allowed``."""
    return lambda args: getattr(args, name, None) not in (None, *allowed)


def _is_virtual(args: argparse.Namespace) -> bool:
    return any(
        getattr(args, name, None) is not None
        for name in (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
        )
    )


def _defers_gathered(args: argparse.Namespace) -> bool:
    # With TP 1 Megatron turns sequence parallelism off.
    return bool(
        getattr(args, "defer_embedding_wgrad_compute", False)
        and getattr(args, "sequence_parallel", False)
        and args.tensor_model_parallel_size > 1
    )


def _no_data(args: argparse.Namespace) -> bool:
    names = ("data_path", "data_args_path", "train_data_path", "per_split_data_args_path")
    return all(not getattr(args, name, None) for name in names)


_LENGTHS_VARY = "lengths of micro-batches vary"
_DENSE = "cost and memory models know dense transformer layers only"
_OTHER_DATA = "plans are made of the documents of .bin/.idx corpora"

_YAML = Refusal("--yaml-cfg", "yaml_cfg", "it replaces all flags, ours too", "use flags")

REFUSALS: tuple[Refusal, ...] = (
    # Settings and what is trained.
    _YAML,
    Refusal("--use-legacy-models", "use_legacy_models", "it needs megatron-core models"),
    Refusal("--perform-rl-step", "perform_rl_step", _OTHER_DATA),
    Refusal("--vision-pretraining", "vision_pretraining", _OTHER_DATA),
    Refusal("--export-kd-teacher-load", "export_kd_teacher_load", "it has shapes of its own"),
    Refusal("--ckpt-convert-format", "ckpt_convert_format", "nothing is trained", "convert alone"),
    Refusal("--fake-process-group", "fake_process_group", "ranks compare their plans"),
    Refusal("--lazy-mpu-init", "lazy_mpu_init", "ranks compare their plans"),
    # The model.
    Refusal("--num-experts", "num_experts", _DENSE),
    Refusal("--multi-latent-attention", "multi_latent_attention", "attention is packed MHA or GQA"),
    Refusal("--is-hybrid-model", "is_hybrid_model", _DENSE),
    Refusal("--hybrid-override-pattern", "hybrid_override_pattern", _DENSE),
    Refusal("--hybrid-attention-ratio", "hybrid_attention_ratio", _DENSE),
    Refusal("--heterogeneous-layers-config-path", "heterogeneous_layers_config_path", _DENSE),
    Refusal("--experimental-attention-variant", "experimental_attention_variant", _DENSE),
    Refusal("--mtp-num-layers", "mtp_num_layers", "prediction further ahead crosses documents"),
    Refusal("--mtp-standalone", "mtp_standalone", "its stage has a schedule of its own"),
    Refusal("--window-size", "window_size", "packed attention is causal over whole documents"),
    Refusal(
        "--attention-dropout", "attention_dropout", "packed attention has none",
        "give --attention-dropout 0 (Megatron's default is 0.1)",
    ),
    Refusal(
        "--position-embedding-type", "position_embedding_type", "positions are by document",
        "use rope, learned_absolute or none",
        _is("position_embedding_type", "rope", "learned_absolute", "none"),
    ),
    Refusal(
        "--softmax-type", "softmax_type", "packed attention has the plain softmax", "use vanilla",
        _is("softmax_type", "vanilla"),
    ),
    Refusal("--qk-clip", "qk_clip", "packed attention does not report its logits"),
    Refusal(
        "--log-max-attention-logit", "log_max_attention_logit",
        "packed attention does not report its logits",
    ),
    Refusal("--attention-output-gate", "attention_output_gate", _DENSE),
    Refusal(
        "--transformer-impl", "transformer_impl", "it is made for inference",
        "use local or transformer_engine", _is("transformer_impl", "local", "transformer_engine"),
    ),
    Refusal("--use-kitchen-attention", "use_kitchen_attention", "packed attention takes its place"),
    # Kernels that are made for one length.
    Refusal("--enable-cuda-graph", "enable_cuda_graph", f"a graph has one length, {_LENGTHS_VARY}"),
    Refusal(
        "--external-cuda-graph", "external_cuda_graph", f"a graph has one length, {_LENGTHS_VARY}"
    ),
    Refusal(
        "--cuda-graph-impl", "cuda_graph_impl", f"a graph has one length, {_LENGTHS_VARY}",
        "use none", _is("cuda_graph_impl", "none"),
    ),
    Refusal(
        "--tp-comm-overlap", "tp_comm_overlap", f"its buffers have one length, {_LENGTHS_VARY}"
    ),
    Refusal(
        "--fp16", "fp16", "its scaled losses and the steps that these skip are not tested",
        "train in --bf16",
    ),
    Refusal(
        "--fp8-format", "fp8", "its products need lengths that 16 divides", "train in --bf16"
    ),
    Refusal(
        "--fp4-format", "fp4", "its products need lengths that 16 divides", "train in --bf16"
    ),
    Refusal(
        "--fine-grained-activation-offloading", "fine_grained_activation_offloading",
        f"its buffers have one length, {_LENGTHS_VARY}",
    ),
    Refusal(
        "--cpu-offloading-num-layers", "cpu_offloading_num_layers",
        f"its buffers have one length, {_LENGTHS_VARY}",
    ),
    Refusal(
        "--defer-embedding-wgrad-compute", "defer_embedding_wgrad_compute",
        "with --sequence-parallel it gathers all micro-batches at the length of the first, and "
        f"{_LENGTHS_VARY}", refused=_defers_gathered,
    ),
    # The layout.
    Refusal(
        "--hybrid-context-parallel", "hybrid_context_parallel", "it packs documents in its own way"
    ),
    Refusal(
        "--hierarchical-context-parallel-sizes", "hierarchical_context_parallel_sizes",
        "keys and values are gathered over all context-parallel ranks at once",
    ),
    Refusal(
        "--no-overlap-p2p-communication", "overlap_p2p_comm",
        "with 2 pipeline stages and virtual stages, activations and gradients of one batch would "
        "be mixed up", "leave it out, or use other than 2 stages",
        lambda args: (
            args.pipeline_model_parallel_size == 2
            and _is_virtual(args)
            and not args.overlap_p2p_comm
        ),
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm", "overlap_moe_expert_parallel_comm",
        "its schedule receives in another order",
    ),
    Refusal(
        "--overlap-p2p-communication-warmup-flush", "overlap_p2p_comm_warmup_flush",
        "its schedule receives in another order",
    ),
    Refusal(
        "--pipeline-model-parallel-layout", "pipeline_model_parallel_layout",
        "cost and memory models divide the layers evenly",
        "use --num-virtual-stages-per-pipeline-rank",
    ),
    Refusal(
        "--decoder-first-pipeline-num-layers", "decoder_first_pipeline_num_layers",
        "cost and memory models divide the layers evenly",
    ),
    Refusal(
        "--decoder-last-pipeline-num-layers", "decoder_last_pipeline_num_layers",
        "cost and memory models divide the layers evenly",
    ),
    Refusal(
        "--account-for-embedding-in-pipeline-split", "account_for_embedding_in_pipeline_split",
        "cost and memory models divide the layers evenly",
    ),
    Refusal(
        "--account-for-loss-in-pipeline-split", "account_for_loss_in_pipeline_split",
        "cost and memory models divide the layers evenly",
    ),
    Refusal(
        "--use-torch-fsdp2", "use_torch_fsdp2",
        "a loss per token divides gradients by the tokens of the step, it leaves them undivided",
        "use --use-distributed-optimizer",
    ),
    Refusal("--use-megatron-fsdp", "use_megatron_fsdp", "it is not tested"),
    # The batch.
    Refusal(
        "--micro-batch-size", "micro_batch_size",
        "a micro-batch is one packed row whose length follows its work",
        "use 1, and a longer --seq-length for more tokens", _is("micro_batch_size", 1),
    ),
    Refusal(
        "--rampup-batch-size", "rampup_batch_size",
        "the number of micro-batches is that of the packer", "use --global-batch-size",
    ),
    Refusal(
        "--decrease-batch-size-if-needed", "decrease_batch_size_if_needed",
        "the number of micro-batches is that of the packer",
        "use a --global-batch-size that data parallelism divides",
    ),
    Refusal(
        "--ddp-average-in-collective", "ddp_average_in_collective",
        "a loss per token divides gradients once, by the tokens of the step",
    ),
    # The data.
    Refusal(
        "--data-path", "data_path", _OTHER_DATA, "give --data-path with the prefix of one",
        _no_data,
    ),
    Refusal("--mock-data", "mock_data", _OTHER_DATA, "give --data-path"),
    Refusal("--sft", "sft", _OTHER_DATA, "use --data-path"),
    Refusal("--fim-data", "fim_data", "it rewrites documents while it reads them"),
    Refusal(
        "--dataloader-save", "dataloader_save", "the state of the data is in the checkpoint itself"
    ),
    Refusal("--object-storage-cache-path", "object_storage_cache_path", "corpora must be files"),
    Refusal(
        "--full-validation", "full_validation", "an evaluation is so many steps",
        "use --eval-iters",
    ),
    Refusal(
        "--multiple-validation-sets", "multiple_validation_sets", "an evaluation is of one blend"
    ),
    Refusal(
        "--phase-transition-iterations", "phase_transition_iterations",
        "a stream of documents has one phase",
    ),
    Refusal(
        "--wlb-epochs", "wlb_epochs", "Megatron's loop ends by steps",
        "use --train-iters or --train-samples",
    ),
    # Checkpoints.
    Refusal(
        "--use-distributed-optimizer", "use_distributed_optimizer",
        "in fp32 Megatron saves a form of its state that it cannot load",
        "add --dist-ckpt-optim-fully-reshardable with --ckpt-format torch_dist, or train in --bf16",
        lambda args: bool(
            args.use_distributed_optimizer
            and args.save
            and not args.no_save_optim
            and not args.bf16
            and not (args.ckpt_format == "torch_dist" and args.dist_ckpt_optim_fully_reshardable)
        ),
    ),
    Refusal(
        "--ckpt-format", "ckpt_format", "the packer's state is saved in two formats",
        "use torch_dist or torch", _is("ckpt_format", "torch_dist", "torch"),
    ),
    Refusal(
        "--non-persistent-ckpt-type", "non_persistent_ckpt_type",
        "the packer's state is saved in files that all ranks see", "use global",
        _is("non_persistent_ckpt_type", "global"),
    ),
)  # fmt: skip

NO_EFFECT: tuple[Refusal, ...] = (
    Refusal(
        "--reset-position-ids", "reset_position_ids",
        "positions start anew in each document already",
    ),
    Refusal(
        "--reset-attention-mask", "reset_attention_mask",
        "attention stays inside each document already",
    ),
    Refusal(
        "--dataloader-type", "dataloader_type",
        "documents come from our own stream (order and epochs: docs/megatron-lm.md)",
        refused=_is("dataloader_type", "single", "external"),
    ),
)  # fmt: skip
"""Flags that change nothing here: told, and left alone."""


def check(args: argparse.Namespace, others: Sequence[str] = ()) -> None:
    """Refuses flags as they were given, before Megatron's own checks change them, and ``others``
    that are known by then. Warns of those without effect.

    Raises:
        ConfigError: flags that cannot run, a line each: its name, the reason and the remedy.
    """
    refuse_all([*_refusals(args), *others])
    for ignored in NO_EFFECT:
        if ignored.applies(args):
            logger.warning(
                "%s has no effect with --wlb-packing: %s", ignored.given(args), ignored.reason
            )


def _refusals(args: argparse.Namespace) -> Iterator[str]:
    yield from (refusal.message(args) for refusal in REFUSALS if refusal.applies(args))
    shards = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    if args.world_size % shards:
        yield (
            f"{args.world_size} processes do not divide by TP × PP × CP = {shards}; start a "
            "multiple of that"
        )


def check_words(words: Sequence[str]) -> None:
    """Refuses what must be refused before Megatron's parser sees the command line.

    Raises:
        ConfigError: ``--yaml-cfg``, from which parsing returns without any of our flags.
    """
    if any(word.split("=")[0] == _YAML.flag for word in words):
        raise ConfigError(_YAML.message(argparse.Namespace()))

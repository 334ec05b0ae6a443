"""Stands in for Megatron-LM's scripts where no checkout is at hand.

megatron-core's wheel has Megatron's training loop, but no script, and this one needs that of 0.19
or later. It gives the loop a GPT, or with ``--hybrid-layer-pattern`` a HybridModel, and windows of
a corpus, as the checkout's ``pretrain_gpt.py`` and ``pretrain_hybrid.py`` do. ``python -m
megatron_wlb.launch`` runs it when no script is named; ``torchrun … -m megatron_wlb.pretrain_gpt``
alone is stock Megatron.

Left out, as plans bring them or refuse them: FIM, fine-tuning and hybrid context parallelism on
Megatron's own data, distillation and ModelOpt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, get_tokenizer, inprocess_restart, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_wlb.errors import CompatibilityError, ConfigError

try:
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
except ImportError as error:
    raise CompatibilityError(
        f"megatron-core's training loop builds no GPT without a script ({error}); install "
        "megatron-core 0.19 or later, or name a checkout's pretrain_gpt.py"
    ) from error

INPUTS = "tokens", "labels", "loss_mask", "position_ids"
"""Each ``[micro-batch, window]``; every rank of a stage reads them for itself."""

MASK = "attention_mask"
"""Where windows have one, ``[micro-batch, 1, window, window]``."""

SPIKE = 10
"""So many times the largest loss so far is a spike, as in Megatron's script."""

LEFT_OUT = (
    "sft", "fim_data", "hybrid_context_parallel", "dataloader_inter_document_masking",
    "logits_load_dir", "per_dataset_sequences_path",
)  # fmt: skip


def loss_sum(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The sum over this rank's targets in nats, their number, and both for the log."""
    loss, targets = (losses.view(-1).float() * mask.view(-1)).sum(), mask.sum().to(torch.int)
    report = torch.cat([loss.detach().view(1), targets.view(1)])
    args, check = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejection, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            found = f"found {name} in local forward loss calculation"
            check.validate_result(loss, rejection, message=found, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        rejection = partial(check.is_unexpectedly_large, threshold=SPIKE, context="loss")
        check.validate_result(loss, rejection, message="Spiky loss", tolerance=0.0, fatal=False)
    return loss, targets, {"lm loss": report}


def forward_step(batches: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> Any:
    """A micro-batch's output, or the plan that makes it, and what makes a loss of it: Megatron's
    ``forward_step_func``.
    """
    read = next(batches)
    batch = {name: read[name].cuda(non_blocking=True) for name in (*INPUTS, MASK) if name in read}
    group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    mask = batch["loss_mask"]
    tokens, positions, attention_mask = batch["tokens"], batch["position_ids"], batch.get(MASK)
    run: Callable[..., Any] = model.build_schedule_plan if return_schedule_plan else model
    made = run(tokens, positions, attention_mask, labels=batch["labels"], loss_mask=mask)
    return made, partial(loss_sum, mask)


def datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Training, validation and test windows: Megatron's ``train_valid_test_dataset_provider``."""
    args = get_args()
    for name in LEFT_OUT:
        if getattr(args, name, None):
            raise ConfigError(
                f"--{name.replace('_', '-')} needs data or a loss that this script lacks; run the "
                "pretrain_gpt.py of a Megatron-LM checkout, or give a --wlb-packing"
            )
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if not (blend or blend_per_split or args.mock_data):
        raise ConfigError(
            "no corpus is given; give --data-path with the prefix of a .bin/.idx corpus, or "
            "--mock-data"
        )
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        # Another mask than a causal one is nowhere else.
        create_attention_mask=args.reset_attention_mask
        and args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, lambda: True, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]  # each rank builds its own


def embedding_ranks(pipeline: list[int]) -> list[int]:
    """Ranks of a pipeline that share the word embedding: the first, that of the output layer where
    it is the same, and those that predict further tokens.
    """
    args = get_args()
    last = [] if args.untie_embeddings_and_output_weights else pipeline[-1:]
    further = get_mtp_ranks(pipeline, core_transformer_config_from_args(args))
    return sorted({pipeline[0], *last, *(further if len(pipeline) > 1 else ())})


if __name__ == "__main__":
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    of_model = hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
    config = pretrain_cfg_container_from_args(args, of_model(args))
    pretrain(
        config, datasets, ModelType.encoder_or_decoder, forward_step,
        store=store, get_embedding_ranks=embedding_ranks,
    )  # fmt: skip

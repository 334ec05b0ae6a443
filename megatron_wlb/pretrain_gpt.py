"""Stands in for Megatron-LM's ``pretrain_gpt.py`` where no checkout is at hand.

megatron-core's wheel has Megatron's training loop from 0.19 on, but not this script. It gives the
loop a GPT and windows of a corpus, as the checkout's does. ``python -m megatron_wlb.launch`` runs
it when no script is named; ``torchrun … -m megatron_wlb.pretrain_gpt`` alone is stock Megatron.

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
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_wlb.errors import ConfigError

INPUTS = "tokens", "labels", "loss_mask", "position_ids"
"""Each ``[micro-batch, window]``; every rank of a stage reads them for itself."""

LEFT_OUT = (
    "sft", "fim_data", "hybrid_context_parallel", "dataloader_inter_document_masking",
    "logits_load_dir", "per_dataset_sequences_path",
)  # fmt: skip


def loss_sum(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The sum over this rank's targets in nats, their number, and both for the log."""
    loss, targets = (losses.view(-1).float() * mask.view(-1)).sum(), mask.sum().to(torch.int)
    report = torch.cat([loss.detach().view(1), targets.view(1)])
    return loss, targets, {"lm loss": report}


def forward_step(batches: Iterator[Any], model: Callable[..., torch.Tensor]) -> Any:
    """A micro-batch's output, and what makes a loss of it: Megatron's ``forward_step_func``."""
    read = next(batches)
    batch = {name: read[name].cuda(non_blocking=True) for name in INPUTS}
    group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    mask = batch["loss_mask"]
    losses = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=mask
    )
    return losses, partial(loss_sum, mask)


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
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, lambda: True, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]  # each rank builds its own

if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)

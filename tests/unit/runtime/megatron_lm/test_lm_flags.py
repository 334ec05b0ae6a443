"""Every flag of Megatron-LM about data, batches or groups of ranks was looked at once.

A new version brings new ones, and one that nobody read would be left out without a warning.
"""

from __future__ import annotations

import re

from megatron_wlb.runtime.megatron_lm import arguments, refusals
from megatron_wlb.settings.command_line import megatron_flags
from megatron_wlb.settings.config import flag_of

ABOUT = re.compile(
    r"data|batch|pack|varlen|seq|context|parallel|document|docs|sample|valid|eval|phase|epoch|loader"
    r"|shard|iters|split|group|dist|cp-comm|num-workers|mask|schedul|ambiguous|token-drop"
)
OF_OTHERS = re.compile(
    # Of other programs, or of a part of Megatron that is refused or not about this as a whole.
    r"--(no-|disable-)?(inference|rl|grpo|dino|vision|tokenizer|tiktoken|sft|mamba|moe|otel|kitchen"
    r"|nvidia-fault|bert|biencoder|retriever|indexer|hybrid|null-tokenizer|ckpt|dist-ckpt|lr|muon"
    r"|tp-comm|use-grouped-gemm|use-checkpoint|override-opt|ft|enable-ft|logits|varlen)-"
)

SERVED = """
--data-args-path --train-data-path --valid-data-path --test-data-path --per-split-data-args-path
--iterations-to-skip --train-samples --train-iters --eval-interval --eval-iters --fim-split-sample
--eval-global-batch-size --eval-micro-batch-size --start-eval-at-iter --calculate-per-token-loss
--no-overlap-p2p-communication --num-layers-per-virtual-pipeline-stage
--num-virtual-stages-per-pipeline-rank --encoder-seq-length --batch-size --model-parallel-size
--fim-data --rotary-seq-len-interpolation-factor --use-tp-pp-dp-mapping
"""
"""Runs with plans do what it says, or Megatron refuses it by itself."""

MEGATRONS_OWN = """
--batch-invariant-backend --batch-invariant-mode --create-all-gather-group
--data-parallel-random-init --disable-gloo-process-groups --distribute-saved-activations
--distrib-optim-fully-reshardable-mem-efficient --distributed-timeout-minutes
--distributed-timeout-seconds-after-init --dump-param-to-param-group-map --disable-manual-gc-eval
--no-manual-gc-eval --exit-signal-handler-for-dataloader --high-priority-stream-groups
--log-validation-ppl-to-tensorboard --no-masked-softmax-fusion --sharp-enabled-group
--num-distributed-optimizer-instances --pipeline-model-parallel-comm-backend --use-dist-ckpt
--torch-fsdp2-no-reshard-after-forward --override-opt_param-scheduler
"""
"""It is about weights, optimizer, groups or logs, which stay Megatron's whatever runs in a step."""

NEEDLESS = """
--data-cache-path --dataloader-defer-npy-index-mmap --dataloader-fast-cache-load --num-workers
--mid-level-dataset-surplus --no-create-attention-mask-in-dataloader --no-mmap-bin-files
--num-dataset-builder-threads --per-dataset-sequences-path --allow-ambiguous-pad-tokens
"""
"""It makes Megatron's data sets fast, or mends what plans do not have: docs/limits.md."""

WITH_OTHERS = """
--data-parallel-sharding-strategy --outer-dp-sharding-strategy --enable-full-sharding-in-hsdp
--max-seqlen-per-dp-cp-rank --min-dynamic-context-parallel-size --validation-set-names
--relative-attention-max-distance
"""
"""It counts only beside a flag that is refused."""

OF_OTHER_SCRIPTS = """
--block-data-path --data-per-class-fraction --decoder-seq-length --evidence-data-path
--iter-per-epoch --mask-factor --mask-prob --mask-type --no-data-sharding --sample-rate
--short-seq-prob --titles-data-path --use-one-sent-docs
"""
"""BERT, T5, retrievers and vision read it, but not ``pretrain_gpt.py``."""


def test_flags_about_data_batches_and_groups_were_reviewed() -> None:
    rows = [*refusals.REFUSALS, *refusals.NO_EFFECT]
    refused = {row.name for row in rows}
    read = {flag_of(name) for name in arguments.READ}
    words = (SERVED, MEGATRONS_OWN, NEEDLESS, WITH_OTHERS, OF_OTHER_SCRIPTS)
    reviewed = [flag for text in words for flag in text.split()]
    assert len(reviewed) == len(set(reviewed))
    about = {f for f in megatron_flags() if ABOUT.search(f) and not OF_OTHERS.match(f)}
    assert len(about) > 100
    unread = about - refused - read - set(reviewed)
    assert not unread, "say in refusals.py that it is refused or without effect, or above why not"
    gone = set(reviewed) - megatron_flags()
    assert not gone

"""Settings -> corpora, cost and planners: the planning side of a run, equal on all ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_wlb.config import Config
from megatron_wlb.cost import DocumentCost, ModelShape, analytic_cost
from megatron_wlb.data.corpus import Corpus, parse_split
from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.errors import ConfigError, CorpusError
from megatron_wlb.packing import packer
from megatron_wlb.planner import Planner

ATTENTION_TFLOPS, LINEAR_TFLOPS = 400.0, 600.0
"""Achieved rates of the analytic cost; only their ratio matters for balance. About an H100's in
bf16; ``--wlb-cost measured`` asks the machine itself."""

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Corpora:
    """The run's corpora, opened, and which documents belong to which split."""

    corpora: Sequence[Corpus]
    vocab_size: int
    ranges: dict[str, list[tuple[int, int]]]
    """Per split, a half-open range of documents of each corpus."""

    @classmethod
    def open(cls, config: Config) -> Corpora:
        """Opens ``--data-path`` and applies ``--split``.

        Raises:
            ConfigError: no corpus, or no vocabulary size known.
            CorpusError: missing or corrupt files, or corpora of different vocabularies.
        """
        paths = config.data.data_path
        if not paths:
            raise ConfigError(
                "--data-path is missing; give the prefix of a .bin/.idx corpus (make one with "
                "`wlb corpus build PATH --out PREFIX`)"
            )
        corpora = [Corpus.open(path) for path in paths]
        sizes = {corpus.vocab_size for corpus in corpora if corpus.vocab_size is not None}
        if config.data.vocab_size is not None:
            sizes = {config.data.vocab_size}
        if not sizes:
            raise ConfigError(
                f"the vocabulary of {paths[0]} is not known (no {paths[0]}.json); give the "
                "tokenizer's --vocab-size"
            )
        if len(sizes) > 1:
            raise CorpusError(
                f"the corpora have vocabularies of {', '.join(map(str, sorted(sizes)))}; they must "
                "be made with one tokenizer"
            )
        splits = [parse_split(config.data.split, len(corpus.lengths)) for corpus in corpora]
        ranges = {name: [s[number] for s in splits] for number, name in enumerate(SPLITS)}
        return cls(corpora, sizes.pop(), ranges)


def model_shape(config: Config, padded_vocab_size: int) -> ModelShape:
    """The sizes that the model's FLOPs depend on."""
    m = config.model
    return ModelShape(
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size or 4 * m.hidden_size,
        num_layers=m.num_layers,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.num_query_groups if m.group_query_attention else m.num_attention_heads,
        kv_channels=m.kv_channels or m.hidden_size // m.num_attention_heads,
        vocab_size=padded_vocab_size,
        gated=m.swiglu,
    )


def known_cost(config: Config, padded_vocab_size: int) -> DocumentCost | None:
    """The cost that ``--wlb-cost`` names, or None where it must be measured.

    Raises:
        ConfigError: a file that is missing or holds no cost.
    """
    if config.wlb.wlb_cost == "measured":
        return None
    if config.wlb.wlb_cost == "analytic":
        return analytic_cost(
            model_shape(config, padded_vocab_size),
            attention_tflops=ATTENTION_TFLOPS,
            linear_tflops=LINEAR_TFLOPS,
        )
    try:
        values = json.loads(Path(config.wlb.wlb_cost).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--wlb-cost {config.wlb.wlb_cost}: {error}; use analytic, measured, or a JSON file of "
            "cost coefficients"
        ) from None
    return DocumentCost.from_dict(values.get("cost", values))


def length_multiple(config: Config) -> int:
    """What a micro-batch's padded length is a multiple of."""
    p = config.parallel
    return p.tensor_model_parallel_size if p.sequence_parallel else 1


def make_planner(config: Config, corpora: Corpora, cost: DocumentCost, dp_size: int) -> Planner:
    """The planner of training steps, before its first one."""
    wlb = config.wlb
    return _planner(config, corpora, cost, dp_size, "train", wlb.wlb_packing, wlb.wlb_hold_tau)


def make_evaluation_planner(
    config: Config, corpora: Corpora, cost: DocumentCost, dp_size: int
) -> Planner:
    """Plans the validation documents, the same ones at each evaluation.

    Balanced and whole, but nothing is held back for balance, so that each evaluation is of the
    documents that arrive in its steps.
    """
    return _planner(config, corpora, cost, dp_size, "valid", "hold", math.inf)


def _planner(
    config: Config,
    corpora: Corpora,
    cost: DocumentCost,
    dp_size: int,
    split: str,
    packing: str,
    tau: float,
) -> Planner:
    data, training, wlb = config.data, config.training, config.wlb
    stream = DocumentStream(
        [corpus.lengths for corpus in corpora.corpora],
        ranges=corpora.ranges[split],
        window=data.seq_length,
        step_tokens=training.global_batch_size * data.seq_length,
        seed=training.seed,
        long_documents=wlb.wlb_long_documents,
        num_epochs=wlb.wlb_epochs if split == "train" else 1,
    )
    return Planner(
        stream,
        packer(
            packing,
            num_micro_batches=training.global_batch_size,
            window=data.seq_length,
            cost=cost,
            max_tokens=wlb.wlb_max_tokens,
            max_step_tokens=wlb.wlb_max_step_tokens,
            max_age=wlb.wlb_max_age,
            queue_thresholds=wlb.wlb_queue_thresholds,
            tau=tau,
        ),
        cost,
        dp_size=dp_size,
        length_multiple=length_multiple(config),
    )

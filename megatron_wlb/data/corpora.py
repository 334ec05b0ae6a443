"""The corpora that a run trains and evaluates on, opened, with their splits and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_wlb.data.blend import Blend
from megatron_wlb.data.corpus import Corpus, parse_split
from megatron_wlb.data.documents import LossMean
from megatron_wlb.errors import ConfigError, CorpusError
from megatron_wlb.extensions import load
from megatron_wlb.settings.config import Config

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Corpora:
    """The run's corpora, opened, and which documents belong to which split."""

    corpora: Sequence[Corpus]
    vocab_size: int
    ranges: dict[str, list[tuple[int, int]]]
    """The half-open range of each corpus's documents, by split."""
    weights: dict[str, tuple[float, ...] | None] = field(default_factory=dict)
    """Each corpus's share of the tokens, by split; None, or no entry, is by size."""
    loss_mean: LossMean = "token"

    @classmethod
    def open(cls, config: Config) -> Corpora:
        """Opens ``--data-path`` and applies ``--split``.

        With ``--mock-data`` the one corpus is made up. Raises ConfigError for no corpus, or no
        vocabulary size known, and CorpusError for missing or corrupt files, or corpora of different
        vocabularies.
        """
        if config.data.mock_data:
            if config.data.vocab_size is None:
                raise ConfigError("--mock-data has no vocabulary of its own; give --vocab-size")
            return cls.mock(config, config.data.vocab_size)
        if not config.data.data_path:
            raise ConfigError(
                "--data-path is missing; give the prefix of a .bin/.idx corpus (make one with "
                "`wlb corpus build PATH --out PREFIX`)"
            )
        blend = Blend.parse(config.data.data_path)
        corpora = cls.of_blend(blend, config.data.split, config.data.vocab_size)
        return replace(corpora, loss_mean=config.wlb.wlb_loss_mean)

    @classmethod
    def of_blend(cls, blend: Blend, split: str, vocab_size: int | None) -> Corpora:
        """Opens one blend and divides each of its corpora by ``split``; see :meth:`open`."""
        corpora = [Corpus.open(prefix) for prefix in blend.prefixes]
        weights = {name: blend.weights for name in SPLITS}
        ranges = _ranges(corpora, split)
        return cls(corpora, _vocab_size(corpora, vocab_size), ranges, weights)

    @classmethod
    def mock(cls, config: Config, vocab_size: int, eod: int | None = None) -> Corpora:
        """Makes up one corpus and divides it by ``--split``; see :class:`.MockCorpus`."""
        corpus: Corpus = load("mock data").of(
            config.wlb.wlb_mock_lengths,
            window=config.data.seq_length,
            seed=config.training.seed,
            vocab_size=vocab_size,
            eod=eod,
        )
        ranges = _ranges([corpus], config.data.split)
        return cls([corpus], vocab_size, ranges, loss_mean=config.wlb.wlb_loss_mean)

    @classmethod
    def of_blends(cls, blends: Mapping[str, Blend | None], vocab_size: int | None) -> Corpora:
        """Opens a blend of whole corpora for each split; None where a split has no documents."""
        corpora: list[Corpus] = []
        ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in SPLITS}
        weights: dict[str, tuple[float, ...] | None] = {}
        for name in SPLITS:
            blend = blends.get(name)
            opened = [] if blend is None else [Corpus.open(prefix) for prefix in blend.prefixes]
            if blend is not None and blend.weights is not None:
                weights[name] = (0.0,) * len(corpora) + blend.weights
            corpora += opened
            for other in SPLITS:
                ranges[other] += [(0, len(c.lengths) if other == name else 0) for c in opened]
        for name, known in weights.items():
            weights[name] = known and known + (0.0,) * (len(corpora) - len(known))
        return cls(corpora, _vocab_size(corpora, vocab_size), ranges, weights)

    @cached_property
    def samples(self) -> list[str]:
        """Samples of each corpus's tokens, for checkpoints; see :meth:`Corpus.sample`."""
        return [corpus.sample() for corpus in self.corpora]

    def num_documents(self, split: str) -> int:
        return sum(stop - start for start, stop in self.ranges[split])


def _ranges(corpora: Sequence[Corpus], split: str) -> dict[str, list[tuple[int, int]]]:
    splits = [parse_split(split, len(corpus.lengths)) for corpus in corpora]
    return {name: [s[number] for s in splits] for number, name in enumerate(SPLITS)}


def _vocab_size(corpora: Sequence[Corpus], given: int | None) -> int:
    sizes = {corpus.vocab_size for corpus in corpora if corpus.vocab_size is not None}
    if given is not None:
        sizes = {given}
    if not sizes:
        prefix = corpora[0].prefix
        raise ConfigError(
            f"the vocabulary of {prefix} is not known (no {prefix}.json); give the "
            "tokenizer's --vocab-size"
        )
    if len(sizes) > 1:
        raise CorpusError(
            f"the corpora have vocabularies of {', '.join(map(str, sorted(sizes)))}; they must "
            "be made with one tokenizer"
        )
    return sizes.pop()

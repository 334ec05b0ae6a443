"""How Megatron's flags divide a model's layers over the chunks of a pipeline: one rule for all.

Chunk ``c`` of pipeline rank ``r`` is virtual stage ``c · PP + r``. The first one embeds and the
last one has the LM head, whatever the flags say of layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

from megatron_wlb.errors import ConfigError
from megatron_wlb.settings.pattern import FLAG as PATTERN
from megatron_wlb.settings.pattern import HybridPattern

MOST_SIGNS = 100_000
"""Signs of a layout once its factors are multiplied out; more are a mistake."""

LAYOUT = "--pipeline-model-parallel-layout"
_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


@dataclass(frozen=True)
class PipelineSplit:
    """The flags, by Megatron's names; without any, all chunks have as many layers."""

    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None
    hybrid_layer_pattern: str | None = None

    @classmethod
    def of(cls, settings: Any) -> PipelineSplit:
        """Takes the flags from an object that has attributes of these names."""
        return cls(**{f.name: getattr(settings, f.name) for f in fields(cls)})

    @property
    def ends(self) -> tuple[int | None, int | None]:
        """Layers of the first and the last pipeline rank."""
        return self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers

    @property
    def has_ends(self) -> bool:
        return self.ends != (None, None)

    @property
    def has_layout(self) -> bool:
        return self.pipeline_model_parallel_layout is not None

    @property
    def pattern(self) -> HybridPattern | None:
        """A HybridModel's layers. Raises :class:`ConfigError` as :meth:`.HybridPattern.of`."""
        return HybridPattern.of(said) if (said := self.hybrid_layer_pattern) is not None else None

    @property
    def segments(self) -> tuple[str, ...]:
        """Layers of each virtual stage of a HybridModel's pattern; empty where it names none."""
        segments = self.pattern.segments if self.pattern else ()
        return segments if len(segments) > 1 else ()

    @property
    def accounts(self) -> int:
        """How many of embedding and loss count as a layer."""
        return (
            self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split
        )

    @property
    def given(self) -> bool:
        """Whether there is any flag."""
        return self.has_ends or self.has_layout or self.accounts > 0 or bool(self.segments)

    @property
    def num_ahead(self) -> int | None:
        """Layers of the layout that predict further ahead; None without a layout."""
        return "".join(self._stages()).count("m") if self.has_layout else None

    def vpp_size(self, pp_size: int) -> int | None:
        """Model chunks a pipeline rank that layout or pattern have; None where there is neither.

        Raises :class:`ConfigError` for stages that do not divide over the ranks.
        """
        if not self.has_layout and not self.segments:
            return None
        said = f"{LAYOUT} {self.pipeline_model_parallel_layout}"
        if not self.has_layout:
            said = f"{PATTERN} {self.hybrid_layer_pattern}"
        num_stages = len(self._stages() if self.has_layout else self.segments)
        if num_stages % pp_size or (pp_size == 1 and num_stages > 1):
            wanted = "one, or use a pipeline" if pp_size == 1 else f"a multiple of {pp_size}"
            raise ConfigError(
                f"{said} has {num_stages} stages, which do not divide over PP {pp_size}; give "
                f"{wanted}"
            )
        return num_stages // pp_size

    def layers(self, num_layers: int, pp_size: int, vpp_size: int = 1) -> tuple[int, ...]:
        """Layers of each virtual stage, as Megatron builds them.

        Raises :class:`ConfigError` for flags that do not go together or do not divide the layers.
        """
        if self.hybrid_layer_pattern is not None and (
            self.has_layout or self.accounts or (self.segments and self.has_ends)
        ):
            raise ConfigError(
                f"{PATTERN} {self.hybrid_layer_pattern} divides the layers, and other flags do so "
                "too; give | in the pattern alone"
            )
        if self.has_ends + (self.accounts > 0) + self.has_layout > 1:
            raise ConfigError(
                f"{LAYOUT}, {_FIRST} or its like for the last, and --account-for-…-in-pipeline-"
                "split divide the layers each in their own way; give one of the three"
            )
        if self.has_layout:
            return self._of_layout(num_layers, pp_size, vpp_size)
        if self.segments:
            return tuple(map(len, self.segments))
        if self.has_ends:
            ranks = _between(num_layers, pp_size, *self.ends)
        else:
            ranks = [_even(num_layers, self.accounts, pp_size, vpp_size) * vpp_size] * pp_size
        for layers in ranks:
            if layers % vpp_size:
                raise ConfigError(
                    f"{_FIRST} and its like for the last leave a pipeline rank of {layers} layers, "
                    f"which {vpp_size} virtual stages a rank do not divide; give multiples of "
                    f"{vpp_size}"
                )
        stages = [layers // vpp_size for layers in ranks] * vpp_size
        stages[0] -= self.account_for_embedding_in_pipeline_split
        stages[-1] -= self.account_for_loss_in_pipeline_split
        if min(stages) < 0:
            raise ConfigError(
                f"--num-layers is {num_layers}: a single model chunk has no room for both the "
                "embedding and the loss; leave --account-for-loss-in-pipeline-split out"
            )
        return tuple(stages)

    def uneven(self, num_layers: int, pp_size: int, vpp_size: int = 1) -> tuple[int, ...] | None:
        """What :meth:`layers` says where flags make stages unlike, else None.

        Raises :class:`ConfigError` as that does, for flags that are there.
        """
        stages = self.layers(num_layers, pp_size, vpp_size) if self.given else ()
        return stages if len(set(stages)) > 1 else None

    def _of_layout(self, num_layers: int, pp_size: int, vpp_size: int) -> tuple[int, ...]:
        layout, stages = self.pipeline_model_parallel_layout, self._stages()
        signs = "".join(stages)
        if not re.fullmatch("Et*m*L", signs):
            raise ConfigError(
                f"{LAYOUT} {layout} has other than one E, layers t, layers m if any, and one L in "
                "this order; give it as Et*3|t*4|t*3L"
            )
        if signs.count("t") != num_layers:
            raise ConfigError(
                f"{LAYOUT} {layout} has {signs.count('t')} layers, but --num-layers is {num_layers}"
                "; give as many"
            )
        if "m" in "".join(stages[:-1]):
            raise ConfigError(
                f"{LAYOUT} {layout} has m before the last stage: Megatron sends hidden states of "
                "all depths from there, and plans know those of one; put all m with L"
            )
        if self.vpp_size(pp_size) != vpp_size:
            raise ConfigError(
                f"{LAYOUT} {layout} has {len(stages)} stages, but PP {pp_size} × VPP {vpp_size} "
                f"are {pp_size * vpp_size}; leave --num-virtual-stages-per-pipeline-rank out, or "
                "give as many stages"
            )
        return tuple(stage.count("t") for stage in stages)

    def _stages(self) -> list[str]:
        """The layout's stages, written out: ``Et*2|(t|)*2L`` is Ett, t, t, L."""
        layout = str(self.pipeline_model_parallel_layout)
        text = layout.replace(",", "")
        for factor in (r"\(([^)]+)\)\*(\d{1,9})", r"(.)\*(\d{1,9})"):
            added = sum(len(m[1]) * int(m[2]) for m in re.finditer(factor, text))
            if added > MOST_SIGNS:
                raise ConfigError(
                    f"{LAYOUT} {layout} is longer than {MOST_SIGNS} signs when multiplied out; "
                    "use smaller factors"
                )
            text = re.sub(factor, lambda m: m[1] * int(m[2]), text)
        if other := sorted(set(text) - set("EtmL|")):
            raise ConfigError(
                f"{LAYOUT} {layout} has {other[-1]!r}: no layer is called so; use E (embedding), t "
                "(layer), m (multi-token prediction), L (loss), | between stages, *N and "
                "parentheses"
            )
        return text.split("|")


def _even(num_layers: int, accounts: int, pp_size: int, vpp_size: int) -> int:
    """What each chunk has, embedding and loss counted as layers where flags say so."""
    num_chunks = pp_size * vpp_size
    if (num_layers + accounts) % num_chunks:
        beside = f" and {accounts} for the ends (--account-for-…)" if accounts else ""
        less = f" less {accounts}" if accounts else ""
        raise ConfigError(
            f"--num-layers is {num_layers}{beside}, which PP {pp_size} × VPP {vpp_size} = "
            f"{num_chunks} model chunks do not divide; use a multiple of {num_chunks}{less}, or "
            f"{remedy(num_layers, pp_size, vpp_size)} instead"
        )
    return (num_layers + accounts) // num_chunks


def remedy(num_layers: int, pp_size: int, vpp_size: int) -> str:
    """The flags of stages that are not alike, for layers that do not divide over them."""
    for usual in (-(-num_layers // pp_size), num_layers // pp_size):
        last = num_layers - usual * (pp_size - 1)
        if vpp_size == 1 and 0 < last <= 2 * usual:
            return f"{_LAST} {last}, or other stages by {_FIRST} or {LAYOUT}"
    return f"stages that are not alike by {LAYOUT}"


def _between(num_layers: int, pp_size: int, first: int | None, last: int | None) -> list[int]:
    """Layers of each pipeline rank where those of the ends are given, and others are equal."""
    given = [layers for layers in (first, last) if layers is not None]
    rest, middle = num_layers - sum(given), pp_size - len(given)
    ends = {_FIRST: first, _LAST: last}
    said = " and ".join(f"{flag} {n}" for flag, n in ends.items() if n is not None)
    if min(given) < 1:
        raise ConfigError(f"{said}: such a stage needs at least 1 layer; give 1, or use {LAYOUT}")
    if rest < 0 or middle < 0 or bool(rest) != bool(middle) or (middle and rest % middle):
        raise ConfigError(
            f"{said} of --num-layers {num_layers} leave {rest} layers for {middle} other stages of "
            f"PP {pp_size}; leave a multiple of their number, and at least 1 each"
        )
    ranks = [rest // middle] * middle if middle else []
    return [*([] if first is None else [first]), *ranks, *([] if last is None else [last])]


def split_of(stage_layers: Sequence[int], vpp_size: int, num_ahead: int = 0) -> PipelineSplit:
    """The flags by which Megatron builds such stages; none where all have as many.

    ``num_ahead`` layers in the last one predict further ahead. The first and the last stage where
    that says it all, else a layout, which has VPP in it.
    """
    first, *middle = stage_layers
    if not any(layers != first for layers in middle):
        return PipelineSplit()
    *middle, last = middle
    if vpp_size == 1 and len(set(middle)) < 2 and min(stage_layers) > 0:
        usual = middle[0] if middle else None
        return PipelineSplit(None if first == usual else first, None if last == usual else last)
    stages = ["t" * layers for layers in stage_layers]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}{'m' * num_ahead}L"
    return PipelineSplit(pipeline_model_parallel_layout="|".join(map(_short, stages)))


def _short(stage: str) -> str:
    return "".join(f"{sign}*{num}" if num > 2 else sign * num for sign, num in _runs(stage))


def _runs(items: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    return ((item, len(list(equal))) for item, equal in groupby(items))


def title(stage_layers: Sequence[int]) -> str:
    """For a line of text: ``9*3|5`` is three stages of 9 layers and one of 5."""
    runs = _runs(stage_layers)
    return "|".join(f"{layers}*{num}" if num > 1 else str(layers) for layers, num in runs)

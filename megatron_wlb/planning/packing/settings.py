"""A packing with its settings: its short name, its training flags, its title, and the packer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from megatron_wlb.cost import CostModel
from megatron_wlb.data.ramp import Ramp
from megatron_wlb.errors import ConfigError
from megatron_wlb.extensions import named
from megatron_wlb.planning.packing.base import Limits, Packer
from megatron_wlb.reading import MOST_STEPS_AHEAD, shown, unknown
from megatron_wlb.settings.config import WlbConfig, flag_of
from megatron_wlb.settings.packings import CHOSEN, PACKINGS

Grouping: TypeAlias = Literal["sorted", "arrival"]
"""Which windows of several global batches run in one step: those of like work, or those whose
tokens arrived together."""
SOLVER_LIMIT = 10.0
SHAPED, AUTO = "+shape", "+auto"
_SUFFIXES: dict[str, tuple[str, Any]] = {SHAPED: ("shaped", True), AUTO: ("micro_batches", "auto")}

_CONFIGURED = {"name": "wlb_packing", "tau": "wlb_hold_tau", "shaped": "wlb_shape"}
"""What a field is called in :class:`WlbConfig`, where that is not ``wlb_`` and its name."""


def kind_of(name: str) -> type[Packer]:
    """The packing called ``name``; of one that is still to be chosen, what all have.

    Raises :class:`ConfigError` for an unknown one.
    """
    if name == CHOSEN:
        return Packer
    if name not in PACKINGS:
        raise unknown("packing", name, PACKINGS)
    found: type[Packer] = named(PACKINGS[name].kind)
    return found


def reads(packing: str, name: str, micro_batches: str = "fixed") -> bool:
    """Whether a packing reads a field of :class:`PackingSettings`."""
    kind = kind_of(packing)
    return name in kind.reads or (micro_batches == "auto" and name in kind.reads_if_numbered)


def unread(config: WlbConfig) -> dict[str, str]:
    """Settings that are not the default's, and that the packing does not read: which one does."""
    default = WlbConfig()
    return {
        configured: "--wlb-packing " + " or ".join(p for p in PACKINGS if reads(p, f.name))
        for f in fields(PackingSettings)[1:]
        if getattr(config, configured := _configured(f.name)) != getattr(default, configured)
        and not reads(config.wlb_packing, f.name, config.wlb_micro_batches)
    }


def is_open(config: WlbConfig) -> bool:
    """Whether a run has still to settle its packing, or its S_max, as it starts."""
    if config.wlb_strategies is not None:
        return False
    if config.wlb_packing == CHOSEN:
        return True
    kind, given = kind_of(config.wlb_packing), config.wlb_max_tokens or config.wlb_memory_gib
    return not (given or kind.windows or kind.slices)


def check_shaping(name: str) -> None:
    """Raises :class:`ConfigError` for a packing whose steps may not be shaped.

    Shaping makes micro-batches of any size up to S_max, so it would end fixed windows; slices have
    sizes of their own.
    """
    if not reads(name, "shaped"):
        raise ConfigError(kind_of(name).unshaped.format(name))


def check_numbers(name: str) -> None:
    """Raises :class:`ConfigError` for a packing whose numbers of micro-batches may not be chosen
    step by step.
    """
    if not reads(name, "micro_batches"):
        raise ConfigError(kind_of(name).unnumbered.format(name))


def numbers_by_step(config: WlbConfig) -> bool:
    """Whether a plan, and not the batch size, says how many micro-batches its step has."""
    return kind_of(config.wlb_packing).slices or config.wlb_micro_batches == "auto"


def simulates(config: WlbConfig) -> bool:
    """Whether steps are simulated to plan them."""
    return config.wlb_shape == "on" or numbers_by_step(config)


def kind_in(text: str) -> type[Packer]:
    """The packing in ``NAME:K+shape``."""
    return kind_of(text.partition("+")[0].partition(":")[0])


def sliced() -> list[str]:
    """The packings that cut documents in slices."""
    return [name for name in PACKINGS if kind_of(name).slices]


def run_with(pp_size: int | None, names: Iterable[str]) -> list[str]:
    """Lists the packings that are worth a trial in such a pipeline; None is 1. Slices are for
    pipelines.
    """
    return [name for name in names if (pp_size or 1) > 1 or not kind_in(name).slices]


@dataclass(frozen=True, slots=True)
class PackingSettings:
    """A packing and all that it is told, as :class:`WlbConfig` has it.

    Raises :class:`ConfigError` for shaped steps of a packing that has none.
    """

    name: str
    """One of :data:`PACKINGS`; :attr:`kind` finds an unknown one."""
    max_tokens: int
    """S_max."""
    fixed_batches: int = 1
    queue_thresholds: tuple[int, ...] = ()
    """L_1 L_2 … of `wlb`, which derives them if none are given."""
    tau: float = 1.0
    delay_price: float | None = None
    look_ahead: int = 0
    solver_limit: float = SOLVER_LIMIT
    fixed_grouping: Grouping = "sorted"
    shaped: bool = False
    max_age: int = 12
    max_step_tokens: int | None = None
    """None is the packing's own bound (:attr:`Packer.most_of_a_step`), 0 none but N · S_max."""
    units: int | None = None
    slice_multiple: int | None = None
    dp_merge: Literal["auto", "off"] = "auto"
    recompute: Literal["auto", "off"] = "auto"
    slice_cache: Literal["auto", "whole", "divided"] = "auto"
    micro_batches: Literal["fixed", "auto"] = "fixed"
    """Whether N is that of the batch size or, with a pipeline, chosen step by step."""

    def __post_init__(self) -> None:
        if self.shaped:
            check_shaping(self.name)
        if self.micro_batches == "auto":
            check_numbers(self.name)

    @property
    def kind(self) -> type[Packer]:
        return kind_of(self.name)

    @property
    def is_plain(self) -> bool:
        """Whether it is Megatron's own packing, with which others are compared."""
        return self.name == "original" and self.micro_batches == "fixed"

    @property
    def simulated(self) -> bool:
        """Whether steps are simulated to plan them."""
        return self.shaped or self.micro_batches == "auto" or self.kind.slices

    @classmethod
    def parse(cls, text: str, window: int, max_tokens: int, **settings: Any) -> PackingSettings:
        """Reads ``NAME`` or ``NAME:K``, with ``+shape`` behind it for shaped steps, and ``+auto``
        for numbers of micro-batches that are chosen step by step.

        K is what :meth:`Packer.read` reads: global batches, queues, steps of look-ahead, units.
        ``settings`` are for all.

        Raises :class:`ConfigError` for a K that is none, and for shaped windows.
        """
        plain = text
        while ending := next(filter(plain.endswith, _SUFFIXES), ""):
            plain = plain.removesuffix(ending)
            field_name, value = _SUFFIXES[ending]
            settings[field_name] = value
        name, colon, number = plain.partition(":")
        said = shown(text)[1:-1]
        if not colon:
            return cls(name, max_tokens, **settings)
        kind = kind_of(name)
        short = number.isdecimal() and len(number) <= len(str(MOST_STEPS_AHEAD))
        if not (short and kind.least <= int(number) <= MOST_STEPS_AHEAD):
            raise ConfigError(
                f"packing {said}: {shown(number)} is not a number of batches, queues, steps or "
                f"units from {kind.least} to {MOST_STEPS_AHEAD}; write it like fixed-greedy:4, "
                "wlb:3, hold:2 or slim:32"
            )
        if not kind.number:
            raise ConfigError(f"packing {said}: it takes no number; leave it out")
        try:
            settings |= kind.read(int(number), window)
        except ConfigError as error:
            raise ConfigError(f"packing {said}: {error}") from None
        return cls(name, max_tokens, **settings)

    @classmethod
    def of_config(cls, config: WlbConfig, max_tokens: int) -> PackingSettings:
        """Takes the settings of a training run, whose S_max is ``max_tokens``.

        Raises :class:`ConfigError` where the packing is still to be chosen.
        """
        if config.wlb_packing == CHOSEN:
            raise ConfigError(
                "--wlb-packing is auto, but only a run can choose a packing, as it starts; give "
                "original, hold or slim"
            )
        values = {f.name: getattr(config, _configured(f.name)) for f in fields(cls)}
        values |= {"max_tokens": max_tokens, "shaped": config.wlb_shape == "on"}
        return cls(**values)

    def configured(self) -> dict[str, Any]:
        """The settings that pack so: :meth:`of_config` reads them again."""
        found: dict[str, Any] = {"wlb_packing": self.name}
        for f in fields(self)[1:]:
            value = getattr(self, f.name)
            if reads(self.name, f.name, self.micro_batches) and value != f.default:
                found[_configured(f.name)] = "on" if value is True else value
        return found

    def flags(self) -> list[str]:
        """Lists what the training command needs to pack so."""
        words = []
        for name, value in self.configured().items():
            values = value if isinstance(value, tuple) else (value,)
            words += [flag_of(name), *map(_word, values)]
        return words

    @property
    def title(self) -> str:
        """The packing and what of it is not the default, in a few words."""
        parts = [self.name, *self.kind.said(self)]
        if self.shaped:
            parts.append("shaped")
        if self.micro_batches == "auto":
            parts.append("auto N")
        return ", ".join(parts)

    def packer(
        self,
        *,
        num_micro_batches: int,
        window: int,
        cost: CostModel,
        length_multiple: int = 1,
        step_tokens: int | None = None,
        micro_batch_size: int = 1,
        ramp: Ramp | None = None,
    ) -> Packer:
        """Makes the packing, empty.

        S_max is rounded down to a multiple of ``length_multiple``, so that padding leads to no
        more. ``step_tokens`` arrive in a step: the windows of N micro-batches if not given. With a
        ``ramp`` this N is that of its end.

        Raises :class:`ConfigError` for an unknown name (the nearest one is named) or settings that
        cannot work.
        """
        if length_multiple < 1:
            raise ConfigError(f"length_multiple is {length_multiple}; give at least 1")
        s_max, row = self.max_tokens, micro_batch_size * window
        if row <= s_max < -(-row // length_multiple) * length_multiple:
            windows = f"{micro_batch_size} windows" if micro_batch_size > 1 else "a window"
            raise ConfigError(
                f"max_tokens (S_max) {s_max} has no room for {windows} of {window} padded to a "
                f"multiple of {length_multiple} (TP, 2 · CP, FP8); raise it (--wlb-max-tokens)"
            )
        if step_tokens is None:
            step_tokens = num_micro_batches * row
        cap, share = self.max_step_tokens, self.kind.most_of_a_step
        if cap is None and share is not None:
            cap = math.ceil(share * step_tokens)
        limits = Limits(
            num_micro_batches,
            window,
            s_max - s_max % length_multiple if s_max >= window else s_max,
            step_tokens,
            cap or None,
            self.max_age,
            micro_batch_size,
            ramp,
        )
        return self.kind.make(self, limits, cost)


def packer(
    name: str, *, num_micro_batches: int, window: int, cost: CostModel, **settings: Any
) -> Packer:
    """Makes the packing called ``name``: :meth:`PackingSettings.packer`, S_max twice the tokens
    that a micro-batch stands for.
    """
    names = ("length_multiple", "step_tokens", "micro_batch_size", "ramp")
    batch = {key: settings.pop(key) for key in names if key in settings}
    max_tokens = settings.pop("max_tokens", None)
    if max_tokens is None:
        max_tokens = 2 * batch.get("micro_batch_size", 1) * window
    chosen = PackingSettings(name, max_tokens, **settings)
    return chosen.packer(num_micro_batches=num_micro_batches, window=window, cost=cost, **batch)


def _configured(name: str) -> str:
    return _CONFIGURED.get(name, f"wlb_{name}")


def _word(value: object) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)

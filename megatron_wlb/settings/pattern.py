"""A HybridModel's ``--hybrid-layer-pattern``: a symbol a layer, ``|`` between stages, ``/`` before
each depth that predicts further ahead, as in ``*-*-|*E*E/*E``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_wlb.errors import ConfigError

FLAG = "--hybrid-layer-pattern"
ATTENTION, LATENT, DELTA, MAMBA, MLP, EXPERTS = "*", "+", "G", "M", "-", "E"
LAYERS = {
    ATTENTION: "attention",
    LATENT: "multi-latent attention",
    DELTA: "gated delta net",
    MAMBA: "Mamba-2",
    MLP: "MLP",
    EXPERTS: "experts",
}
"""Symbols of layers, and what they stand for."""
STATES = frozenset({DELTA, MAMBA})
"""Layers that carry a state through a document."""
OTHERS = {"D": "sparse attention chooses keys of the whole sequence"}
"""Megatron's other symbols, and why such layers cannot run."""


@dataclass(frozen=True)
class HybridPattern:
    """What a pattern says."""

    segments: tuple[str, ...]
    """Symbols of each virtual stage; one segment where the pattern does not say where stages
    begin."""
    ahead: str = ""
    """Symbols of a depth that predicts further ahead; the same for each."""
    depths: int = 0

    @classmethod
    def of(cls, text: str) -> HybridPattern:
        """Raises :class:`ConfigError` for symbols of other layers, depths that differ, or no
        layers.
        """
        main, *depths = text.split("/")
        if depths and not any(depths):  # Megatron takes this for no depth
            depths = []
        for sign in main.replace("|", "") + "".join(depths):
            if sign not in LAYERS:
                known = ", ".join(f"{sign} ({what})" for sign, what in LAYERS.items())
                reason = f"{OTHERS[sign]}; train" if sign in OTHERS else f"use {known}; else train"
                raise ConfigError(
                    f"{FLAG} {text} has the layer {sign}: {reason} without the --wlb flags"
                )
        if len(set(depths)) > 1 or (depths and not depths[0]):
            raise ConfigError(
                f"{FLAG} {text} has the depths {', '.join(depths)}; Megatron builds equal ones: "
                "give each the same symbols"
            )
        if not main.replace("|", ""):
            raise ConfigError(f"{FLAG} {text} has no layers; give a symbol for each, as in *-*-")
        if ATTENTION in text and LATENT in text:
            raise ConfigError(
                f"{FLAG} {text} has both * and +; Megatron builds a model of one kind of attention"
            )
        return cls(tuple(main.split("|")), depths[0] if depths else "", len(depths))

    @property
    def layers(self) -> str:
        """Symbols of all layers of the model, without those that predict further ahead."""
        return "".join(self.segments)

    def divided(self, stage_layers: Sequence[int] = ()) -> str:
        """The pattern with stages of so many layers; one that does not say where they begin where
        none are given.
        """
        ends = [0, *itertools.accumulate(stage_layers or [len(self.layers)])]
        stages = (self.layers[first:last] for first, last in itertools.pairwise(ends))
        return "/".join(["|".join(stages), *[self.ahead] * self.depths])

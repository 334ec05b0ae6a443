"""What parts measure with: heads, lengths and the machine's hardware file."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TypeAlias

import torch

from _gpu_report.results import CPU, Results
from megatron_wlb.cost import load_hardware
from megatron_wlb.cost.attention_latency import AttentionProfile
from megatron_wlb.errors import ConfigError
from megatron_wlb.runtime.gpt.attention.kernels import Demand

Heads: TypeAlias = tuple[int, int, int]
"""Query heads, key/value heads, head dimension, of one device."""

HEADS: dict[str, Heads] = {"7B, TP 8": (4, 4, 128), "70B, TP 8": (8, 1, 128)}
"""LLaMA2-7B has 32 key/value heads; LLaMA2-70B has 64 query heads and 8 key/value heads."""
TINY_HEADS: dict[str, Heads] = {"tiny": (1, 1, 128)}
TINY = 256
"""By what the tiny form divides lengths."""


def heads(results: Results) -> dict[str, Heads]:
    return TINY_HEADS if results.tiny else HEADS


def demand(results: Results, of: Heads) -> Demand:
    """Attention in bf16, in the tiny form too: the same tables and tolerances serve both."""
    index = torch.cuda.current_device() if results.device != CPU else None
    return Demand(torch.device(results.device, index), torch.bfloat16, *of)


def hardware_path(out: Path) -> Path:
    """The file that the part ``profile`` writes."""
    return out / "profile" / "hardware.yaml"


def measured_attention(out: Path, of: Heads) -> AttentionProfile:
    """The measured table of such heads. Raises :class:`ConfigError` where there is none."""
    path = hardware_path(out)
    if path.exists():
        for profile in load_hardware(str(path)).attention:
            if (profile.num_heads, profile.num_groups, profile.head_dim) == of:
                return profile
    raise ConfigError(
        f"{path} has no table of {of[0]}/{of[1]}x{of[2]}; run the part profile to its end first"
    )


def in_turns(number: int, repeats: int) -> list[int]:
    """Indices of ``number`` things, ``repeats`` times, another first each time."""
    turns = (((turn + i) % number for i in range(number)) for turn in range(repeats))
    return list(itertools.chain.from_iterable(turns))

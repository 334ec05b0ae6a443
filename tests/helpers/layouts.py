"""Layouts, models and documents that are run against the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest

from helpers.oracle import OracleRun
from helpers.workload import make_trees, make_workload
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config

_DOCUMENTS: list[list[int | tuple[int, ...]]] = [
    [37, 1, 5, 60, 12, 29, 2, 48, 1, 17, (33, 20), 9, 55, 3],
    [8, 60, 1, 44, 21, (60, 1, 60, 7), 30, 2, 13],
    [51, 1, 1, (5, 1), 26, 40, 11, 60, 33, 6, 19, 4],
]
NUM_STEPS = 2
WORKLOAD, LONGER = (
    make_workload(_DOCUMENTS[:num], vocab_size=59)  # padded to 64 for every layout
    for num in (NUM_STEPS, 3)
)
LATENT_WORKLOAD = make_workload(
    [[37, 1, 5, 60, (33, 20), 2, 29], [8, 60, 1, (60, 1, 47), 21, 13]], vocab_size=59
)


def clipped(log_probs: Any, samples: Any, positions: Any) -> Any:
    """GRPO's: a clipped ratio to log-probabilities of before, by an advantage, and a KL term.

    What stood before, and advantages, are made up from a token's document and place.
    """
    import torch

    before = -4 + 0.3 * torch.sin(samples * 7.0 + positions * positions)
    advantages = torch.cos(samples * 5.0)
    ratio = (log_probs - before).exp()
    gained = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.25) * advantages)
    return 3 - gained + 0.1 * (before - log_probs + ratio - 1)  # sums of 3 do not cancel


OWN_LOSS = dataclasses.replace(WORKLOAD.masked(seed=5), loss=clipped)
TREES = make_trees(vocab_size=59)
OWN_TREES = dataclasses.replace(TREES.masked(seed=6), loss=clipped)
COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 64 --make-vocab-size-divisible-by 32 "
    # Adam's first steps are lr · sign(g) for entries far above ε: a larger ε keeps entries that
    # are nothing but rounding from deciding where the weights go.
    "--lr 0.01 --min-lr 0.001 --train-iters 5 --adam-eps 1e-3 --weight-decay 0.1 --clip-grad 0.5"
)
MODELS = {
    # RMSNorm, gated, bias for QKV only, grouped queries, normalised queries and keys, untied.
    "llama": "--normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias "
    "--group-query-attention "
    "--num-query-groups 2 --qk-layernorm --untie-embeddings-and-output-weights "
    "--ffn-hidden-size 48",
    # LayerNorm, gelu, bias, learned positions, tied.
    "gpt2": "--position-embedding-type learned_absolute",
    # LayerNorm with bias, half the head rotated in pairs, heads wider than hidden ÷ heads, tied.
    "mixed": "--rotary-interleaved --rotary-percent 0.5 --kv-channels 12 --qk-layernorm "
    "--attention-output-gate "
    "--group-query-attention --num-query-groups 2",
}
MODELS_OF_POSITIONS = {
    # Rotary frequencies scaled, so much that documents of a few dozen tokens notice.
    "llama-3": "--use-rope-scaling --rope-scaling-factor 64 --rotary-base 500000 "
    "--rotary-seq-len-interpolation-factor 3",
    "yarn": "--position-embedding-type yarn --wlb-yarn-rotary-scaling-factor 8 "
    "--wlb-yarn-original-max-position-embeddings 16 --wlb-yarn-beta-fast 4 --wlb-yarn-mscale 1.5",
}
MODELS |= {name: f"{MODELS['llama']} {flags}" for name, flags in MODELS_OF_POSITIONS.items()}
# Documents of up to 60 tokens, some within reach as a whole. With four layers the third sees all.
MODELS["sliding"] = f"{MODELS['llama']} --window-size 3,0"
MODELS["sliding-skip"] = f"{MODELS['gpt2']} --window-size 12,0 --window-attn-skip-freq 3"
MODELS["sliding-list"] = f"{MODELS['mixed']} --window-size 6,0 --window-attn-skip-freq [0,1,1,0]"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 7 --normalization RMSNorm --swiglu --disable-bias-linear --ffn-hidden-size 48 "
    "--untie-embeddings-and-output-weights"
)
MODELS_OF_LATENTS = {
    # Queries projected at once, no norms, plain rotation; learned positions too, as Megatron has.
    "latent": f"{LATENT} --rope-type rope --position-embedding-type learned_absolute",
    # Queries of a latent too, norms of both, YaRN with a factor, so that short documents notice.
    "latent-yarn": f"{LATENT} --q-lora-rank 10 --qk-layernorm --rotary-scaling-factor 8 "
    "--wlb-yarn-original-max-position-embeddings 16 --wlb-yarn-beta-fast 4 --mscale 1.5 "
    "--mscale-all-dim 0.7",
}
MODELS |= MODELS_OF_LATENTS
_EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 16 --moe-z-loss-coeff 0.3"
# As DeepSeek's: sigmoids, groups of experts, moving biases, a dense layer, a shared expert.
_DEEPSEEK_EXPERTS = (
    f"{_EXPERTS} --moe-layer-freq [0]+[1]*3 --moe-router-topk 3 "
    "--moe-shared-expert-intermediate-size 24 --moe-latent-size 20 "
    "--moe-router-score-function sigmoid "
    "--moe-router-pre-softmax --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-topk-scaling-factor 2.0 --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.05 --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1.5"
)
MODELS_OF_EXPERTS = {
    "moe-seq": f"{MODELS['llama']} {_DEEPSEEK_EXPERTS}",
    "deepseek": f"{MODELS['latent-yarn']} {_DEEPSEEK_EXPERTS} --mtp-num-layers 2 "
    "--mtp-loss-scaling-factor 0.4",
    # As Mixtral's.
    "moe-aux": f"{MODELS['llama']} {_EXPERTS} --moe-router-topk 2 "
    "--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 1.5 0.7",
}
MODELS |= MODELS_OF_EXPERTS
# A first token's output may be next to nothing, which its norm would make all rounding.
_DELTA = (
    "--norm-epsilon 0.01 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 6 "
    "--linear-value-head-dim 10"
)
_MAMBA = "--mamba-num-heads 8 --mamba-head-dim 6 --mamba-state-dim 10 --mamba-num-groups 2"
MODELS_OF_STATES = {
    "delta": f"{MODELS['llama']} {_DELTA} --hybrid-layer-pattern G-*-G*G-",
    "mamba": f"{MODELS['llama'].replace('--qk-layernorm ', '')} {_MAMBA} "
    "--mtp-loss-scaling-factor 0.7 --hybrid-layer-pattern M-*-*-M-/*M-/*M-",
    "states": f"{MODELS['llama']} {_DELTA} {_MAMBA} --hybrid-layer-pattern GE*MG*E- "
    + _DEEPSEEK_EXPERTS.replace("--moe-layer-freq [0]+[1]*3", ""),
}
"""Layers that carry a state, whose stages are equal."""
MODELS |= MODELS_OF_STATES
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"
OVERLAP = "--overlap-grad-reduce"
SHARDED = "--use-distributed-optimizer"
GATHER = f"{SHARDED} {OVERLAP} --overlap-param-gather"
VERIFY_SHAPES = "--wlb-verify-shapes"
KEEP = "--wlb-cp-keep-gathered"
HEAD_GROUPS = "--wlb-cp-overlap-groups 2"
NO_P2P_OVERLAP = "--no-overlap-p2p-communication"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


@dataclass(frozen=True)
class Layout:
    """A layout; ``num_micro_batches`` is that of each data-parallel rank."""

    model: str
    num_micro_batches: int
    pp: int = 1
    vpp: int = 1
    tp: str = "1"
    """``1``, ``2``, or ``2sp``: with sequence parallelism."""
    dp: int = 1
    extra: str = ""
    cp: int = 1
    sharding: str = "per-sequence"
    """``--wlb-cp-sharding``; see :data:`helpers.ranks.SHARDINGS`."""
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * int(self.tp[0]) * self.dp * self.cp

    def __str__(self) -> str:
        flags = "".join(word.replace("--", "-") for word in self.extra.split() if "--" in word)
        cp = f"-cp{self.cp}-{self.sharding}" if self.cp > 1 else ""
        return (
            f"{self.model}-pp{self.pp}-vpp{self.vpp}-tp{self.tp}-dp{self.dp}{cp}"
            f"{f'-ep{self.ep}' if self.ep > 1 else ''}-m{self.num_micro_batches}{flags}"
        )

    @property
    def config(self) -> Config:
        flags = [*COMMON.split(), *MODELS[self.model].split()]
        if "--hybrid-layer-pattern" in flags:
            at = flags.index("--hybrid-layer-pattern") + 1
            signs, *ahead = flags[at].split("/")
            own = len(signs) // (self.pp * self.vpp)
            stages = "|".join(signs[n : n + own] for n in range(0, len(signs), own))
            flags[at] = "/".join([stages, *ahead])
        else:
            flags += ["--num-layers", str(max(4, self.pp * self.vpp))]
        flags += self.extra.split()
        flags += ["--global-batch-size", str(self.num_micro_batches * self.dp)]
        flags += ["--pipeline-model-parallel-size", str(self.pp)]
        flags += ["--tensor-model-parallel-size", self.tp[0]]
        if self.vpp > 1:
            flags += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        flags += ["--context-parallel-size", str(self.cp)]
        flags += ["--wlb-cp-sharding", self.sharding]
        if self.ep > 1:
            flags += ["--expert-model-parallel-size", str(self.ep)]
        if self.tp == "2sp":
            flags.append("--sequence-parallel")
        return parse(flags)


Oracle: TypeAlias = Callable[..., OracleRun]
"""One process's run of a case's model, of plans, on a workload."""
Differences: TypeAlias = Callable[..., list[str]]
"""What differs from it: of a case, a fault, and what makes plans."""


def further(*case: Any) -> Any:
    """A case of the long form: of what it holds, others of the suite hold each part."""
    return pytest.param(*case, marks=pytest.mark.long)


def some_of(names: Iterable[str], *kept: str) -> list[Any]:
    """All of them; those that are not kept are of the long form."""
    return [name if name in kept else further(name) for name in names]

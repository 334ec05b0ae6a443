"""One tree of settings: the command line, its help and the YAML file are made of the dataclasses
in it (:mod:`megatron_wlb.settings.command_line`).

Names and meanings are Megatron's (``--num-layers`` is ``Config.model.num_layers``); ours begin
with ``wlb_``.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from megatron_wlb.reading import MAX_SIZE, MOST_STEPS_AHEAD, MOST_TOKENS, typed
from megatron_wlb.settings.megatron import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron_wlb.settings.packings import ASKED
from megatron_wlb.settings.pattern import LATENT, STATES, HybridPattern
from megatron_wlb.settings.setting import (
    SAME,
    Setting,
    count,
    factor,
    micro_batches,
    real,
    searched,
    setting,
)

DEFAULT_MACHINE = "h100-sxm-measured"
"""An H100 at the rates that one of them was measured with."""


@dataclass(frozen=True)
class WlbConfig:
    """Workload balance: everything that stock Megatron does not have."""

    wlb_packing: str = searched("auto", "which documents run together", choices=ASKED)
    wlb_max_tokens: int | None = searched(
        None,
        "S_max: most tokens of a micro-batch, as memory allows; if not given 2 windows, or what "
        "fits --wlb-hardware",
        most=MOST_TOKENS,
    )
    wlb_memory_gib: float | None = searched(
        None,
        "memory of a device for tensors, in GiB: S_max is what fits, and a larger "
        "--wlb-max-tokens is an error",
        within=(1e-9, 1e9),
    )
    wlb_max_step_tokens: int | None = searched(
        None,
        "most tokens of a step, to even out steps; documents that have waited --wlb-max-age steps "
        "may run above it. 0: N × S_max. If not given, `hold` takes 1.05 × the mean step, others 0",
        least=0,
    )
    wlb_queue_thresholds: tuple[int, ...] = searched(
        (),
        "L_1 L_2 …: shortest document of each delay queue of `wlb`; derived if not given",
        least=1,
    )
    wlb_expert_imbalance: float = setting(
        1.0,
        "with --num-experts: memory is planned for a rank whose experts get this many times the "
        "tokens of the mean rank; 1 is even routing",
        within=(1, 1e9),
    )
    wlb_hold_tau: float = factor(
        1.0,
        "`hold`: below this imbalance of a step more balance counts as no gain; at least 1",
        searched=True,
    )
    wlb_delay_price: float | None = real(
        None,
        "`hold`: price of delay: delaying a whole step's tokens by one step must lower imbalance "
        "by at least this; 0.15 if not given, 0.45 with --wlb-look-ahead",
        searched=True,
    )
    wlb_look_ahead: int = searched(
        0,
        "`hold`: how many steps early documents may run; that counts as delay too",
        least=0,
        most=MOST_STEPS_AHEAD,
    )
    wlb_shape: Literal["on", "off"] = searched(
        "off",
        "`hold`, `wlb` with a pipeline: small micro-batches first and last, sizes and order chosen "
        "by simulated step time instead of equal work",
    )
    wlb_micro_batches: Literal["fixed", "auto"] = searched(
        "fixed",
        "`original`, `hold`, `wlb` with a pipeline: the number of micro-batches of a step. fixed: "
        "from the batch size. auto: the one with the shortest simulated step of its documents",
    )
    wlb_fixed_batches: int = searched(
        1,
        "`fixed-greedy`, `fixed-solver`: global batches that are repacked together",
        least=1,
        most=MOST_STEPS_AHEAD,
    )
    wlb_fixed_grouping: Literal["sorted", "arrival"] = searched(
        "sorted",
        "`fixed-greedy`: which windows of several global batches run in a step: those of like "
        "work, or those that arrived together",
    )
    wlb_solver_limit: float = searched(
        10.0,
        "`fixed-solver`: time of a search, about this many seconds; it is deterministic, so that "
        "every rank finds the same plan",
        within=(0.001, math.inf),
    )
    wlb_units: int | None = micro_batches(
        None,
        "`slim`: micro-batches to cut a data-parallel rank's step into; chosen by simulated step "
        "time if not given",
        searched=True,
    )
    wlb_slice_multiple: int | None = searched(
        None,
        "`slim`: documents are cut at multiples of this many tokens; if not given 128, or a 64th "
        "of the window if that is less",
        least=1,
        most=MOST_TOKENS,
    )
    wlb_dp_merge: Literal["auto", "off"] = setting(
        "auto",
        "`slim`: a document that outweighs a data-parallel rank's mean runs on several of them "
        "together, as context-parallel ranks, if that is faster in simulation",
    )
    wlb_recompute: Literal["auto", "off"] = searched(
        "auto",
        "`slim`: if a device (--wlb-memory-gib, or --wlb-hardware) has no room for a micro-batch, "
        "its MLPs or layers run forward once more in backward",
    )
    wlb_host_gib: float = searched(
        0.0,
        "`slim`: GiB of the host's memory for each device. Micro-batches without room on the "
        "device wait there instead of being recomputed, if that is faster in simulation",
        within=(0, 1e9),
    )
    wlb_slice_cache: Literal["auto", "whole", "divided"] = searched(
        "auto",
        "`slim`: context-parallel ranks each have all keys and values of a document in slices, or "
        "divide them and gather them for each slice; auto: the faster in simulation that fits "
        "memory",
    )
    wlb_max_age: int = searched(
        12, "steps after which a delayed document runs at any cost", least=0, most=MAX_SIZE
    )
    wlb_long_documents: Literal["split", "slice", "truncate", "error"] = searched(
        "split",
        "what to do with documents longer than the window; slice: `slim` trains them whole",
    )
    wlb_loss_mean: Literal["token", "sample"] = setting(
        "token",
        "the mean that is a step's loss. token: over all targets. sample: over documents, with the "
        "mean over targets of each",
    )
    wlb_loss: str | None = setting(
        None,
        "a Python file whose function `loss(log_probs, targets)` replaces cross-entropy "
        "(docs/fine-tuning.md)",
    )
    wlb_mock_lengths: str | None = setting(
        None,
        "with --mock-data: a distribution (reference, stdlib, magi, slimpack) or a file of "
        "lengths, one a line or an .npy array; reference if not given",
        resume="free",
    )
    wlb_cp_sharding: Literal["per-sequence", "per-document", "adaptive", "hybrid"] = searched(
        "adaptive",
        "with CP: how a micro-batch is divided. per-sequence: 2·CP pieces of the whole. "
        "per-document: 2·CP pieces of each document. adaptive: the one of these two with the "
        "faster attention on the slowest rank, by prediction. hybrid: also per-document for long "
        "documents only, from a length that is chosen likewise",
        short="sharding",
    )
    wlb_strategies: str | None = searched(
        None,
        "replicas of unlike layouts, chosen step by step (Hydraulis): a YAML file such as "
        "`wlb plan --strategies --out` writes, or auto, which proposes them at start; for the "
        "launcher",
    )
    wlb_cost: str = setting(
        "analytic",
        "analytic: from the model's shape. measured: timed at start. Or a JSON or YAML file of "
        "coefficients or measured tables; with --wlb-strategies a folder of tables, one for each "
        "TP and CP",
        resume="free",
    )
    wlb_hardware: str = searched(
        DEFAULT_MACHINE,
        "machine of the analytic cost and of --wlb-cp-sharding: h100-sxm-measured, h100-sxm (as "
        "runs before flash-attn 3), h200, a100, a800, cpu, or a YAML file such as `wlb profile` "
        "writes",
        resume="free",
    )
    wlb_cost_extrapolate: bool = setting(
        False, "go beyond the longest length of measured tables; otherwise that is an error"
    )
    wlb_attention_kernel: Literal[
        "auto", "torch", "flash-attn-2", "flash-attn-3", "transformer-engine", "torch-cpu", "sdpa"
    ] = setting(
        "auto",
        "attention kernel; auto is the fastest that can run here, on GPUs by timing, and the log "
        "says which and why",
        resume="free",
    )
    wlb_cp_overlap_groups: int | None = count(
        None,
        "with CP or --wlb-dp-merge: groups of key/value heads; one is gathered while the one "
        "before is attended to. A divisor of a TP rank's key/value heads; on GPUs 2 if that "
        "divides them, else 1",
        resume="free",
    )
    wlb_cp_keep_gathered: bool = setting(
        False,
        "with CP or --wlb-dp-merge: keep gathered keys and values for the backward pass instead "
        "of gathering twice: memory for communication",
        resume="free",
    )
    wlb_cp_reduce_in_fp32: bool = setting(
        False,
        "with CP or --wlb-dp-merge: sum the gradients of keys and values in fp32 over chunks and "
        "ranks instead of in bf16: twice the bytes of that exchange",
    )
    wlb_device: Literal["auto", "cuda", "cpu"] = setting(
        "auto",
        "cpu runs Megatron under the CPU emulation; auto never does so with a GPU",
        resume="free",
    )
    wlb_verify_plan_interval: int = setting(
        1,
        "every this many steps compare the plan's digest over all ranks, and the tokens of the "
        "step before among ranks that read the same; 0 turns this off",
        least=0,
        resume="free",
    )
    wlb_allow_untested_megatron: bool = setting(
        False,
        "run with a megatron-core that is not in the table of versions, with a warning",
        resume="free",
    )
    wlb_hang_seconds: float = real(
        600.0,
        "end the run if a micro-batch takes longer, and name the rank that is waited for; 6 times "
        "as long for a plan, the first step or a checkpoint; 0 turns this off",
        resume="free",
    )
    wlb_no_checksums: bool = setting(
        False,
        "neither save checksums of a checkpoint's files nor compare them before it is loaded: "
        "saves a second reading of huge files, but a damaged checkpoint may train on unnoticed",
        resume="free",
    )
    wlb_no_ledger: bool = setting(
        False,
        "write no wlb_ledger.txt in the folder of --save; `wlb audit` reads there which documents "
        "ran at which step",
        resume="free",
    )
    wlb_verify_shapes: bool = setting(
        False,
        "debug: stages also tell each other the shape, sum and crc32 of each activation and "
        "gradient that they send, and compare; slow",
        resume="free",
    )
    wlb_metrics: str | None = setting(
        None, "file for one JSON line a step", resume="free", alike=False
    )
    wlb_config: str | None = searched(
        None, "YAML file of settings, under the command line", resume="free", alike=False
    )


@dataclass(frozen=True)
class Config:
    """Everything a training run is told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wlb: WlbConfig = field(default_factory=WlbConfig)

    @property
    def replicas_meet(self) -> bool:
        """Whether all data-parallel replicas meet in each pass: as they gather weights, agree on
        delayed scales of FP8, or add up tokens that their routers have chosen.
        """
        m, t = self.model, self.training
        weights = zip(m.moe_router_load_balancing_type, m.moe_aux_loss_coeff, strict=False)
        return (
            self.parallel.use_torch_fsdp2
            or (t.fp8_format is not None and t.fp8_recipe == "delayed")
            or any(kind == "global_aux_loss" and weight for kind, weight in weights)
        )

    @property
    def merges(self) -> bool:
        """Whether several data-parallel replicas may run a document together. Not where ranks that
        do cannot share it: latents with sliding windows, or projected again in FP8, and states of
        a document, whose heads the replicas' ranks do not divide.
        """
        m, t = self.model, self.training
        latents = m.multi_latent_attention and (m.window_size or t.fp8_format is not None)
        states = STATES & {*(self.parallel.hybrid_layer_pattern or "")}
        return self.wlb.wlb_dp_merge == "auto" and not latents and not states

    def flat(self) -> dict[str, Any]:
        """Settings by name, JSON-able: what is saved with a run."""
        return {k: v for group in dataclasses.asdict(self).values() for k, v in group.items()}


def groups_of_settings() -> dict[str, type]:
    return typing.get_type_hints(Config)


_OF_GROUPS: dict[type, dict[str, Any]] = {
    ModelConfig: {"script": SAME, "resume": "same"},
    ParallelConfig: {"script": SAME},
    WlbConfig: {"resume": "told"},
}
"""What most settings of a group have."""


@cache
def table() -> dict[str, Setting]:
    """Every setting by name: each list of settings in the package is made of this one."""
    return {
        f.name: Setting(**{**_OF_GROUPS.get(group, {}), **f.metadata})
        for group in groups_of_settings().values()
        for f in dataclasses.fields(group)
    }


def script_defaults() -> dict[str, Any]:
    """Defaults of Megatron-LM's script that differ from ours where predictions depend on them."""
    return {n: s.script_default for n, s in table().items() if s.script_default is not None}


def flag_of(name: str) -> str:
    """``num_layers`` -> ``--num-layers``."""
    return "--" + name.replace("_", "-")


def from_flat(values: dict[str, Any]) -> Config:
    """A :class:`Config` from settings by name; what is missing keeps its default.

    A HybridModel's pattern says how many layers there are, and of which attention. Raises
    :class:`ConfigError` for values of another type than the setting's, or no pattern of layers.
    """
    if values.get("hybrid_layer_pattern") is not None:
        pattern = HybridPattern.of(str(values["hybrid_layer_pattern"]))
        values = {**values, "num_layers": len(pattern.layers)}
        if pattern.depths:
            values["mtp_num_layers"] = pattern.depths
        if LATENT in pattern.layers + pattern.ahead:
            values["multi_latent_attention"] = True
    groups = {}
    for name, group in groups_of_settings().items():
        hints = {s: hint for s, hint in typing.get_type_hints(group).items() if s in values}
        groups[name] = group(**{s: typed(flag_of(s), values[s], hints[s]) for s in hints})
    return Config(**groups)

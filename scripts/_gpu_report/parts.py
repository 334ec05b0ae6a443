"""The parts of the report, in order of worth."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_wlb.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """A part: the module of the same name measures it and shows it."""

    name: str
    title: str
    tells: str
    limit_s: int
    """Seconds after which it is killed; below ten minutes, which a borrowed machine may allow."""
    after: tuple[str, ...] = ()
    """Parts whose results it reads."""
    needs_gpu: bool = True

    @property
    def measure(self) -> Callable[..., None]:
        """``measure(results)`` puts what it finds into :class:`~_gpu_report.results.Results`."""
        function: Callable[..., None] = self._module.measure
        return function

    @property
    def lines(self) -> Callable[..., list[str]]:
        """``lines(figures, pictures)``: Markdown below the part's heading."""
        function: Callable[..., list[str]] = self._module.lines
        return function

    def wrong(self, figures: Mapping[str, Any]) -> list[str]:
        """What was computed wrong: by this alone the command fails."""
        judge = getattr(self._module, "wrong", None)
        return [] if judge is None else judge(figures)

    @property
    def _module(self) -> Any:
        return importlib.import_module(f"_gpu_report.{self.name}")


PARTS = {
    part.name: part
    for part in (
        Part("environment", "The machine", "GPU, clocks, driver; which attention kernels run, and "
             "why others do not", 60, needs_gpu=False),
        Part("tests", "Tests on the GPU", "do the tests of `tests/gpu` pass?", 240),
        Part("kernels", "Attention kernels", "is each kernel right, and how fast are packed "
             "documents?", 240),
        Part("profile", "The profile", "the hardware file that planning and the simulator read "
             "(`wlb profile`)", 360),
        Part("context_parallel", "Context parallelism", "which sharding is faster, and does "
             "`adaptive` choose it? (WLB-LLM, Figure 15)", 300, ("profile",)),
        Part("stage", "A stage", "do the cost and memory models say what one tensor-parallel "
             "rank's share of 7B and 70B takes?", 240),
        Part("launcher", "Steps of Megatron-LM", "what does `pretrain_gpt.py` take with each "
             "packing, and was that predicted?", 240, ("profile",)),
        Part("replay", "Whole steps", "what packings and shardings gain with these kernels "
             "(WLB-LLM, Figures 12-14)", 240, ("profile",), needs_gpu=False),
        Part("host", "The host", "does the host wait for the GPU, does the GPU wait for the host, "
             "does memory grow?", 240),
        Part("smoke_training", "Training", "are the losses those of the CPU?", 240),
        Part("probe", "Several ranks on one GPU", "do NCCL and MPS run them, and do streams hold "
             "each other up?", 120, needs_gpu=False),
        Part("ranks", "The oracle over NCCL", "do tensor, context, pipeline, expert and data "
             "parallelism compute what one process does?", 300, needs_gpu=False),
        Part("pipeline", "A pipeline on one GPU", "what does each packing gain where four stages "
             "have a quarter of the SMs each?", 480),
    )
}  # fmt: skip


def parts_called(names: Sequence[str]) -> list[Part]:
    """The parts in their order; all if none is named. Raises :class:`ConfigError` for others."""
    for name in names:
        if name not in PARTS:
            raise ConfigError(f"--parts {name}: no part; give {', '.join(PARTS)}")
    return [part for part in PARTS.values() if not names or part.name in names]

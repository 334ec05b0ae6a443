"""How a model is executed: what its time and memory depend on beside its sizes and the machine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeAlias

from megatron_wlb.cost.shape import ModelShape, Parallelism, Recompute
from megatron_wlb.cost.workspace import FP32

Kernels: TypeAlias = Literal["torch", "fused"]


@dataclass(frozen=True, slots=True)
class Execution:
    """Layout, precision, kernels, and which part of a step is kept or recomputed.

    The defaults are those of a usual run on GPUs.
    """

    parallelism: Parallelism = field(default_factory=Parallelism)
    recompute: Recompute = field(default_factory=Recompute)
    bf16: bool = True
    """Whether weights and activations are bf16; else fp32."""
    optimizer: Literal["adam", "sgd"] = "adam"
    distributed_optimizer: bool = True
    """Whether optimizer state is spread over the data-parallel and context-parallel ranks."""
    store_ranks: int | None = None
    """Ranks of a parameter store (:mod:`megatron_wlb.strategies.plan.store_costs`), where there is
    one: master weights, moments and summed gradients of the whole model are spread over them
    evenly, whatever the layout is."""
    overlap_grad_reduce: bool = True
    tp_overlapped: bool = False
    """Whether all tensor-parallel collectives run beside the matrix product before or behind them
    (``--tp-comm-overlap``); else only those of :attr:`.Hardware.tp_overlap`."""
    ep_overlapped: bool = False
    """Whether the exchange with experts runs beside the work of another micro-batch
    (``--overlap-moe-expert-parallel-comm``)."""
    sends_once: bool = False
    """Whether a token goes to a node once, whatever number of experts it passes there
    (``--moe-token-dispatcher-type flex``)."""
    kernels: Kernels = "fused"
    """Norms and activations as single kernels, as on a GPU; torch's keep more."""
    attention_kernel: str | None = None
    """The name of attention's kernel. Without one the most of all that may run is counted of fused
    kernels, and attention document by document of torch's."""
    num_head_groups: int | None = None
    """Head groups of the context-parallel exchange; a GPU's default if not given."""
    keep_gathered: bool = False
    """Under CP: whether gathered keys and values are kept for the backward pass."""
    reduce_in_fp32: bool = False
    """Under CP: whether their gradients are summed in fp32."""
    replicas_meet: bool = False
    """Whether all data-parallel replicas meet in each pass, besides those that share experts."""
    merges: bool = True
    """Whether several replicas may run a document together."""
    recomputes: bool = True
    """Whether single micro-batches may be recomputed, where layers are not in all."""
    host_gib: float = 0.0
    """2³⁰ bytes of the host's memory for each device, where activations of slices may wait."""
    expert_imbalance: float = 1.0
    """Memory is of a rank whose experts get so many times the mean rank's tokens."""
    document_tokens: float = 1024
    """Tokens of a document in the mean, for what kernels add to each; real corpora have more."""


@dataclass(frozen=True, slots=True)
class Executed:
    """A model, and how it is executed."""

    shape: ModelShape
    execution: Execution

    def executed(self, **changes: Any) -> Self:
        """Tells the same of an :class:`Execution` with these changes."""
        return replace(self, execution=replace(self.execution, **changes))

    @property
    def parallelism(self) -> Parallelism:
        return self.execution.parallelism

    @property
    def recompute(self) -> Recompute:
        return self.execution.recompute

    @property
    def alike(self) -> int:
        """How many neighbouring replicas meet in each pass: their numbers and orders are alike."""
        p = self.parallelism
        if self.execution.replicas_meet:
            return p.dp_size
        return p.expert_replicas if self.shape.experts else 1

    @property
    def element_bytes(self) -> int:
        """Bytes of a number, in operations without a precision of their own."""
        return 2 if self.execution.bf16 else FP32

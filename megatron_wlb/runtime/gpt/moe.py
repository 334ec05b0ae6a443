"""Mixture of experts over packed documents: which tokens routers count, and what their losses are.

Each token is routed on its own, so packing changes no output. What is counted over tokens are the
auxiliary losses and the experts' biases. Megatron counts the tokens that a rank holds, padding too,
takes a packed micro-batch for one sequence, and weighs ranks alike. Here they are of a step's
tokens, and padding is none:

- ``seq_aux_loss`` is of each document: it does not depend on the packing. Slices of a document
  count together. A slice cannot know what later ones will choose, so that is added in backward,
  which runs when all have chosen.
- ``aux_loss`` is of each micro-batch, whose tokens lie on all its TP and CP ranks, and may lie on
  those of several replicas.
- ``global_aux_loss`` takes the shares of experts from all micro-batches of the step so far, in
  running order and over all data-parallel ranks, as Megatron does.
- The z-loss is of each token.

A step has the mean of each over its tokens: a document or micro-batch weighs as many tokens as it
has. With equal lengths this is what Megatron trains by default. With its loss per token Megatron up
to 0.18 divides these losses by TP · CP besides.

Legend: ``T`` tokens of the micro-batch, ``n`` those of this rank in the router, which are ``T/CP``
or under sequence parallelism ``T/(CP·TP)``; ``E`` experts, ``G`` groups of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter

from megatron_wlb.errors import CompatibilityError, PlanError
from megatron_wlb.plan import MicroBatchPlan, StepPlan
from megatron_wlb.runtime.gpt.attention.slice_attention import KVSlice

_LOGGED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""What Megatron's log calls these losses."""


Choice: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""How often a slice chose each expert, on all ranks that run it, and its scores on this rank,
``[E]`` each."""


@dataclass(frozen=True)
class RoutedTokens:
    """What routers are told of a micro-batch on this context-parallel rank."""

    documents: torch.Tensor
    """``[T/CP]`` int64: the number of each token's document in the micro-batch; that of padding is
    ``num_documents``."""
    num_documents: int
    targets_per_token: float = 1.0
    """The step's targets, by which gradients are divided, over its tokens, which losses are of."""
    targets_per_micro_batch: float = 1.0
    """The same over its micro-batches, of all data-parallel ranks, by whose number Megatron divides
    what it logs."""
    cut: KVSlice | None = None
    """The slice that the first document is, if it is one."""
    group: dist.ProcessGroup | None = None
    """The ranks that share the tokens, as context-parallel ranks do, if they are of several
    data-parallel replicas."""
    so_far: dict[TopKRouter, torch.Tensor] = field(default_factory=dict)
    """``[E]`` by router: how often the step's micro-batches have chosen each expert up to this."""

    @classmethod
    def of(
        cls,
        micro_batch: MicroBatchPlan,
        local: npt.NDArray[np.int64] | slice,
        step: StepPlan,
        cut: KVSlice | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> RoutedTokens:
        """A micro-batch's ``local`` tokens, on the host."""
        numbers = np.repeat(np.arange(len(micro_batch.lengths)), micro_batch.lengths)
        num_targets = step.num_targets or 1  # nothing is divided by 0 targets
        return cls(
            torch.from_numpy(numbers[local]),
            len(micro_batch.spans),
            num_targets / max(step.num_tokens, 1),
            num_targets / _num_logged(step),
            cut,
            group,
        )

    @classmethod
    def padding(cls, num_tokens: int, device: torch.device | str) -> RoutedTokens:
        """Tokens that count nowhere."""
        return cls(torch.zeros(num_tokens, dtype=torch.int64, device=device), 0)


def _num_logged(step: StepPlan) -> int:
    """How many micro-batches Megatron counts in a step: by the batch size where that is given."""
    try:
        number: int = get_num_microbatches()
    except AttributeError:  # nobody has set up its count
        return sum(map(len, step.micro_batches))
    return number * (len(step.micro_batches) if step.strategy is None else dist.get_world_size())


class DocumentRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router, with the losses of the module's first lines."""

    tokens: RoutedTokens | None = None
    """The tokens of the micro-batch that is routed; its layer sets them."""

    def routing(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Routes as Megatron does, and notes what a slice chooses: also where it is computed again
        later, and no loss is attached yet.
        """
        tokens = self.tokens
        if tokens is not None and self.training:
            if tokens.cut is not None and self.get_aux_loss_coeff("seq_aux_loss"):
                chosen_sums, score_sums = self._chosen(logits, by_document=True)
                self._add_up(chosen_sums)
                self._choices(tokens.cut)[tokens.cut.start] = chosen_sums[0], score_sums[0]
            if self.get_aux_loss_coeff("global_aux_loss") and self not in tokens.so_far:
                chosen_sums, _ = self._chosen(logits, by_document=False)
                dist.all_reduce(chosen_sums, group=self.tp_dp_cp_group)
                # Megatron forgets the sum at the step's end.
                self.global_tokens_per_expert += chosen_sums[0]
                tokens.so_far[self] = self.global_tokens_per_expert.clone()
        return super().routing(logits, *args, **kwargs)

    def _chosen(
        self, logits: torch.Tensor, *, by_document: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What :meth:`_sums` says of these logits."""
        chosen, scores = compute_routing_scores_for_aux_loss(
            logits.detach().view(-1, self.num_experts),
            self.topk,
            self.score_function,
            fused=self.config.moe_router_fusion,
        )
        return self._sums(chosen, scores, by_document=by_document)

    def _add_up(self, counts: torch.Tensor) -> None:
        """Makes counts those of all ranks that have tokens of the micro-batch."""
        assert self.tokens is not None
        several = self.tokens.group
        for group in (self.tp_cp_group,) if several is None else (self.tp_group, several):
            if group.size() > 1:
                dist.all_reduce(counts, group=group)

    def _choices(self, cut: KVSlice) -> dict[int, Choice]:
        """What the slices of a document have chosen here, by where they start."""
        return cut.store.choices.setdefault((cut.document, self), {})

    def apply_z_loss(self, logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """``[n, E] -> [n, E]``, with the loss attached."""
        coeff = self.config.moe_z_loss_coeff
        if not coeff or not self.training or not torch.is_grad_enabled():
            return logits
        documents, number = self._documents(len(logits))
        squares = torch.logsumexp(logits.float(), dim=-1).square()
        return self._attach(logits, coeff, squares[documents < number].sum(), "z_loss")

    def _even_out(
        self,
        kind: str,
        probs: torch.Tensor,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """``[n, E]`` each: ``probs``, with the auxiliary loss attached if it has a coefficient."""
        coeff = self.get_aux_loss_coeff(kind)
        if not coeff:
            return probs
        chosen_sums, score_sums = self._sums(chosen, scores, by_document=kind == "seq_aux_loss")
        if kind == "global_aux_loss":
            assert self.tokens is not None
            chosen_sums = self.tokens.so_far[self][None]
        else:
            self._add_up(chosen_sums)
        cut = self.tokens.cut if self.tokens is not None and kind == "seq_aux_loss" else None
        if cut is None:
            loss = _balance(chosen_sums, score_sums)
        else:
            of_slice: Any = _SliceBalance.apply
            loss = of_slice(score_sums[0], self._choices(cut), cut.start)
            loss = loss + _balance(chosen_sums[1:], score_sums[1:])
        return self._attach(probs, coeff, loss, _LOGGED[kind])

    _apply_aux_loss = partialmethod(_even_out, "aux_loss")
    _apply_seq_aux_loss = partialmethod(_even_out, "seq_aux_loss")
    _apply_global_aux_loss = partialmethod(_even_out, "global_aux_loss")

    def _apply_expert_bias(self, routing_map: torch.Tensor, *_: Any, **__: Any) -> None:
        """Counts the tokens of each expert, over the whole step."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            documents, number = self._documents(len(routing_map))
            super()._apply_expert_bias(routing_map & (documents < number)[:, None])

    def _documents(self, num_tokens: int) -> tuple[torch.Tensor, int]:
        """The document of each token here, ``[n]``, and how many there are."""
        if self.tokens is None:
            raise PlanError(
                "a router was called without the micro-batch's documents; the model must be run by "
                "megatron-wlb's forward step"
            )
        documents, tp = self.tokens.documents, self.tp_group
        if self.config.sequence_parallel and tp.size() > 1:
            documents = documents.chunk(tp.size())[tp.rank()]
        if len(documents) != num_tokens:
            raise PlanError(
                f"a router got {num_tokens} tokens where the plan has {len(documents)}; the ranks "
                "do not run the same plan"
            )
        return documents, self.tokens.num_documents

    def _sums(
        self, chosen: torch.Tensor, scores: torch.Tensor, *, by_document: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How often each expert is chosen here, and its scores: ``[n, E], [n, E] -> [G, E] each``.

        A group is each document, or all of them.
        """
        documents, number = self._documents(len(scores))
        if not by_document:
            documents, number = (documents == number).long(), 1
        zeros = scores.new_zeros((number + 1, self.num_experts), dtype=torch.float32)
        # Padding has a group of its own, the last one.
        chosen_sums, score_sums = (
            zeros.index_add(0, documents, values.float())[:number] for values in (chosen, scores)
        )
        return chosen_sums.detach().contiguous(), score_sums

    def _attach(
        self, activation: torch.Tensor, coeff: float, loss: torch.Tensor, name: str
    ) -> torch.Tensor:
        """Adds a loss's gradient to that of ``activation``, and notes the loss for Megatron's log.

        ``loss`` is without ``coeff``: the sum over the tokens of this rank.
        """
        assert self.tokens is not None
        # All that scales is here, and Megatron's method adds nothing. It logs what is attached over
        # the second argument; the mean of that over micro-batches is then the loss of a token.
        self.calculate_per_token_loss = False
        attached: torch.Tensor = self.attach_and_log_load_balancing_loss(
            activation,
            coeff * self.tokens.targets_per_micro_batch,
            loss * (coeff * self.tokens.targets_per_token),
            name,
            self.tp_cp_group,
        )
        return attached


class DocumentMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's layer, whose router counts in the backward pass what it counted in the forward."""

    recomputes = False
    """Whether all of it is computed again in the backward pass."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        if not self.recomputes or not self.training:
            return run(hidden_states, *args, **kwargs)
        tokens = self.router.tokens

        def run_again(hidden_states: torch.Tensor) -> Any:
            # Other micro-batches have come here since, where there is a pipeline.
            self.router.tokens = tokens
            return run(hidden_states, *args, **kwargs)

        if self.config.fp8 or self.config.fp4:
            from megatron.core.extensions.transformer_engine import te_checkpoint

            tracker = tensor_parallel.random.get_cuda_rng_tracker
            tp = parallel_state.get_tensor_model_parallel_group()
            return te_checkpoint(run_again, False, tracker, tp, hidden_states)
        return tensor_parallel.checkpoint(run_again, False, hidden_states)


def route_by_document(model: torch.nn.Module) -> None:
    """Makes the layers of experts of a model that Megatron has built count documents.

    Classes are changed after building, as versions of Megatron write a layer's spec differently.
    The wrapper for data parallelism, which comes later, is told which weights are of experts.

    Raises :class:`CompatibilityError` for a router or a layer of another kind.
    """
    for layer in model.modules():
        moe = getattr(layer, "mlp", None)
        if not isinstance(moe, MoELayer) or isinstance(moe, DocumentMoELayer):
            continue
        for module, known in ((moe, MoELayer), (moe.router, TopKRouter)):
            if type(module) is not known:
                raise CompatibilityError(
                    f"a layer of experts has a {type(module).__name__} in place of Megatron's "
                    f"{known.__name__}, whose losses are not known by document; use a spec with "
                    f"{known.__name__}"
                )
        moe.__class__, moe.router.__class__ = DocumentMoELayer, DocumentRouter
        moe.recomputes, moe.moe_layer_recompute = moe.moe_layer_recompute, False
        config = moe.config
        if config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
            # Other ranks share experts than share all else. Megatron up to 0.18 knows that of EP
            # above 1 only: at EP 1 it would add up gradients of other parts of the weights.
            for weight in moe.experts.parameters():
                weight.allreduce = False
        layer.register_forward_pre_hook(_tell_router, with_kwargs=True)


def add_up_logged(config: Any) -> None:
    """Lets every rank have the mean over all of what each has noted of auxiliary losses, and lets
    Megatron's log add up nothing: for ranks whose groups differ. All ranks call it together.
    """
    kinds = config.moe_router_load_balancing_type
    named = [_LOGGED.get(kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    named += ["z_loss"] if config.moe_z_loss_coeff is not None else []
    num_layers = config.num_layers + (config.mtp_num_layers or 0)
    for name in filter(None, named):
        tracker = moe_utils.get_moe_metrics_tracker()
        tracker.ensure_initialized(name, num_layers)
        noted = vars(tracker.metrics[name])
        noted.update(reduce_group=None, avg_group=None, needs_dp_avg=False)
        dist.all_reduce(noted["values"])
        noted["values"] /= dist.get_world_size()


def _tell_router(layer: Any, _args: Any, named: dict[str, Any]) -> None:
    layer.mlp.router.tokens = getattr(named.get("packed_seq_params"), "routed", None)


class _SliceBalance(torch.autograd.Function):
    """:func:`_balance` of a document, as far as it has come, less what it was before this slice."""

    @staticmethod
    def forward(
        ctx: Any,
        _scores: torch.Tensor,
        choices: dict[int, Choice],
        start: int,
    ) -> torch.Tensor:
        ctx.choices = choices
        before = [of_slice for at, of_slice in choices.items() if at < start]
        now = _balance_of([*before, choices[start]])
        return now - _balance_of(before) if before else now

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        chosen = sum(chosen for chosen, _ in ctx.choices.values())
        return grad * len(chosen) * chosen / chosen.sum().clamp(min=1), None, None


def _balance_of(choices: Sequence[Choice]) -> torch.Tensor:
    chosen, scores = (torch.stack(each).sum(0)[None] for each in zip(*choices, strict=True))
    return _balance(chosen, scores)


def _balance(chosen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The loss of Switch Transformer summed over tokens: ``E Σ f_i Σ p_i``, where ``f_i`` is the
    share of expert i among those chosen.

    ``chosen`` ``[G, E]`` counts all tokens of a group, ``scores`` ``[G, E]`` those of this rank.
    """
    shares = chosen / chosen.sum(1, keepdim=True).clamp(min=1)
    return chosen.shape[1] * (shares * scores).sum()

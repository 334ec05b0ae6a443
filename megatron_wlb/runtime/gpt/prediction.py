"""Multi-token prediction by document: tokens, labels and losses of layers that predict further on.

At depth ``k`` of ``D`` the token at position ``p`` of a document takes the token ``p + k`` in, and
predicts the one after. Megatron makes both by shifting a micro-batch's tensors inside the model,
where the next row may be another document's, or a context-parallel rank's next piece. Here the host
reads them from the corpus, as it does the labels of the model itself, and Megatron's shift looks
them up in what the micro-batch tells attention. A document that was cut ends at the cut, with one
label more.

The loss of a depth is the mean over all tokens of the step that have a label there, times
``--mtp-loss-scaling-factor ÷ D``. Megatron-LM means this, one micro-batch at a time. Here what a
token of depth ``k`` counts is in the masks.

Legend: ``T/CP`` local tokens of the micro-batch.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionLayer,
)

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.gpt.hybrid import layers_of, mixer_of


@dataclass(frozen=True)
class Ahead:
    """What the micro-batch at hand takes in and predicts at each depth, 0 … D; ``[1, T/CP]`` each.

    Depth 0 is the model itself.
    """

    tokens: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]
    """What each token counts in the loss of a depth, fp32: what its label does × all that the
    step's labels count at depth 0 ÷ all that they count at this depth; 0 without a label. At depth
    0, whose loss is not taken here, 1."""
    step_targets: float
    """What the step's labels count at depth 0."""

    @property
    def divisor(self) -> int:
        """What Megatron is told to be the labels of each depth, as it counts them at depth 0: then
        it scales nothing itself.
        """
        return self.weights[0].numel()

    def after(self, tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The same one depth on. Positions stay: no prediction layer reads them.

        Raises :class:`CompatibilityError` for a tensor that is none of these.
        """
        for series in (self.tokens, self.labels, self.weights):
            for here, there in pairwise(series):
                if tensor is here:
                    return there
        if tensor.data_ptr() == positions.data_ptr():  # a view of them
            return tensor
        if tensor.dtype != self.labels[0].dtype:
            raise CompatibilityError(
                f"Megatron shifts a tensor of {tensor.dtype} for multi-token prediction, which is "
                "neither tokens, labels nor loss mask; this Megatron is not one that megatron-wlb "
                "knows"
            )
        return self.labels[1]  # Megatron copies the labels first.


_patches = PatchSet()


def install() -> None:
    """Lets every forward pass look up what its ``packed_seq_params.ahead`` has; without one, or
    where that is None, Megatron stays as it is. A second call does nothing.
    """
    if _patches:
        return
    saves = next(n for n in ("save_metrics_to_tracker", "save_loss_to_tracker")
                 if hasattr(MTPLossLoggingHelper, n))  # fmt: skip
    present: Ahead | None = None

    def shift(
        original: Any, tensor: torch.Tensor, *args: Any, packed_seq_params: Any = None, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal present
        present = getattr(packed_seq_params, "ahead", None)
        if present is None:
            found: tuple[torch.Tensor, torch.Tensor] = original(
                tensor, *args, packed_seq_params=packed_seq_params, **named
            )
            return found
        num_tokens = present.weights[0].new_full((), present.divisor)
        return present.after(tensor, packed_seq_params.positions), num_tokens

    def save(original: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Saves this rank's share of the step's mean; Megatron gives one over ``divisor``, of the
        labels and weights that it has just shifted.
        """
        if present is not None:
            loss = loss * (present.divisor / (present.step_targets or 1))
        original(loss, *args, **kwargs)

    _patches.wrap(multi_token_prediction, "roll_tensor", shift)
    _patches.wrap(MTPLossLoggingHelper, saves, save)
    if "padding_mask" not in inspect.signature(_recompute).parameters:
        _patches.replace(MultiTokenPredictionLayer, "_checkpointed_forward", _without_padding)


def uninstall() -> None:
    """Restores Megatron's shift, sums and recomputation; a second call does nothing."""
    _patches.restore()


_recompute = MultiTokenPredictionLayer._checkpointed_forward


def _without_padding(layer: Any, *, padding_mask: None, **kwargs: Any) -> torch.Tensor:
    """Full recomputation of a layer of 0.18, which passes a ``padding_mask`` that this method does
    not take.
    """
    result: torch.Tensor = _recompute(layer, **kwargs)
    return result


def take_losses() -> torch.Tensor | None:
    """Takes the step's loss of each depth, ``[D]``: on the last stage of a step that trained."""
    _sum_over_ranks()
    tracker = MTPLossLoggingHelper.tracker
    losses: torch.Tensor | None = tracker.get("loss_values", tracker.get("values"))
    tracker.clear()
    return losses


def add_up_losses(num_ahead: int, *, counts: bool) -> None:
    """Lets every rank have the sum of the losses of those that count, and Megatron's log add up
    nothing: for ranks whose groups differ. All ranks call it together.
    """
    tracker = MTPLossLoggingHelper.tracker
    name = "loss_values" if hasattr(MTPLossLoggingHelper, "save_metrics_to_tracker") else "values"
    for each in (name, "correct_values", "total_values")[: 1 if name == "values" else 3]:
        values = tracker.get(each)
        if values is None or not counts:
            values = torch.zeros(num_ahead, device=torch.cuda.current_device())
        torch.distributed.all_reduce(values)
        tracker[each] = values
    tracker["reduce_group"] = tracker["avg_group"] = None


def track_step(original: Any, _scale: float, *args: Any, **kwargs: Any) -> None:
    """Megatron's ``track_mtp_metrics``; what ranks saved adds up to the step's means."""
    _sum_over_ranks()
    original(1.0, *args, **kwargs)


def _sum_over_ranks() -> None:
    """Does Megatron's sums, where it would take the mean over ranks."""
    tracker = MTPLossLoggingHelper.tracker
    group, tracker["avg_group"] = tracker.get("avg_group"), None
    if group is not None:
        # Of losses (0.19 has another name for them), and of right guesses and all.
        for name in ("values", "loss_values", "correct_values", "total_values"):
            if name in tracker:
                torch.distributed.all_reduce(tracker[name], group=group)


def complete_layers(gpt: Any) -> None:
    """Mends what Megatron builds of prediction layers, before weights are wrapped, and lets them
    look up what they take (:func:`install`).

    Their layers count on after the decoder's: stacks and some versions begin anew, and slices of
    documents keep keys and states by these numbers. The last of several stages has a copy of tied
    embeddings, which the LM head takes too. There Megatron gives the head a weight that nobody
    uses, no checkpoint can be saved with, and no gradient comes for; and where matrix products add
    to the gradients, it would leave out the embedding's part.
    """
    if not getattr(gpt, "mtp_process", False):
        return
    install()
    if gpt.share_embeddings_and_output_weights and gpt.post_process and not gpt.pre_process:
        gpt.output_layer.weight = None
        gpt.embedding.word_embeddings.weight.zero_out_wgrad = True
    further = layers_of(gpt)[len(gpt.decoder.layers) :]
    for number, layer in enumerate(further, start=gpt.config.num_layers + 1):
        mixer = mixer_of(layer)
        getattr(mixer, "core_attention", mixer).layer_number = number

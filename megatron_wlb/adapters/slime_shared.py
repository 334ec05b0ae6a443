"""slime's Megatron backend computes what samples begin alike with once.

Add one flag to those of slime's training::

    --custom-megatron-init-path megatron_wlb.adapters.slime_shared.share_prefixes

Losses, advantages and log-probabilities stay slime's own: it takes back what the model gives for
each token of each response. Samples of one prompt come into one micro-batch where slime's schedule
is planned by :func:`megatron_wlb.adapters.slime.build_dp_schedule` and is given ``tokens``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.planning.balance.trees import refuse_sharing
from megatron_wlb.runtime.compat.patching import PatchSet

if TYPE_CHECKING:
    import torch

    from megatron_wlb.runtime.trainer.given_model import SharedSamples

FOLDER = "slime.backends.megatron_utils"


class SampleTokens(list[Any]):
    """Token ids of a micro-batch's samples, and how they run."""

    def __init__(self, samples: Sequence[torch.Tensor], known: SharedSamples) -> None:
        super().__init__(samples)
        self.known = known


def share_prefixes(args: Any) -> PatchSet:
    """Replaces what slime calls; the result can :meth:`~.PatchSet.restore` it.

    Raises :class:`CompatibilityError` for flags with which samples cannot share, and where slime
    has no function of these names.
    """
    refused = {
        "--enable-mtp-training": "enable_mtp_training",
        "--use-routing-replay": "use_routing_replay",
        "--use-rollout-routing-replay": "use_rollout_routing_replay",
        "--allgather-cp": "allgather_cp",
    }
    _refuse({flag: getattr(args, name, False) for flag, name in refused.items()})
    patches = PatchSet()
    core: list[Any] = []

    def get_model(theirs: Callable[..., Any], *given: Any, **named: Any) -> Any:
        from megatron_wlb.runtime.trainer.given_model import share

        chunks = theirs(*given, **named)
        core[:] = [share(chunks)]
        return chunks

    def get_batch(theirs: Callable[..., Any], *given: Any, **named: Any) -> Any:
        from megatron_wlb.runtime.trainer.given_model import SharedSamples

        batch = theirs(*given, **named)
        _refuse({"pictures": batch.get("multimodal_train_inputs") is not None})
        known = SharedSamples.of(batch["unconcat_tokens"], core[0])
        batch["unconcat_tokens"] = SampleTokens(batch["unconcat_tokens"], known)
        batch["tokens"], batch["packed_seq_params"] = known.tokens, known.params
        batch["full_loss_masks"] = None  # which further depths alone would read
        return batch

    patches.wrap(f"{FOLDER}.model", "get_model", get_model)
    patches.wrap(f"{FOLDER}.model", "get_batch", get_batch)
    hooks = dict.fromkeys(("get_log_probs_and_entropy", "get_values"), _of_responses)
    hooks["get_responses"] = _refused
    loss = importlib.import_module(f"{FOLDER}.loss")
    for name, hook in hooks.items():
        original = getattr(loss, name, None)
        for module, known in sorted(sys.modules.items()):  # some have it by name
            own = module.startswith("slime.") and getattr(known, name, None) is original
            if known is loss or (own and original is not None):
                patches.wrap(known, name, hook)
    return patches


def _refuse(reasons: Mapping[str, object]) -> None:
    remedy = "leave it out, or --custom-megatron-init-path"
    refuse_sharing(reasons, remedy, CompatibilityError, " in slime")


def _refused(theirs: Callable[..., Any], *given: Any, **named: Any) -> Any:
    shared = isinstance(named.get("unconcat_tokens"), SampleTokens)
    _refuse({"logits of each response, such as to serve a teacher's": shared})
    return theirs(*given, **named)


def _of_responses(
    theirs: Callable[..., Any],
    logits: torch.Tensor,
    *,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **named: Any,
) -> Any:
    """What slime's function of ``logits`` gives for each token of each response.

    It computes the rows of this context-parallel rank, ``[1, T/CP, …]``, as one sample of a token
    more, which has no row; and each rank gets the part of a response that slime has there.
    """
    import torch

    if not isinstance(unconcat_tokens, SampleTokens):  # which slime's own get_batch made
        return theirs(
            logits, unconcat_tokens=unconcat_tokens, total_lengths=total_lengths,
            response_lengths=response_lengths, **named,
        )  # fmt: skip
    _refuse({"a replay of top-p sampling": named.get("top_p_token_ids") is not None})
    known = unconcat_tokens.known
    num_rows = known.tokens.shape[1]
    loss = sys.modules[f"{FOLDER}.loss"]
    with PatchSet() as alone:
        alone.replace(loss, "mpu", _OneRank(loss.mpu))
        nothing, found = theirs(
            logits,
            unconcat_tokens=[torch.cat([known.targets[0, :1], known.targets[0]])],
            total_lengths=[num_rows + 1],
            response_lengths=[num_rows],
            **named,
        )

    def by_sample(rows: torch.Tensor) -> list[torch.Tensor]:
        every = torch.split(known.of_samples(rows[None], summed=True), known.lengths)
        lengths = zip(total_lengths, response_lengths, strict=True)
        return [
            loss.slice_log_prob_with_cp(own[total - length - 1 : -1], total, length)
            for own, (total, length) in zip(every, lengths, strict=True)
        ]

    return nothing, {name: by_sample(rows) for name, (rows,) in found.items()}


class _OneRank:
    """Megatron's ``parallel_state`` as a context-parallel rank sees it that is alone."""

    def __init__(self, mpu: Any) -> None:
        self._mpu = mpu

    def __getattr__(self, name: str) -> Any:
        if name == "get_context_parallel_world_size":
            return lambda: 1
        return getattr(self._mpu, name)

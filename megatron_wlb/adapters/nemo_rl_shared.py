"""NeMo-RL's Megatron policy computes what samples begin alike with once.

At the end of ``nemo_rl/models/policy/workers/megatron_policy_worker.py`` add::

    from megatron_wlb.adapters.nemo_rl_shared import share_prefixes

    share_prefixes()

set ``policy.sequence_packing.enabled=true``, and in the script that starts the training add::

    from megatron_wlb.adapters.nemo_rl_shared import pack_shared

    pack_shared(pp_size=1)

Losses and what they are made of stay NeMo-RL's own: it takes back the log-probability of each token
of each sample. Micro-batches are packed by what runs: of that one has at most ``train_mb_tokens``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from megatron_wlb.adapters.trainers import shared_ranks
from megatron_wlb.cost import Cost, Parallelism
from megatron_wlb.errors import CompatibilityError
from megatron_wlb.planning.balance.trees import refuse_sharing
from megatron_wlb.planning.packing.reference import REFERENCE_COST
from megatron_wlb.runtime.compat.patching import PatchSet

FOLDER = "nemo_rl.models.megatron"
LEFT_OUT = "set it otherwise, or leave out megatron_wlb.adapters.nemo_rl_shared"


def share_prefixes() -> PatchSet:
    """Replaces what NeMo-RL calls; the result can :meth:`~.PatchSet.restore` it.

    Raises :class:`CompatibilityError` where NeMo-RL has no function of these names.
    """
    from megatron_wlb.runtime.trainer.given_model import share

    patches = PatchSet()
    core: list[Any] = []

    def get_model(theirs: Callable[..., Any], *given: Any, **named: Any) -> Any:
        chunks = theirs(*given, **named)
        if not core:  # the policy is first; a later one generates, or gives a reference's weights
            core.append(share(chunks))
        return chunks

    patches.wrap(f"{FOLDER}.setup", "get_model", get_model)
    patches.wrap(f"{FOLDER}.data", "process_microbatch", partial(_processed, core))
    for name, hook in _HOOKS.items():
        patches.wrap(f"{FOLDER}.train", name, hook)
    return patches


def pack_shared(*, pp_size: int = 1, cost: Cost | str = REFERENCE_COST) -> PatchSet:
    """Lets NeMo-RL's policies pack samples that begin alike together, by what runs of them.

    Not where NeMo-RL packs by lengths alone, as over its data plane. ``pp_size`` are stages of the
    pipeline that runs them; ``cost`` is as :func:`.plan_batch` has it. The result can
    :meth:`~.PatchSet.restore` what it replaces.

    Raises :class:`CompatibilityError` where NeMo-RL has no function of these names.
    """
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.policy.lm_policy import Policy

    theirs = BatchedDataDict.shard_by_batch_size

    def shard_by_batch_size(self: Any, shards: int, *given: Any, **named: Any) -> Any:
        packing = named.get("sequence_packing_args")
        if packing is None:
            return theirs(self, shards, *given, **named)
        rows = self[packing["input_key"]], self[packing["input_lengths_key"]]
        tokens = [ids[: int(length)].cpu().numpy() for ids, length in zip(*rows, strict=True)]
        layout = Parallelism(pp_size=pp_size, dp_size=shards)
        first = 0  # of the samples that are packed next

        def pack(sequence_lengths: list[int]) -> list[list[int]]:
            nonlocal first
            own = tokens[first : first + len(sequence_lengths)]
            first += len(own)
            ranks = shared_ranks(own, packing["max_tokens_per_microbatch"], layout, cost)
            return [part for parts in zip(*ranks, strict=True) for part in parts]

        packer = SimpleNamespace(pack=pack)
        with PatchSet() as own:
            own.replace("nemo_rl.distributed.batched_data_dict", "get_packer", lambda **_: packer)
            return theirs(self, shards, *given, **named)

    def of_policies(shard: Callable[..., Any]) -> Callable[..., Any]:
        """A policy's own batches alone: critics and generation have the same function."""

        def sharded(self: Any, *given: Any, **named: Any) -> Any:
            with PatchSet() as packed:
                packed.replace(BatchedDataDict, "shard_by_batch_size", shard_by_batch_size)
                return shard(self, *given, **named)

        return sharded

    patches = PatchSet()
    for name in "_shard_for_logprob", "_shard_for_train":
        patches.replace(Policy, name, of_policies(getattr(Policy, name)))
    return patches


def _refuse(reasons: Mapping[str, object]) -> None:
    refuse_sharing(reasons, LEFT_OUT, CompatibilityError, " in NeMo-RL")


def _processed(
    core: list[Any], theirs: Callable[..., Any], data_dict: Any, *given: Any, **named: Any
) -> Any:
    """NeMo-RL's micro-batch, with the rows that run.

    :class:`.SharedSamples` are in place of the padded ``cu_seqlens``, which losses are given.
    """
    import torch

    from megatron_wlb.runtime.trainer.given_model import SharedSamples

    made = theirs(data_dict, *given, **named)
    refused = {
        "sequence_packing.enabled=false": made.cu_seqlens_padded is None,
        "pictures": len(data_dict.get_multimodal_dict(as_tensors=True)),
        "router replay": made.routed_experts is not None,
        "a mask of multi-token prediction": made.mtp_loss_mask is not None,
        "a model that packs samples itself": made.attention_mask is not None,
    }
    _refuse(refused)
    lengths = data_dict[named["seq_length_key"]].tolist()
    samples = [row[:n] for row, n in zip(data_dict["input_ids"], lengths, strict=True)]
    known = SharedSamples.of(samples, core[0])
    params: Any = known.params
    ends = torch.tensor([0, *lengths], device=known.tokens.device).cumsum(0)
    return replace(
        made,
        input_ids=known.tokens,
        input_ids_cp_sharded=known.tokens,
        position_ids=known.position_ids,
        packed_seq_params=replace(params, cu_seqlens_q=ends, cu_seqlens_q_padded=known),
        cu_seqlens_padded=known,
    )


def _loss(theirs: Callable[..., Any], **given: Any) -> Any:
    """NeMo-RL's loss of all samples of a micro-batch at once, of their log-probabilities."""
    from nemo_rl.algorithms import loss

    prepare = given.pop("prepare_fn")
    options: dict[str, Any] = getattr(prepare, "keywords", {})
    known = loss.prepare_loss_input, loss.prepare_packed_loss_input
    _refuse({"a prepare_fn of one's own": getattr(prepare, "func", None) not in known})
    prepared = partial(
        _prepared,
        sampling_params=options.get("sampling_params"),
        chunk_size=options.get("chunk_size"),
    )
    return loss.SequencePackingFusionLossWrapper(prepare_fn=prepared, **given)


def _prepared(
    *,
    logits: Any,
    data: Any,
    loss_fn: Any,
    cu_seqlens_q_padded: Any,
    vocab_parallel_rank: int,
    vocab_parallel_group: Any,
    sampling_params: Any,
    chunk_size: int | None,
    **_: Any,
) -> tuple[dict[str, Any], Any]:
    """What a loss of log-probabilities takes, ``[samples, length - 1]``, and its data."""
    from nemo_rl.algorithms.loss.interfaces import LossInputType
    from nemo_rl.distributed.model_utils import from_parallel_logits_to_logprobs_packed_sequences

    _refuse(
        {
            "a loss of logits": loss_fn.input_type != LossInputType.LOGPROB,
            "a draft": "student_logits" in data,
            "pairs, which lie one behind another": type(loss_fn).__name__ == "DPOLossFn",
        }
    )
    vocabulary = logits.shape[-1]
    log_probs = _log_probs(
        from_parallel_logits_to_logprobs_packed_sequences,
        logits if chunk_size is not None else logits.float(),
        cu_seqlens_padded=cu_seqlens_q_padded,
        unpacked_seqlen=data["input_ids"].shape[1],
        vocab_start_index=vocab_parallel_rank * vocabulary,
        vocab_end_index=(vocab_parallel_rank + 1) * vocabulary,
        group=vocab_parallel_group,
        chunk_size=chunk_size,
        sampling_params=sampling_params,
    )
    return {"next_token_logprobs": log_probs}, data


def _log_probs(
    theirs: Callable[..., Any],
    vocab_parallel_logits: Any,
    *,
    cu_seqlens_padded: Any,
    unpacked_seqlen: int,
    sampling_params: Any = None,
    target: Any = None,
    **named: Any,
) -> Any:
    """``[1, T/CP, V/TP] -> [samples, unpacked_seqlen - 1]``; 0 behind a sample's last token.

    NeMo-RL's function computes all rows of this rank as one sample of a token more, which has no
    row.
    """
    import torch
    from nemo_rl.algorithms.logits_sampling_utils import need_top_k_or_top_p_filtering

    known = cu_seqlens_padded
    _refuse({"top-k or top-p sampling": need_top_k_or_top_p_filtering(sampling_params)})
    num_rows = known.tokens.shape[1]
    rows = theirs(
        vocab_parallel_logits,
        target=known.targets,
        cu_seqlens_padded=torch.tensor([0, num_rows + 1]),
        unpacked_seqlen=num_rows + 1,
        sampling_params=sampling_params,
        target_is_pre_rolled=True,
        **named | {"cp_group": None},
    )
    found = [
        torch.nn.functional.pad(own[:-1], (0, unpacked_seqlen - len(own)))
        for own in torch.split(known.of_samples(rows, summed=True), known.lengths)
    ]
    return torch.stack(found)


def _forward(theirs: Callable[..., Any], **given: Any) -> Any:
    """NeMo-RL's call of the model, which gives logits."""
    fused = given.get("use_fused_linear_logprobs")
    _refuse({"use_fused_linear_logprobs": fused and "its labels follow each other row by row"})
    return theirs(**given)


def _top_k(*_: Any, **__: Any) -> None:
    _refuse({"a teacher's top-k logits": True})


_HOOKS: dict[str, Callable[..., Any]] = {
    "SequencePackingLossWrapper": _loss,
    "SequencePackingFusionLossWrapper": _loss,
    "from_parallel_logits_to_logprobs_packed_sequences": _log_probs,
    "distributed_vocab_topk": _top_k,
    "model_forward": _forward,
}
"""What NeMo-RL's forward step calls, and what stands in for it."""

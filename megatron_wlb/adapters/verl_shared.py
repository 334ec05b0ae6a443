"""verl's Megatron engine computes what samples begin alike with once.

Name this module in verl's configuration, and each worker imports it before it builds a model.
Processes without Megatron import it, too, and nothing happens there::

    actor_rollout_ref.model.external_lib=megatron_wlb.adapters.verl_shared

Losses, rewards and log-probabilities stay verl's own: it takes back what the model gives for each
token of each sample. Its micro-batches are planned by what runs: of that one has at most
``max_token_len_per_gpu`` tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_wlb.adapters.verl import rearrange_micro_batches
from megatron_wlb.errors import CompatibilityError
from megatron_wlb.planning.balance.trees import refuse_sharing
from megatron_wlb.runtime.compat.patching import PatchSet

LEFT_OUT = "set it otherwise, or leave out megatron_wlb.adapters.verl_shared"
ENGINE = "verl.workers.engine.megatron.transformer_impl"


def install() -> PatchSet:
    """Replaces what verl's engine calls; the result can :meth:`~.PatchSet.restore` it.

    Raises :class:`CompatibilityError` where verl has no function of these names.
    """
    from megatron_wlb.runtime.trainer.given_model import share

    patches = PatchSet()
    engine = importlib.import_module(ENGINE).MegatronEngine
    theirs = engine._build_megatron_module
    core: list[Any] = []

    def _build_megatron_module(self: Any) -> Any:
        fused = self.engine_config.use_fused_kernels
        refuse_sharing({"use_fused_kernels": fused}, LEFT_OUT, CompatibilityError, " in verl")
        chunks = theirs(self)
        core[:] = [share(chunks)]
        return chunks

    def forward_of(check: Callable[..., Any], hf_config: Any) -> Callable[..., Any]:
        check(hf_config)
        return forward

    def micro_batches(theirs: Callable[..., Any], *given: Any, **named: Any) -> Any:
        pp_size = core[0].pipeline_model_parallel_size
        ours = partial(rearrange_micro_batches, shared=True, pp_size=pp_size)
        with PatchSet() as packing:  # of this call alone: engines beside do not share
            packing.replace("verl.workers.engine.utils", "rearrange_micro_batches", ours)
            return theirs(*given, **named)

    patches.replace(engine, "_build_megatron_module", _build_megatron_module)
    patches.wrap("verl.models.mcore", "get_mcore_engine_forward_fn", forward_of)
    patches.wrap(ENGINE, "prepare_micro_batches", micro_batches)
    return patches


def forward(
    model: Any,
    input_ids: Any,
    multi_modal_inputs: dict[str, Any],
    logits_processor: Any = None,
    logits_processor_args: dict[str, Any] | None = None,
    value_model: bool = False,
    vision_model: bool = False,
    pad_token_id: int | None = None,
    data_format: str = "thd",
    **more: Any,
) -> Any:
    """Stands in for verl's ``gptmodel_forward_model_engine``, whose parameters and result it has.

    ``input_ids`` are nested, ``[samples, length]``. On the last stage it gives nested tensors of
    their form, of each output of ``logits_processor``.

    Raises :class:`CompatibilityError` for what samples cannot share.
    """
    import torch
    from verl.utils.megatron_utils import unwrap_model

    from megatron_wlb.runtime.trainer.given_model import SharedSamples

    of_teachers = getattr(logits_processor, "keywords", {}).get("distillation_use_topk", False)
    refused = {
        "pictures": vision_model or bool(multi_modal_inputs),
        "use_remove_padding=False": data_format != "thd",
        "distillation of top-k logits": of_teachers,
        # The layout over context-parallel ranks is that of kernels which are not called.
        **{name: bool(value) for name, value in more.items() if name != "cp_layout"},
    }
    refuse_sharing(refused, LEFT_OUT, CompatibilityError, " in verl")
    gpt = unwrap_model(model)
    known = SharedSamples.of(input_ids.unbind(), gpt.config)
    args = {  # on all stages, so that all refuse what cannot be shared
        name: known.targets if name == "label" else known.of_rows(value.values())
        for name, value in (logits_processor_args or {}).items()
        if name not in ("loss_mask", "response_attention_mask")
    }
    out = model(
        input_ids=known.tokens,
        attention_mask=None,
        position_ids=known.position_ids,
        packed_seq_params=known.params,
    )
    if not gpt.post_process:
        return out

    def nested(rows: torch.Tensor) -> torch.Tensor:
        values = known.of_samples(rows)
        return torch.nested.nested_tensor_from_jagged(values, input_ids.offsets())

    if logits_processor is None:
        return nested(out.squeeze(-1) if value_model else out)
    return {name: nested(rows) for name, rows in logits_processor(out, **args).items()}


# verl's configuration is made in processes without a model, too, where there may be no Megatron.
if importlib.import_module("verl.workers.engine").MegatronEngine is not None:
    install()

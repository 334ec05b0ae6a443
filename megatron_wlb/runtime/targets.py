"""The names of megatron-core that this package builds on, with the parameters it counts on.

Most are not public: a release may change them without a word, and some changes would not fail but
compute something else. So they are checked once, before anything is built.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping

from megatron_wlb.errors import CompatibilityError

_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_SCHEDULE = (
    "forward_step_func data_iterator model num_microbatches seq_length micro_batch_size "
    "forward_only p2p_communicator pg_collection"
)

TARGETS: dict[str, dict[str, str]] = {
    # Version -> "module:name" -> parameters that must be there.
    "0.16.1": {
        f"{_P2P}:P2PCommunicator._communicate_shapes": (
            "self tensor_send_next tensor_send_prev recv_prev recv_next"
        ),
        f"{_P2P}:P2PCommunicator._communicate": (
            "self tensor_send_next tensor_send_prev recv_prev recv_next tensor_shape wait_on_reqs"
        ),
        f"{_SCHEDULES}:forward_backward_no_pipelining": _SCHEDULE,
        f"{_SCHEDULES}:forward_backward_pipelining_without_interleaving": _SCHEDULE,
        f"{_SCHEDULES}:forward_backward_pipelining_with_interleaving": _SCHEDULE,
        f"{_SCHEDULES}:get_schedule_table": (
            "num_microbatches num_model_chunks microbatch_group_size_per_vp_stage"
        ),
        "megatron.core.models.common.embeddings.rotary_pos_embedding:"
        "RotaryEmbedding.get_rotary_seq_len": (
            "self inference_context transformer transformer_input transformer_config "
            "packed_seq_params"
        ),
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward": (
            "self query key value attention_mask attn_mask_type attention_bias packed_seq_params"
        ),
        "megatron.core.distributed:finalize_model_grads": "model num_tokens pg_collection",
    },
}


def check(version: str | None = None) -> None:
    """Checks the installed megatron-core against the table.

    Raises:
        CompatibilityError: another version than the tested ones, or a name that is missing or
            takes other parameters.
    """
    if version is None:
        version = str(importlib.import_module("megatron.core").__version__)
    if version not in TARGETS:
        raise CompatibilityError(
            f"megatron-core {version} is installed; megatron-wlb is tested with "
            f"{', '.join(TARGETS)} only: install that (see constraints.txt)"
        )
    check_targets(version, TARGETS[version])


def check_targets(version: str, targets: Mapping[str, str]) -> None:
    """Checks names and parameters; ``version`` is for the message."""
    for target, expected in targets.items():
        module, _, path = target.partition(":")
        value: object = importlib.import_module(module)
        for name in path.split("."):
            value = getattr(value, name, None)
        if not callable(value):
            raise CompatibilityError(f"megatron-core {version} has no {target}; reinstall it")
        found = list(inspect.signature(inspect.unwrap(value)).parameters)
        missing = [p for p in expected.split() if p not in found]
        if missing:
            raise CompatibilityError(
                f"megatron-core {version}: {target} lacks the parameter {missing[0]}; it has "
                f"been changed: reinstall it"
            )

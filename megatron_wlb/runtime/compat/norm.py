"""Layer norms for the local layer spec that work with sequence parallelism.

Megatron's ``WrappedTorchNorm`` refuses sequence parallelism because torch's norms do not mark
their parameters; marked, Megatron all-reduces their gradients over TP
(``finalize_model_grads._allreduce_non_tensor_model_parallel_grads``), which is all it takes.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_wlb.errors import ConfigError


class TorchNorm:
    """Builds torch's ``LayerNorm`` or ``RMSNorm`` with ``.sequence_parallel`` parameters.

    A class, because Megatron's ``build_module`` does not call plain functions.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> torch.nn.Module:
        norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in norms:
            raise ConfigError(
                f"--normalization {config.normalization} is not supported with the local layer "
                f"spec; choose one of {', '.join(norms)}"
            )
        norm: torch.nn.Module = norms[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

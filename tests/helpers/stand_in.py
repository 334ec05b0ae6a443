"""What the script that stands in for Megatron-LM's makes of its arguments, in a process apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


def _script() -> Any:
    """Raises :class:`CompatibilityError` on megatron-core 0.18."""
    from megatron_wlb.runtime.megatron_lm import cpu_loop

    cpu_loop.install()
    from megatron_wlb import pretrain_gpt

    return pretrain_gpt


def settings_left_out(mocks: bool = True) -> set[str]:
    """Settings of Megatron's data sets that it does not give, without a corpus."""
    script, given = _script(), mock.Mock()
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    args = mock.Mock(**dict.fromkeys(script.LEFT_OUT), mock_data=mocks)
    with mock.patch.multiple(
        script,
        get_args=lambda: args,
        get_tokenizer=mock.Mock(),
        get_blend_and_blend_per_split=lambda _: (None, None),
        BlendedMegatronDatasetBuilder=mock.Mock(),
        GPTDatasetConfig=given,
    ):
        script.datasets([1, 1, 1])
    known = {field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init}
    return known - {*given.call_args.kwargs}


def gives_masks() -> bool:
    """Whether the model gets a mask that the windows have."""
    script, model = _script(), mock.Mock()
    windows = {name: torch.zeros(1, 8) for name in script.INPUTS}
    windows |= {"attention_mask": torch.ones(1, 1, 8, 8), "dataset_id": torch.zeros(1)}
    with (
        mock.patch.object(script, "parallel_state"),
        mock.patch.object(script, "get_batch_on_this_cp_rank", lambda batch, **_: batch),
    ):
        script.forward_step(iter([windows]), model)
    return bool(torch.equal(model.call_args.args[2], windows["attention_mask"]))


def embedding_ranks(pipeline: list[int], untied: bool, further: Sequence[int]) -> list[int]:
    """Which ranks share the word embedding, where ``further`` predict more tokens."""
    script = _script()
    with mock.patch.multiple(
        script,
        get_args=lambda: SimpleNamespace(untie_embeddings_and_output_weights=untied),
        core_transformer_config_from_args=mock.Mock(),
        get_mtp_ranks=lambda *_: further,
    ):
        ranks: list[int] = script.embedding_ranks(pipeline)
        return ranks

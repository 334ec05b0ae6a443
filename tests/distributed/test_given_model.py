"""A model that another trainer built gives samples that begin alike what each gives alone.

Stock Megatron builds the model and runs its schedule. Each sample alone runs by stock attention
under a causal mask, in the same layout but on one context-parallel rank; what is taught runs them
together. Log-probabilities and every gradient are the same.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers.gloo import GlooPool

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.planning.balance.trees import part_of
from megatron_wlb.settings.config import Config
from megatron_wlb.settings.megatron import ParallelConfig

VOCAB_SIZE = 64
PP, CP, TP = (
    {f"{name}_parallel_size": 2} for name in ("pipeline_model", "context", "tensor_model")
)
TP_SP = TP | {"sequence_parallel": True}
LAYOUTS = {"alone": {}, "tp2_sp": TP_SP, "pp2": PP, "cp2": CP, "cp2_tp2_sp": CP | TP_SP}


def samples() -> list[list[Any]]:
    """Micro-batches: a tree of three levels with equal ones and beginnings, and unlike samples."""
    random = np.random.RandomState(0)

    def more(length: int, *before: Any) -> Any:
        return np.concatenate([*before, random.randint(0, VOCAB_SIZE, length)])

    prompt = more(90)
    turn = more(75, prompt)
    tree = [more(1, turn), more(40, turn), more(33, prompt), turn, turn, more(64, prompt)]
    return [[*tree, more(50)], [more(9), more(120)], [more(20, prompt), more(31, prompt)]]


def apart(*given: Any) -> Any:
    """Rows of samples that see nothing of what they share."""
    spans, sharing = part_of(*given)
    return spans, sharing._replace(above=((),) * len(spans))


def gradients_and_log_probs(
    layout: dict[str, Any], how: str, changed: Any = ()
) -> tuple[dict[str, Any], list[Any]]:
    """Of each parameter of this rank, and on the last stage of each sample: ``alone``, also by a
    model that is ``taught``, or ``together``, also with ranks' losses ``summed``; or, which is
    wrong, ``apart`` from what is shared.
    """
    import torch
    from helpers.stock_gpt import stock_gpt
    from megatron.core import mpu, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_wlb.runtime.trainer import distributed, given_model
    from megatron_wlb.runtime.trainer.given_model import SharedSamples, share

    distributed.initialize_groups(Config(parallel=ParallelConfig(**layout)))
    cp_size = mpu.get_context_parallel_world_size()
    together = how not in ("alone", "taught")
    known = {"sequence_parallel": "sequence_parallel" in layout, **dict(changed)}
    gpt = stock_gpt(variable_seq_lengths=not together, **known)
    core, names = gpt.config, list(gpt.state_dict())
    if how != "alone":
        share([gpt])
    assert list(gpt.state_dict()) == names
    if how == "taught":  # and has run shared rows before
        few = SharedSamples.of([torch.from_numpy(ids) for ids in samples()[0]], core)
        gpt(few.tokens, None, None, packed_seq_params=few.params)
    found: list[Any] = []

    def log_probs(logits: Any, targets: Any) -> Any:
        losses = tensor_parallel.vocab_parallel_cross_entropy(logits.transpose(0, 1), targets.mT)
        return -losses.mT

    def weighed(own: Any) -> Any:
        found.append(own.detach().numpy())
        return -(own * torch.linspace(0.5, 1.5, len(own))).sum()

    def forward_step(batches: Any, model: Any) -> tuple[Any, Any]:
        batch = [torch.from_numpy(ids) for ids in next(batches)]
        if not together:
            (ids,) = batch
            mask = torch.ones(len(ids), len(ids)).tril() < 0.5
            padded = torch.nn.functional.pad(ids, (0, -len(ids) % 2))
            mask = torch.nn.functional.pad(mask, (0, -len(ids) % 2) * 2, value=True)

            def loss(logits: Any) -> tuple[Any, dict[str, Any]]:
                own = log_probs(logits[:, : len(ids) - 1], ids[None, 1:])[0]
                return weighed(own), {}

            positions = torch.arange(len(padded))
            return model(padded[None], positions[None], mask[None, None]), loss
        with mock.patch.object(given_model, "part_of", apart if how == "apart" else part_of):
            known = SharedSamples.of(batch, core)

        def loss(logits: Any) -> tuple[Any, dict[str, Any]]:
            own = log_probs(logits, known.targets)
            every = known.of_samples(own, summed=how == "summed").split(known.lengths)
            return sum(weighed(own[:-1]) for own in every), {}

        tokens = known.of_rows(torch.cat(batch))
        assert torch.equal(tokens, known.tokens)
        if len(known.rows.unique()) < len(known.rows):
            with pytest.raises(CompatibilityError, match="unlike values of its tokens"):
                known.of_rows(torch.arange(len(known.rows)))
        return model(tokens, None, None, packed_seq_params=known.params), loss

    batches = samples() if together else [[ids] for batch in samples() for ids in batch]
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(batches), model=[gpt],
        num_microbatches=len(batches), seq_length=512, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    for parameter in gpt.parameters():
        if getattr(parameter, "sequence_parallel", False):  # as Megatron's finalize_model_grads
            group = mpu.get_tensor_model_parallel_group()
            torch.distributed.all_reduce(parameter.grad, group=group)
        if cp_size > 1:
            torch.distributed.all_reduce(parameter.grad, group=mpu.get_context_parallel_group())
    # Megatron divides by the one, and multiplies by the other.
    scale = len(batches) / cp_size / (cp_size if how == "summed" else 1)
    return {n: p.grad.numpy() * scale for n, p in gpt.named_parameters()}, found


def assert_alike(wanted_ranks: list[Any], ranks: list[Any]) -> int:
    """So many samples' log-probabilities were compared."""
    number = 0
    for (wanted, wanted_probs), (got, got_probs) in zip(wanted_ranks, ranks, strict=True):
        assert wanted.keys() == got.keys() and wanted
        for name, gradient in wanted.items():
            scale = np.abs(gradient).max()
            np.testing.assert_allclose(got[name], gradient, atol=3e-6 * scale, err_msg=name)
        for one, other in zip(wanted_probs, got_probs, strict=True):
            np.testing.assert_allclose(other, one, atol=2e-6)
        number += len(wanted_probs)
    return number


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_samples_together_are_what_each_is_alone(gloo: GlooPool, layout: dict[str, Any]) -> None:
    own = {name: size for name, size in layout.items() if name not in CP}
    world_size, num_alone = (2 ** list(each.values()).count(2) for each in (layout, own))
    cp_size = world_size // num_alone
    alone = gloo.run(num_alone, gradients_and_log_probs, own, "alone")
    alone *= cp_size  # tensor-parallel ranks are neighbours
    for how in "together", *["summed"] * (cp_size > 1), *["taught"] * (world_size == 1):
        found = gloo.run(world_size, gradients_and_log_probs, layout, how)
        assert assert_alike(alone, found) >= 11
    # Without what they share they are other samples.
    broken = gloo.run(world_size, gradients_and_log_probs, layout, "apart")
    every = [[one for _, own in ranks for one in own] for ranks in (alone, broken)]
    assert max(np.abs(one - other).max() for one, other in zip(*every, strict=True)) > 1e-2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attention_dropout": 0.1}, "cannot share prefixes with dropout: one draw"),
        ({"window_size": (3, 1)}, r"window_size is \(3, 1\)"),
        ({"core_attention": "CappedAttention"}, "has the core attention megatron.*CappedAttention"),
        ({"core_attention": "TEDotProductAttention", "core_scale": 0.5}, "with scale 0.5; samples"),
    ],
)
def test_models_that_cannot_share_are_refused(
    gloo: GlooPool, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(CompatibilityError, match=said):
        gloo.run(1, gradients_and_log_probs, {}, "together", changed)


def test_other_models_and_adapters_that_drop_are_refused_and_fp8_is_minded() -> None:
    import torch
    from megatron.core.enums import Fp8Recipe

    from megatron_wlb.runtime.trainer.given_model import _drops, _fp8_rows, share

    with pytest.raises(CompatibilityError, match="1 model chunks have 0 of Megatron's GPTModel"):
        share([torch.nn.Linear(1, 1)])
    assert _drops(torch.nn.Sequential(torch.nn.Dropout(0.1)))
    assert not _drops(torch.nn.Sequential(torch.nn.Dropout(0.0)))
    settings = {"fp8_recipe": Fp8Recipe.blockwise, "tensor_model_parallel_size": 2}
    for fp8, spread, rows in ("", True, 1), ("e4m3", False, 16), ("e4m3", True, 128):
        assert _fp8_rows(SimpleNamespace(fp8=fp8, sequence_parallel=spread, **settings)) == rows

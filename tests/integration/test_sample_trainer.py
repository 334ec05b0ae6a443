"""``SampleTrainer``: in layouts whose replicas meet in each pass, and from what it saved."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rank_runs import finish, start

MODEL = {
    "wlb_device": "cpu", "wlb_hardware": "cpu", "num_layers": 2, "hidden_size": 32,
    "num_attention_heads": 4, "seq_length": 16, "vocab_size": 32, "num_experts": 4,
    "moe_router_topk": 2, "disable_bias_linear": True, "wlb_cost": "analytic",
    "max_position_embeddings": 64,
}  # fmt: skip
HEADS = {
    "swiglu": True, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_num_heads": 2,
    "mamba_head_dim": 8, "mamba_num_groups": 1,
}  # fmt: skip
WHOLE = {"wlb_packing": "hold", "wlb_max_tokens": 64}
SLICES = {"wlb_packing": "slim", "wlb_max_tokens": 16}


def train(flags: list[str]) -> int:
    """Trains a step of samples, of which one is much longer than the others."""
    from megatron_wlb import SampleTrainer

    trainer = SampleTrainer(flags)
    random = np.random.default_rng(0)
    batch = trainer.batch([random.integers(0, 32, length) for length in (61, 9, 7, 5, 5, 4)])
    before = trainer.iteration
    loss, _ = trainer.step(batch, lambda log_probs, _targets: -log_probs)
    if trainer.model.groups.dp.rank() == 0 and trainer.model.groups.pp.rank() == 0:
        sys.stdout.write(f"chains {sorted(set(batch.plan.chains))}, loss {loss:.4f}\n")
        sys.stdout.write(f"{before} steps before\n")
    if trainer.config.checkpoint.save is not None:
        trainer.save()
    trainer.close()
    return 0


def train_alike(flags: list[str], *, shared: bool) -> int:
    """Trains a step of answers to two prompts: each whole, and what they share once."""
    from megatron_wlb import SampleTrainer

    trainer = SampleTrainer(flags)
    random = np.random.default_rng(0)
    samples = [
        np.concatenate([prompt, random.integers(0, 32, length)])
        for prompt in random.integers(0, 32, (2, 90))
        for length in (20, 30, 4, 9)
    ]
    weights = [np.repeat([0.0, 0.5], [89, len(sample) - 89]) for sample in samples]
    batches = [trainer.batch(samples, weights, shared=each) for each in (False, True)]
    pairs = zip(*map(trainer.log_probs, batches), strict=True)
    assert all(np.flatnonzero(b).min() == 89 and np.allclose(a, b, atol=1e-5) for a, b in pairs)
    loss, norm = trainer.step(batches[shared], lambda log_probs, _: -log_probs)
    if trainer.model.groups.dp.rank() == 0 and trainer.model.groups.pp.rank() == 0:
        numbers = [batch.plan.num_tokens for batch in batches]
        trees = {m.sharing.tree.name for m in batches[1].plan if m.sharing.tree}
        sys.stdout.write(f"tokens {numbers}, loss {loss:.5f}, norm {norm:.4f}, ")
        sys.stdout.write(f"trees {len(trees)}\n")
    trainer.close()
    return 0


TREES = {"wlb_packing": "slim", "wlb_max_tokens": 128, "wlb_cost": "analytic"}
LONG = {"wlb_max_tokens": 400, "max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, {}),
        (2, {"pipeline_model_parallel_size": 2}),
        (4, {"context_parallel_size": 2, "expert_model_parallel_size": 2}),
        (2, {"multi_latent_attention": True, "kv_lora_rank": 8, "position_embedding_type": "rope"}),
        (1, {"mtp_num_layers": 2}),
        (2, {"pipeline_model_parallel_size": 2, "hybrid_layer_pattern": "GEM|*E", **HEADS}),
        (2, TREES | {"pipeline_model_parallel_size": 2}),
        (4, TREES | {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}),
        (
            2,
            TREES
            | {"pipeline_model_parallel_size": 2, "num_layers": 4, "wlb_memory_gib": 0.1}
            | {"num_virtual_stages_per_pipeline_rank": 2},
        ),
    ],
    ids=[
        "one process",
        "PP",
        "CP, EP",
        "latents",
        "prediction",
        "states, PP",
        "trees",
        "trees, CP",
        "trees, VPP",
    ],
)
def test_samples_that_share_train_what_whole_ones_do(
    tmp_path: Path, ranks: int, layout: dict
) -> None:
    said = []
    for shared in (False, True):
        program = partial(train_alike, shared=shared)
        run = finish(start(tmp_path, ranks, MODEL | WHOLE | LONG | layout, program=program))
        said += [line for line in run.output.splitlines() if line.startswith("tokens")]
    assert said[0] == said[1]
    whole, less = json.loads(said[0].split("tokens ")[1].split(", loss")[0])
    assert less < 0.5 * whole
    assert ("trees 2" in said[1]) == ("wlb_packing" in layout)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"expert_model_parallel_size": 2}),
        (
            4,
            {
                "pipeline_model_parallel_size": 2,
                "moe_router_load_balancing_type": "global_aux_loss",
                "moe_aux_loss_coeff": 0.1,
            },
        ),
        (2, {"expert_model_parallel_size": 2, "hybrid_layer_pattern": "GEM*", **HEADS}),
    ],
    ids=["experts over replicas", "a loss over replicas", "states"],
)
def test_slices_of_replicas_that_meet_run_alike(tmp_path: Path, ranks: int, layout: dict) -> None:
    said = []
    for packing in (WHOLE, SLICES):
        run = finish(start(tmp_path, ranks, MODEL | layout | packing, program=train))
        said += [line for line in run.output.splitlines() if line.startswith("chains")]
    whole, sliced = (line.split(", loss ") for line in said)
    assert (whole[0], sliced[0]) == ("chains []", "chains [(4,)]")
    assert sliced[1] == whole[1]


def test_trainer_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    flags = MODEL | WHOLE | {"save": "ck", "load": "ck"}
    for before in range(2):
        said = finish(start(tmp_path, 1, flags, program=train)).output
        assert f"{before} steps before" in said
    assert {path.name for path in (tmp_path / "ck").glob("iter_*")} == {
        "iter_0000001", "iter_0000002"
    }  # fmt: skip

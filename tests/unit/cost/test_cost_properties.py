"""What the modelled time and memory of every kind of model keep to, in every layout.

That the counts are those of Megatron's built models is in ``tests/distributed/test_memory.py``.
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron_wlb.cost.schedule.order import sliced
from megatron_wlb.cost.slices import Slice, Unit, UnitTable
from megatron_wlb.cost.step_costs import StageCosts
from megatron_wlb.planning.from_config import run_of
from megatron_wlb.planning.run import Run
from megatron_wlb.settings.command_line import parse

SIZES = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --ffn-hidden-size 640 --bf16 "
    "--seq-length 4096 --global-batch-size 16 --wlb-hardware h100-sxm"
)
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96"
MODELS = {
    "gpt": "--position-embedding-type learned_absolute --hidden-dropout 0.1",
    "llama": f"{LLAMA} --group-query-attention --num-query-groups 4 "
    "--untie-embeddings-and-output-weights",
    "latents": f"{LLAMA} --multi-latent-attention --kv-lora-rank 64 --qk-head-dim 32 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 28",
    "experts": f"{LLAMA} {EXPERTS} --moe-layer-freq [0]*3+[1]*5",
    "prediction": f"{LLAMA} --mtp-num-layers 2",
    "windows": f"{LLAMA} --window-size 99,0 --window-attn-skip-freq 3",
    "fp8": f"{LLAMA} --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16",
}
RECOMPUTED = {
    "": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
}
PP2 = "--pipeline-model-parallel-size 2"
PIPELINES = {
    "pp4": "--pipeline-model-parallel-size 4",
    "vpp2": f"{PP2} --num-virtual-stages-per-pipeline-rank 2",
    "uneven": f"{PP2} --decoder-last-pipeline-num-layers 3",
}
LENGTHS = [2000, 40, 7]


def run(model: str, flags: str = "", dp_size: int = 1) -> Run:
    return run_of(parse([*SIZES.split(), *MODELS[model].split(), *flags.split()]), 1024, dp_size)


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("model", MODELS)
def test_stages_and_slices_take_what_the_model_takes(model: str, recompute: str) -> None:
    """However many stages there are, and whatever they hold; a document is its slices."""
    tp = f"--tensor-model-parallel-size 2 {RECOMPUTED[recompute]}"
    alone_us = run(model, tp).cost.work(LENGTHS)
    for layout in PIPELINES.values():
        one = run(model, f"{tp} {layout}")
        stages = StageCosts(one.model.stage_costs())
        times_us = stages.times_us([LENGTHS])
        assert len(times_us[0]) == one.parallelism.num_stages and (times_us > 0).all()
        whole = one.cost.work(LENGTHS)
        assert times_us.sum() == pytest.approx(whole.total_us)
        if recompute != "block":  # of which each stage recomputes its first layer
            assert whole.forward_us == pytest.approx(alone_us.forward_us)
            assert whole.backward_us == pytest.approx(alone_us.backward_us)
        cut = stages.times_us([[700], [1300, 40, 7]], None, UnitTable.starting([0, 700]))
        twice = one.cost.total_us([])  # what each micro-batch takes
        assert cut.sum() == pytest.approx(whole.total_us + twice)


@pytest.mark.parametrize("flags", [*RECOMPUTED.values(), "--context-parallel-size 2", PP2])
@pytest.mark.parametrize("model", MODELS)
def test_more_tokens_take_more_time_and_memory(model: str, flags: str) -> None:
    one = run(model, flags)
    lengths = [16, 64, 512, 4096, 8192]
    documents_us = [one.cost.document_us(n) for n in lengths]
    assert documents_us == sorted(documents_us) and documents_us[0] > 0
    assert one.cost.total_us([8192]) > one.cost.total_us([4096] * 2)
    for rank in range(one.parallelism.pp_size):
        peaks = [one.memory.activation_peak_bytes(rank, [n] * 4) for n in lengths]
        assert peaks == sorted({*peaks})
        assert one.memory.state_bytes(rank).total + peaks[-1] <= one.memory.peak_bytes(
            rank, [8192] * 4
        )


@pytest.mark.parametrize("model", MODELS)
def test_ranks_share_parameters_and_work(model: str) -> None:
    """Norms, routers and learned positions are on each tensor-parallel rank."""
    alone = run(model)
    whole = alone.memory.total_parameters
    ends = alone.shape.head_linear_parameters * (1 + len(alone.shape.predictors))
    for layout in PIPELINES.values():
        memory = run(model, layout).memory
        parts = sum(map(memory.num_parameters, range(memory.parallelism.pp_size)))
        assert whole <= parts <= whole + ends
    shared = run(model, "--tensor-model-parallel-size 4 --sequence-parallel")
    divided = whole - alone.shape.learned_positions * alone.shape.hidden_size
    assert shared.memory.num_parameters(0) == pytest.approx(whole - 0.75 * divided, rel=0.06)
    two, one = run(model, "--context-parallel-size 2").cost, alone.cost
    halves = two.work([4096]).forward_attention_us * 2
    assert halves == pytest.approx(one.work([4096]).forward_attention_us)


@pytest.mark.parametrize("model", MODELS)
def test_recomputing_takes_time_and_saves_memory(model: str) -> None:
    plain, selective, full = (
        run(model, f"{PP2} {RECOMPUTED[name]}") for name in ("", "selective", "full")
    )
    for other in (selective, full):
        ours, theirs = (one.cost.work(LENGTHS) for one in (other, plain))
        assert ours.forward_us == theirs.forward_us
        assert ours.backward_attention_us > theirs.backward_attention_us
        assert other.memory.peak_bytes(0, [4096] * 4) < plain.memory.peak_bytes(0, [4096] * 4)
    again = full.cost.work(LENGTHS)
    assert again.backward_linear_us > plain.cost.work(LENGTHS).backward_linear_us


@pytest.mark.parametrize("flags", ["", RECOMPUTED["full"], "--context-parallel-size 2"])
@pytest.mark.parametrize("model", ["gpt", "llama", "latents", "experts", "windows"])
def test_slices_keep_their_document_until_its_last_one(model: str, flags: str) -> None:
    """Each slice needs no less than the one before it, and in all more than a whole document."""
    memory = run(model, f"{PP2} {flags}").memory
    units = [Unit(1000, Slice(0, at, at + 1000, 4000)) for at in range(0, 4000, 1000)]
    for rank, actions in enumerate(sliced(2, (4,))):
        uses = memory.program_bytes(rank, actions, UnitTable.of(units))
        kept = np.array(uses.kept)
        forward = np.array([action.kind == "F" for action in actions])
        assert (np.diff(kept)[forward[1:]] > 0).all()
        assert kept[-1] == 0

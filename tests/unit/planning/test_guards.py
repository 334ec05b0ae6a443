"""Each guard names value, limit and remedy in one line, and lets good settings pass."""

from __future__ import annotations

from itertools import chain

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning import guards
from megatron_wlb.planning.rules import (
    BATCHES,
    GENERAL,
    LAYOUT,
    RULES,
    Attempt,
    Facts,
    Rule,
)
from megatron_wlb.settings.command_line import parse

PP2_VPP2 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"

LATENT = "--multi-latent-attention"
EXPERTS = "--num-experts 8 --disable-bias-linear"

REFUSED = [
    # Flags, world size, and what the message must say: value, limit, remedy.
    (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --num-layers 6", 8,
        ["8 processes", "TP 2 × CP 1 × PP 3 = 6", "start a multiple of 6"],
    ),
    (
        "--context-parallel-size 4", 6,
        ["6 processes", "TP 1 × CP 4 × PP 1 = 4", "start a multiple of 4"],
    ),
    (
        "--wlb-packing wlb --wlb-queue-thresholds 200 100", 1,
        ["--wlb-queue-thresholds is given", "strictly ascending", "order them"],
    ),
    (
        "--wlb-max-step-tokens 3", 1,
        ["--wlb-max-step-tokens is 3, but", "tokens arrive in a step", "or 0 for no such bound"],
    ),
    (
        "--mock-data --data-path a", 1, ["--mock-data", "--data-path", "leave one of them out"],
    ),
    (
        "--wlb-mock-lengths stdlib --data-path a", 1,
        ["--wlb-mock-lengths is stdlib", "only with --mock-data", "or leave it out"],
    ),
    (
        "--mock-data --wlb-mock-lengths referense", 1,
        ["--wlb-mock-lengths", "unknown distribution referense", "did you mean reference?"],
    ),
    (
        "--wlb-cp-keep-gathered", 1,
        ["--wlb-cp-keep-gathered", "--context-parallel-size of at least 2", "leave it out"],
    ),
    (
        "--wlb-cp-overlap-groups 2 --wlb-packing slim --wlb-dp-merge off", 2,
        ["--wlb-cp-overlap-groups", "or where data-parallel ranks run documents together"],
    ),
    (
        f"{LATENT} --group-query-attention --num-query-groups 2", 1,
        ["--group-query-attention is given", "--multi-latent-attention has no query groups"],
    ),
    (
        f"{LATENT} --position-embedding-type yarn", 1,
        ["--position-embedding-type is yarn", "does not work", "--rope-type rope or yarn"],
    ),
    (f"{LATENT} --qk-pos-emb-head-dim 7", 1, ["--qk-pos-emb-head-dim is 7", "an even one"]),
    (
        f"{LATENT} --v-head-dim 200", 1,
        ["--v-head-dim is 200", "--qk-head-dim + --qk-pos-emb-head-dim = 192", "at most"],
    ),
    (
        f"{LATENT} --kv-lora-rank 33 --tensor-model-parallel-size 2", 2,
        ["--kv-lora-rank + --qk-pos-emb-head-dim is 97", "TP 2", "a multiple of 2"],
    ),
    (
        f"{LATENT} --wlb-cp-overlap-groups 2 --context-parallel-size 2", 2,
        ["--wlb-cp-overlap-groups is 2", "one latent for all heads", "leave it out"],
    ),
    (
        f"{LATENT} --window-size 8,0 --context-parallel-size 2", 2,
        ["--window-size is given", "--context-parallel-size 2", "leave one of them out"],
    ),
    (
        f"{LATENT} --fp8-format hybrid --fp8-recipe tensorwise --context-parallel-size 2", 2,
        ["--fp8-format is hybrid", "--context-parallel-size 2", "leave one of them out"],
    ),
    (
        "--wlb-cp-reduce-in-fp32", 1,
        ["--wlb-cp-reduce-in-fp32 is given", "--context-parallel-size of at least 2"],
    ),
    (f"{LATENT} --rotary-interleaved", 1, ["--rotary-interleaved is given", "--rope-type rope"]),
    (
        f"{LATENT} --q-lora-rank 33 --tensor-model-parallel-size 2", 2,
        ["--q-lora-rank is 33", "TP 2", "a multiple of 2"],
    ),
    (
        "--wlb-yarn-mscale 2", 1,
        ["--wlb-yarn-mscale counts only with --position-embedding-type yarn", "that is rope"],
    ),
    ("--window-size 8", 1, ["--window-size is 8;", "give W,0"]),
    (
        "--mtp-num-layers 1 --position-embedding-type learned_absolute", 1,
        ["--mtp-num-layers is 1", "--position-embedding-type learned_absolute", "use rope or none"],
    ),
    (
        "--mtp-num-layers 1 --window-size 8,0 --window-attn-skip-freq 2", 1,
        ["--mtp-num-layers is 1", "--window-attn-skip-freq 2", "leave that out"],
    ),
    (
        "--mtp-num-layers 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 2", 1,
        ["--mtp-num-layers is 2", "each of its layers", "--recompute-num-layers 1"],
    ),
    (
        "--mtp-num-layers 2 --pipeline-model-parallel-size 2 "
        "--pipeline-model-parallel-layout Ett|ttmL", 2,
        ["layout Ett|ttmL has 1 m", "--mtp-num-layers is 2", "give as many"],
    ),
    ("--window-size 8,8", 1, ["--window-size is 8,8;", "none behind it"]),
    ("--window-attn-skip-freq 2", 1, ["--window-attn-skip-freq", "only with --window-size"]),
    (
        "--window-size 8,0 --window-attn-skip-freq [1,0]", 1,
        ["--window-attn-skip-freq is '[1,0]'", "for each of the 4 layers"],
    ),
    (
        "--wlb-hardware none.yaml", 1,
        ["--wlb-hardware", "none.yaml", "No such file", "give a100 or a800 or cpu", "wlb profile"],
    ),
    (
        "--rotary-seq-len-interpolation-factor 2 --position-embedding-type none", 1,
        ["--rotary-seq-len-interpolation-factor counts only with", "that is none", "leave one"],
    ),
    (
        "--rope-scaling-factor 2", 1,
        ["--rope-scaling-factor is 2.0", "only with --use-rope-scaling"],
    ),
    (
        "--position-embedding-type yarn --rotary-percent 0.5", 1,
        ["--position-embedding-type is yarn", "the whole head", "leave --rotary-interleaved and "],
    ),
    (
        "--pipeline-model-parallel-size 2", 1,
        ["1 processes", "= 2 does not divide", "start a multiple of 2"],
    ),
    (
        "--pipeline-model-parallel-size 8 --num-layers 6", 8,
        ["--pipeline-model-parallel-size is 8", "only 6 layers", "use at most 6"],
    ),
    (
        "--microbatch-group-size-per-virtual-pipeline-stage 3", 1,
        ["-stage is 3", "no virtual stages", "give --num-virtual-stages-per-pipeline-rank"],
    ),
    (
        "--num-virtual-stages-per-pipeline-rank 2", 1,
        ["-rank is 2", "there is no pipeline", "leave it out or use --pipeline-model-parallel-"],
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 1", 2,
        ["--num-virtual-stages-per-pipeline-rank is 1", "use at least 2, or leave it out"],
    ),
    (
        f"{PP2_VPP2} --no-overlap-p2p-communication --wlb-verify-shapes", 2,
        ["--wlb-verify-shapes", "-size 2", "leave one of the flags out"],
    ),
    (
        f"{PP2_VPP2} --num-layers 6", 2,
        ["--num-layers is 6", "PP 2 × VPP 2 = 4", "use a multiple of 4"],
    ),
    (
        "--pipeline-model-parallel-size 3 --num-layers 4", 3,
        ["--num-layers is 4", "PP 3 × VPP 1 = 3", "use a multiple of 3"],
    ),
    (
        "--pipeline-model-parallel-size 3 --num-layers 6 --decoder-last-pipeline-num-layers 3", 3,
        ["--decoder-last-pipeline-num-layers 3 of --num-layers 6 leave 3 layers for 2 other"],
    ),
    (
        "--pipeline-model-parallel-size 4 --num-layers 4 --pipeline-model-parallel-layout "
        "Et||t*3|L", 4,
        ["-layout is Et||t*3|L", "leaves pipeline rank 1 without a layer", "give each rank"],
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers 4 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 2 --pipeline-model-parallel-layout "
        "Et*3|tL", 2,
        ["--recompute-num-layers is 2", "does not divide the 1, 3 layers of", "use a divisor"],
    ),
    (
        "--sequence-parallel", 1,
        ["--sequence-parallel", "-size of at least 2", "leave it out"],
    ),
    (
        "--hidden-size 66 --num-attention-heads 4", 1,
        ["--hidden-size is 66", "--num-attention-heads 4", "give --kv-channels"],
    ),
    (
        "--kv-channels 7", 1,
        ["which is 7", "even head dimension", "change --kv-channels"],
    ),
    (
        "--hidden-size 60 --num-attention-heads 4", 1,
        ["which is 15", "even head dimension", "change --kv-channels or --num-attention-heads"],
    ),
    (
        "--num-attention-heads 3 --kv-channels 8 --tensor-model-parallel-size 2", 2,
        ["--num-attention-heads is 3", "TP 2", "use a multiple of 2"],
    ),
    (
        "--ffn-hidden-size 33 --tensor-model-parallel-size 2", 2,
        ["--ffn-hidden-size is 33", "TP 2", "use a multiple of 2"],
    ),
    (
        "--group-query-attention --num-query-groups 1 --tensor-model-parallel-size 2", 2,
        ["--num-query-groups is 1", "TP 2", "use a multiple of 2"],
    ),
    (
        "--group-query-attention --num-query-groups 3", 1,
        ["--num-attention-heads is 4", "--num-query-groups 3", "a multiple of 3"],
    ),
    (
        "--hidden-size 63 --kv-channels 8 --tensor-model-parallel-size 2 --sequence-parallel", 2,
        ["--hidden-size is 63", "TP 2", "a multiple of 2"],
    ),
    ("--rotary-percent 1.5", 1, ["--rotary-percent is 1.5", "(0, 1]"]),
    ("--lr 0.1 --min-lr 0.2", 1, ["--min-lr is 0.2", "[0, 0.1]", "up to --lr"]),
    (
        "--train-iters 30 --lr-warmup-iters 30", 1,
        ["--lr-warmup-iters is 30", "after 30 steps", "use fewer, or more --lr-decay-iters"],
    ),
    (
        "--optimizer sgd --use-distributed-optimizer", 1,
        ["--use-distributed-optimizer", "--optimizer is sgd", "leave one of them out"],
    ),
    (
        "--overlap-param-gather --overlap-grad-reduce", 1,
        ["--overlap-param-gather", "add --use-distributed-optimizer", "or leave it out"],
    ),
    ("--lr -1", 1, ["--lr is -1.0", "[0, inf)"]),
    ("--num-layers 0", 1, ["--num-layers is 0; it must be at least 1"]),
    ("--num-layers 100000000000", 1, ["--num-layers is 100000000000", "at most 10000"]),
    ("--seed 4294967296", 1, ["--seed is 4294967296", "[0, 4294967296)"]),
    ("--hidden-dropout 1.0", 1, ["--hidden-dropout is 1.0", "[0, 1)"]),
    ("--hidden-dropout -0.1", 1, ["--hidden-dropout is -0.1", "[0, 1)"]),
    ("--attention-dropout 1.0", 1, ["--attention-dropout is 1.0", "[0, 1)"]),
    (
        "--seq-length 512 --max-position-embeddings 511", 1,
        ["--max-position-embeddings is 511", "--seq-length 512", "window's length", "at least"],
    ),
    (
        "--recompute-num-layers 2", 1,
        ["--recompute-num-layers is 2", "only with --recompute-granularity full", "leave it out"],
    ),
    (
        "--recompute-granularity selective --recompute-method block", 1,
        ["--recompute-method is block", "only with --recompute-granularity full", "leave it out"],
    ),
    (
        "--recompute-granularity full --recompute-num-layers 1", 1,
        ["is full", "--recompute-method uniform or block", "--recompute-num-layers, e.g. 1"],
    ),
    (
        "--recompute-granularity full --recompute-method block", 1,
        ["is full", "--recompute-method uniform or block", "--recompute-num-layers, e.g. 1"],
    ),
    (
        f"{PP2_VPP2} --num-layers 12 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 2", 2,
        ["--recompute-num-layers is 2", "the 3 layers of model chunks", "use a divisor"],
    ),
    ("--seq-length 1", 1, ["--seq-length is 1", "at least 2 tokens"]),
    (
        "--seq-length 512 --micro-batch-size 2 --wlb-max-tokens 1023", 1,
        ["--wlb-max-tokens is 1023", "2 × --seq-length 512 = 1024", "at least that"],
    ),
    (
        "--seq-length 512 --wlb-max-tokens 511", 1,
        ["--wlb-max-tokens is 511", "below --seq-length 512", "use at least the window"],
    ),
    (
        "--wlb-host-gib 5 --wlb-packing slim --bf16 --fp8-format e4m3", 1,
        ["--wlb-host-gib is 5", "what FP8 layers keep", "leave it out, or --fp8-format"],
    ),
    (
        "--wlb-long-documents slice --wlb-packing hold", 1,
        ["--wlb-long-documents is slice", "hold packing cuts no slices", "use --wlb-packing slim"],
    ),
    (
        "--wlb-shape on --wlb-packing original", 1,
        ["original packing are windows", "cannot be shaped", "use hold or wlb"],
    ),
    (
        "--wlb-shape on --wlb-packing fixed-greedy", 1,
        ["fixed-greedy packing are windows", "cannot be shaped"],
    ),
    (
        "--wlb-micro-batches auto --wlb-packing slim", 1,
        ["slim packing chooses the number of micro-batches itself", "leave --wlb-micro-batches"],
    ),
    (
        "--wlb-micro-batches auto --wlb-packing fixed-greedy", 1,
        ["fixed-greedy packing balances windows", "use original, hold or wlb"],
    ),
    ("--deterministic-mode", 1, ["NCCL_ALGO=None", "to one of Ring, Tree"]),
    (
        "--global-batch-size 7", 2,
        ["--global-batch-size is 7", "DP 2", "use a multiple of 2"],
    ),
    (
        "--global-batch-size 6 --micro-batch-size 4", 2,
        ["--global-batch-size is 6", "--micro-batch-size 4 × DP 2 = 8", "use a multiple of 8"],
    ),
    (
        "--global-batch-size 6 --micro-batch-size 4 --decrease-batch-size-if-needed", 2,
        ["--global-batch-size is 6", "below --micro-batch-size 4 × DP 2 = 8", "at least 8"],
    ),
    (
        f"{PP2_VPP2} --num-layers 8 --pipeline-model-parallel-layout Et*4|t*4L", 2,
        ["has 2 stages, but PP 2 × VPP 2 are 4", "leave --num-virtual-stages-per-pipeline-rank"],
    ),
    ("--step-batch-size-schedule 1M:3", 1, ["1M:3", "does not begin at 0 tokens"]),
    (
        "--step-batch-size-schedule 0:2,1M:7", 2,
        ["--step-batch-size-schedule leads to a batch of 7", "DP 2", "use a multiple of 2"],
    ),
    (
        f"{PP2_VPP2} --step-batch-size-schedule 0:1,1M:8", 2,
        ["between PP 2 and the 1 micro-batches"],
    ),
    (
        f"{PP2_VPP2} --microbatch-group-size-per-virtual-pipeline-stage 9", 2,
        ["-stage is 9", "between PP 2 and the 8 micro-batches"],
    ),
    (
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --num-layers 8 "
        "--global-batch-size 3", 4,
        ["-stage is 4", "between PP 4 and the 3 micro-batches"],
    ),
    (
        "--pipeline-model-parallel-size 2 --wlb-packing slim --wlb-units 2000 --seq-length 8192 "
        "--wlb-slice-multiple 64 --global-batch-size 16", 4,
        ["--wlb-units (slim:K) is 2000", "step of 65536 tokens", "1024 slices of 64", "at most"],
    ),
    (
        f"{PP2_VPP2} --global-batch-size 7", 2,
        ["7 micro-batches", "leave 1 after groups of 2", "at least PP 2", "--global-batch-size"],
    ),
    ("--expert-model-parallel-size 2", 4, ["there are no experts; give --num-experts"]),
    ("--moe-ffn-hidden-size 32", 4, ["there are no experts; give --num-experts"]),
    (f"{EXPERTS} --expert-model-parallel-size 3", 4, ["-size 3 does not divide it"]),
    (f"{EXPERTS} --expert-model-parallel-size 8", 4, ["4 processes", "start a multiple of 8"]),
    (f"{EXPERTS} --expert-model-parallel-size 2 --expert-tensor-parallel-size 4", 4, ["multiple"]),
    (f"{EXPERTS} --tensor-model-parallel-size 2", 4, ["needs --sequence-parallel; add it"]),
    ("--num-experts 8 --expert-tensor-parallel-size 2", 4, ["is 2 and TP 1, but experts with a b"]),
    (
        "--num-experts 8 --expert-tensor-parallel-size 1 --sequence-parallel "
        "--tensor-model-parallel-size 2", 4,
        ["is 1 and TP 2, but experts with a bias"],
    ),
    ("--num-experts 8", 4, ["adds them in place, which autograd refuses; add --disable-bias"]),
    (f"{EXPERTS} --moe-router-topk 9", 4, ["--moe-router-topk is 9, but there are 8"]),
    (f"{EXPERTS} --moe-router-topk 1", 4, ["add --moe-router-pre-softmax"]),
    (f"{EXPERTS} --moe-router-group-topk 2", 4, ["there are 0 groups", "at least that"]),
    (f"{EXPERTS} --moe-router-num-groups 3", 4, ["--moe-router-num-groups 3 does not"]),
    (
        f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 3", 4,
        ["but the 1 groups of --moe-router-group-topk have 2 experts; use at most that"],
    ),
    (f"{EXPERTS} --moe-router-enable-expert-bias", 4, ["--moe-router-score-function sigmoid"]),
    (f"{EXPERTS} --moe-aux-loss-coeff 0.1 0.2", 4, ["has 2 numbers for the 1 kinds"]),
    (f"{EXPERTS} --moe-layer-freq [0,1]", 4, ["--moe-layer-freq is"]),
    (
        f"{EXPERTS} --moe-ffn-hidden-size 33 --expert-tensor-parallel-size 4", 4,
        ["--moe-ffn-hidden-size is 33", "expert TP 4", "a multiple of 4"],
    ),
    (
        f"{EXPERTS} --moe-shared-expert-intermediate-size 33 --tensor-model-parallel-size 2 "
        "--sequence-parallel", 4,
        ["--moe-shared-expert-intermediate-size is 33", "TP 2 does not divide it"],
    ),
    (f"{EXPERTS} --wlb-expert-imbalance 0.5", 4, ["--wlb-expert-imbalance is 0.5; it must be in"]),
]  # fmt: skip


def check_all(flags: str, world_size: int) -> int:
    config = parse(flags.split())
    guards.check(config, world_size)
    if config.training.deterministic_mode:
        guards.check_algorithms({})
    return guards.check_micro_batches(config, world_size)


@pytest.mark.parametrize(("flags", "world_size", "parts"), REFUSED)
def test_guard_names_value_limit_and_remedy(flags: str, world_size: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_all(flags, world_size)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message


def test_evaluation_beside_a_schedule_of_batches_has_micro_batches_to_interleave() -> None:
    growing = f"{PP2_VPP2} --step-batch-size-schedule 0:4,1M:8"
    config = parse(f"{growing} --global-batch-size 1".split())
    assert guards.check_micro_batches(config, 2) == 8
    says = "between PP 2 and the 1 micro-batches .* evaluation, of 1 windows: give --eval-global-b"
    with pytest.raises(ConfigError, match=says):
        guards.check_evaluation(config, 2)
    guards.check_evaluation(parse(f"{growing} --global-batch-size 2".split()), 2)


@pytest.mark.parametrize(
    ("flags", "world_size", "num_micro_batches"),
    [
        ("", 1, 8),
        ("", 4, 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 4, 4),
        # At the limits that the cases above cross.
        ("--pipeline-model-parallel-size 4 --global-batch-size 3", 4, 3),
        (f"{PP2_VPP2} --global-batch-size 7 "
         "--microbatch-group-size-per-virtual-pipeline-stage 5", 2, 7),
        (f"{PP2_VPP2} --microbatch-group-size-per-virtual-pipeline-stage 8", 2, 8),
        (f"{PP2_VPP2} --no-overlap-p2p-communication", 2, 8),
        (f"{PP2_VPP2} --wlb-verify-shapes", 2, 8),
        ("--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 2", 2, 8),
        ("--kv-channels 7 --position-embedding-type none", 1, 8),
        ("--context-parallel-size 4 --wlb-cp-overlap-groups 2 --wlb-cp-keep-gathered", 8, 4),
        ("--wlb-packing slim --wlb-cp-overlap-groups 2 --wlb-cp-keep-gathered", 2, 4),
        ("--use-rope-scaling --rope-scaling-factor 4", 1, 8),
        ("--position-embedding-type yarn --wlb-yarn-rotary-scaling-factor 8", 1, 8),
        ("--seq-length 512 --max-position-embeddings 512 --wlb-max-tokens 512", 1, 8),
        ("--seq-length 2", 1, 8),
        ("--hidden-dropout 0.5 --wlb-verify-plan-interval 0", 1, 8),
        ("--recompute-granularity selective", 1, 8),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", 1, 8),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", 1, 8),
        ("--pipeline-model-parallel-size 3 --num-layers 1 "
         "--pipeline-model-parallel-layout E|t|L", 3, 8),
        ("--pipeline-model-parallel-size 2 --num-layers 6 --pipeline-model-parallel-layout "
         "Et|tt|tt|tL --microbatch-group-size-per-virtual-pipeline-stage 4", 2, 8),
        ("--pipeline-model-parallel-size 2 --num-layers 6 --decoder-first-pipeline-num-layers 4 "
         "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", 2, 8),
        ("--wlb-shape on --wlb-packing wlb", 1, 8),
        ("--wlb-micro-batches auto --wlb-packing original", 1, 8),
        ("--wlb-long-documents slice --wlb-packing slim --wlb-units 3", 1, 8),
        ("--micro-batch-size 2 --seq-length 512 --wlb-max-tokens 1024", 2, 2),
        ("--micro-batch-size 2 --decrease-batch-size-if-needed --global-batch-size 15", 2, 3),
        ("--step-batch-size-schedule 0:2,1M:8", 2, 4),
        (f"{EXPERTS} --expert-model-parallel-size 4", 4, 2),
        (f"{EXPERTS} --moe-layer-freq [0]+[1]*3", 4, 2),
    ],
)  # fmt: skip
def test_good_settings_pass(flags: str, world_size: int, num_micro_batches: int) -> None:
    assert check_all(flags, world_size) == num_micro_batches


@pytest.mark.parametrize(
    "flags",
    [
        "--step-batch-size-schedule 0:2,1M:8",
        "--decrease-batch-size-if-needed",
        "--fp8-format hybrid",
        "--use-torch-fsdp2",
        "--wlb-strategies auto",
        "--wlb-metrics steps",
        "--num-experts 8 --moe-token-dispatcher-type flex",
    ],
)
def test_what_only_the_launcher_honours_is_refused_elsewhere(flags: str) -> None:
    guards.check_alone(parse([]))
    *_, flag = (word for word in flags.split() if word.startswith("--"))
    with pytest.raises(ConfigError, match=f"^{flag} is "):
        guards.check_alone(parse(flags.split()))


def test_data_parallel_size_is_what_is_left_of_the_world() -> None:
    flags = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "3"]
    assert guards.data_parallel_size(parse(flags), 24) == 4


def test_every_rule_is_tested() -> None:
    """A new rule needs a new case above."""
    missing = {*LAYOUT, *GENERAL, *chain(*RULES.values()), *BATCHES}
    for flags, world_size, _ in REFUSED:
        config = parse(flags.split())
        lines, facts = [*guards.refusals(config, world_size)], Facts(config, world_size)
        if not any(line.partition(";")[2].startswith(" it must be") for line in lines):  # a range
            missing -= {rule for rule in missing if _says(rule, facts, lines)}
    assert not missing


def _says(rule: Rule | Attempt, facts: Facts, lines: list[str]) -> bool:
    try:
        return rule.refusal(facts) in lines
    except (ArithmeticError, TypeError):  # it counts only with what is not given
        return False


def test_all_that_cannot_run_is_told_at_once() -> None:
    flags = "--global-batch-size 7 --max-position-embeddings 9 --lr 1e-3 --min-lr 1"
    with pytest.raises(ConfigError) as caught:
        check_all(flags, 2)
    told = ["--max-position-embeddings", "--min-lr", "--global-batch-size"]
    assert [line.split()[0] for line in str(caught.value).splitlines()] == told
    report = caught.value.report(" (rank 1)")
    assert [line.split(": ")[0] for line in report.splitlines()] == ["error (rank 1)"] * 3


def test_what_counts_with_numbers_out_of_range_waits_for_them() -> None:
    with pytest.raises(ConfigError) as caught:
        check_all("--num-attention-heads 0 --num-layers 0 --min-lr 1", 1)
    told = ["--num-layers", "--num-attention-heads"]
    assert [line.split()[0] for line in str(caught.value).splitlines()] == told

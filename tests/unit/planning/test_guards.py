"""Each guard names value, limit and remedy in one line, and lets good settings pass."""

from __future__ import annotations

from itertools import chain

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning import guards
from megatron_wlb.planning.refusal import Refusal
from megatron_wlb.planning.rules import BATCHES, GENERAL, LAYOUT, RULES, Facts
from megatron_wlb.settings.command_line import parse

PP2_VPP2 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"

SETTINGS = """
8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --num-layers 6
2 --wlb-cp-overlap-groups 2 --wlb-packing slim --wlb-dp-merge off
1 --wlb-cp-keep-gathered
1 --wlb-cp-reduce-in-fp32
8 --pipeline-model-parallel-size 8 --num-layers 6
2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 6
4 --pipeline-model-parallel-size 4 --num-layers 4 --pipeline-model-parallel-layout Et||t*3|L
1 --microbatch-group-size-per-virtual-pipeline-stage 3
1 --num-virtual-stages-per-pipeline-rank 2
2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 1
2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 \
  --no-overlap-p2p-communication --wlb-verify-shapes
1 --sequence-parallel
1 --hybrid-layer-pattern *E
1 --multi-latent-attention --hybrid-layer-pattern *-
4 --num-experts 8 --disable-bias-linear --hybrid-layer-pattern *E --moe-layer-freq 2
1 --mtp-num-layers 1 --hybrid-layer-pattern *-
2 --swiglu --hybrid-layer-pattern G- --tensor-model-parallel-size 2
1 --hybrid-layer-pattern G-
2 --swiglu --hybrid-layer-pattern G- --linear-num-key-heads 3 --linear-num-value-heads 3 \
  --context-parallel-size 2
1 --swiglu --hybrid-layer-pattern G- --linear-num-key-heads 3
1 --hybrid-layer-pattern *- --use-rope-scaling
1 --moe-latent-size 32
1 --multi-latent-attention --attention-output-gate
2 --hybrid-layer-pattern M- --mamba-num-heads 3 --mamba-num-groups 1 --context-parallel-size 2
2 --hybrid-layer-pattern M- --mamba-num-groups 1 --tensor-model-parallel-size 2
1 --hybrid-layer-pattern M- --mamba-num-heads 3 --mamba-num-groups 2
1 --hybrid-layer-pattern M- --mamba-num-groups 3
3 --hybrid-layer-pattern M- --mamba-num-heads 6 --mamba-num-groups 2 --context-parallel-size 3 \
  --global-batch-size 9
1 --hidden-size 66 --num-attention-heads 4
1 --kv-channels 7
2 --num-attention-heads 3 --kv-channels 8 --tensor-model-parallel-size 2
2 --ffn-hidden-size 33 --tensor-model-parallel-size 2
2 --group-query-attention --num-query-groups 1 --tensor-model-parallel-size 2
1 --group-query-attention --num-query-groups 3
2 --hidden-size 63 --kv-channels 8 --tensor-model-parallel-size 2 --sequence-parallel
1 --rotary-seq-len-interpolation-factor 2 --position-embedding-type none
1 --wlb-yarn-mscale 2
1 --rope-scaling-factor 2
1 --position-embedding-type yarn --rotary-percent 0.5
1 --window-size 8
1 --seq-length 512 --max-position-embeddings 511
4 --moe-ffn-hidden-size 32
4 --expert-model-parallel-size 2
1 --recompute-granularity selective --recompute-method block
1 --recompute-num-layers 2
1 --recompute-granularity full --recompute-num-layers 1
2 --pipeline-model-parallel-size 2 --num-layers 4 --recompute-granularity full --recompute-method \
  uniform --recompute-num-layers 2 --pipeline-model-parallel-layout Et*3|tL
2 --mtp-num-layers 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttmL
1 --lr 0.1 --min-lr 0.2
1 --train-iters 30 --lr-warmup-iters 30
1 --optimizer sgd --use-distributed-optimizer
1 --overlap-param-gather --overlap-grad-reduce
1 --seq-length 512 --wlb-max-tokens 511
1 --seq-length 512 --micro-batch-size 2 --wlb-max-tokens 1023
1 --wlb-packing wlb --wlb-queue-thresholds 200 100
1 --wlb-host-gib 5 --wlb-packing slim --bf16 --fp8-format e4m3
1 --wlb-long-documents slice --wlb-packing hold
1 --wlb-shape on --wlb-packing original
1 --wlb-micro-batches auto --wlb-packing slim
1 --mock-data --data-path a
1 --wlb-mock-lengths stdlib --data-path a
1 --mock-data --wlb-mock-lengths referense
1 --wlb-hardware none.yaml
1 --multi-latent-attention --group-query-attention --num-query-groups 2
1 --multi-latent-attention --rotary-interleaved
1 --multi-latent-attention --position-embedding-type yarn
1 --multi-latent-attention --qk-pos-emb-head-dim 7
1 --multi-latent-attention --v-head-dim 200
2 --multi-latent-attention --q-lora-rank 33 --tensor-model-parallel-size 2
2 --multi-latent-attention --kv-lora-rank 33 --tensor-model-parallel-size 2
2 --multi-latent-attention --wlb-cp-overlap-groups 2 --context-parallel-size 2
2 --multi-latent-attention --window-size 8,0 --context-parallel-size 2
2 --multi-latent-attention --fp8-format hybrid --fp8-recipe tensorwise --context-parallel-size 2
4 --num-experts 8 --disable-bias-linear --moe-layer-freq [0,1]
4 --num-experts 8 --disable-bias-linear --expert-model-parallel-size 8
4 --num-experts 8 --disable-bias-linear --moe-ffn-hidden-size 33 --expert-tensor-parallel-size 4
4 --num-experts 8 --disable-bias-linear --moe-shared-expert-intermediate-size 33 \
  --tensor-model-parallel-size 2 --sequence-parallel
4 --num-experts 8 --expert-tensor-parallel-size 2
4 --num-experts 8
4 --num-experts 8 --disable-bias-linear --tensor-model-parallel-size 2
4 --num-experts 8 --disable-bias-linear --moe-router-topk 9
4 --num-experts 8 --disable-bias-linear --moe-aux-loss-coeff 0.1 0.2
4 --num-experts 8 --disable-bias-linear --moe-router-topk 1
4 --num-experts 8 --disable-bias-linear --moe-router-enable-expert-bias
4 --num-experts 8 --disable-bias-linear --moe-router-group-topk 2
4 --num-experts 8 --disable-bias-linear --moe-router-num-groups 3
4 --num-experts 8 --disable-bias-linear --moe-router-num-groups 4 --moe-router-group-topk 1 \
  --moe-router-topk 3
1 --mtp-num-layers 1 --position-embedding-type learned_absolute
1 --mtp-num-layers 1 --window-size 8,0 --window-attn-skip-freq 2
1 --mtp-num-layers 2 --recompute-granularity full --recompute-method uniform \
  --recompute-num-layers 2
1 --step-batch-size-schedule 1M:3
2 --global-batch-size 6 --micro-batch-size 4 --decrease-batch-size-if-needed
2 --global-batch-size 7
2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 \
  --step-batch-size-schedule 0:1,1M:8
2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 7
1 --wlb-max-step-tokens 3
3 --num-experts 8 --disable-bias-linear --expert-model-parallel-size 3 --global-batch-size 9
1 --window-size 8,8
1 --window-attn-skip-freq 2
1 --window-size 8,0 --window-attn-skip-freq [1,0]
3 --pipeline-model-parallel-size 3 --num-layers 6 --decoder-last-pipeline-num-layers 3
2 --step-batch-size-schedule 0:2,1M:7
4 --num-experts 8 --expert-tensor-parallel-size 1 --sequence-parallel \
  --tensor-model-parallel-size 2
"""
"""Processes and flags: each line is refused by one row alone."""

LINES = {
    (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --num-layers 6"):
        "8 processes were started, but TP 2 × CP 1 × PP 3 = 6 does not divide that; start a "
        "multiple of 6 (torchrun --nproc-per-node)",
    (1, "--hidden-size 66 --num-attention-heads 4"):
        "--hidden-size is 66, but --num-attention-heads 4 does not divide it; change one of them "
        "or give --kv-channels",
    (2, "--ffn-hidden-size 33 --tensor-model-parallel-size 2"):
        "--ffn-hidden-size is 33, but TP 2 does not divide it; use a multiple of 2",
    (1, "--mock-data --wlb-mock-lengths referense"):
        "--wlb-mock-lengths: unknown distribution referense; did you mean reference? There are "
        "reference, stdlib, magi, slimpack",
    (1, "--optimizer sgd --use-distributed-optimizer"):
        "--use-distributed-optimizer is given, but it shards the state of Adam only, and "
        "--optimizer is sgd; leave one of them out",
    (2, f"{PP2_VPP2} --global-batch-size 7"):
        "7 micro-batches a rank leave 1 after groups of 2, but the remainder must be 0 or at least "
        "PP 2; change --global-batch-size",
    (1, "--rotary-percent 1.5"): "--rotary-percent is 1.5; give a number in (0, 1]",
    (1, "--num-layers 0"): "--num-layers is 0; give at least 1",
}  # fmt: skip
"""Golden lines, of each kind."""


def refused(world_size: int, flags: str) -> list[str]:
    return [*guards.refusals(parse(flags.split()), world_size)]


def test_each_row_refuses_a_setting_that_no_other_row_refuses() -> None:
    """A new row needs a line in the table."""
    rows = [*LAYOUT, *GENERAL, *chain(*RULES.values()), *BATCHES]
    assert all(row.reason and (row.remedy or row.reason == "{found}") for row in rows)
    found = set()
    for setting in SETTINGS.strip().splitlines():
        world_size, flags = setting.split(" ", 1)
        (line,) = refused(int(world_size), flags)
        facts = Facts(parse(flags.split()), int(world_size))
        said = [number for number, row in enumerate(rows) if _says(row, facts, line)]
        assert len(said) == 1 and "\n" not in line, (setting, said, line)
        found |= {*said}
    assert found == {*range(len(rows))}, [rows[n] for n in range(len(rows)) if n not in found]


def _says(row: Refusal[Facts], facts: Facts, line: str) -> bool:
    try:
        return row.line(facts) == line
    except (ArithmeticError, ConfigError, TypeError):  # it counts only with what is not given
        return False


@pytest.mark.parametrize(("setting", "line"), LINES.items())
def test_refusal_names_value_limit_and_remedy(setting: tuple[int, str], line: str) -> None:
    assert refused(*setting) == [line]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--deterministic-mode", "NCCL_ALGO=None; set that in the environment to one of Ring"),
        (
            "--pipeline-model-parallel-size 2 --wlb-packing slim --wlb-units 2000 --seq-length 8192"
            " --wlb-slice-multiple 64 --global-batch-size 16",
            "--wlb-units (slim:K) is 2000",
        ),
    ],
)
def test_what_is_asked_beside_the_tables_is_refused(flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_all(flags, 4)
    assert said in str(caught.value)


def check_all(flags: str, world_size: int) -> int:
    config = parse(flags.split())
    guards.check(config, world_size)
    if config.training.deterministic_mode:
        guards.check_algorithms({})
    return guards.check_micro_batches(config, world_size)


def test_evaluation_beside_a_schedule_of_batches_has_micro_batches_to_interleave() -> None:
    growing = f"{PP2_VPP2} --step-batch-size-schedule 0:4,1M:8"
    config = parse(f"{growing} --global-batch-size 1".split())
    assert guards.check_micro_batches(config, 2) == 8
    says = "between PP 2 and the 1 micro-batches .* evaluation, of 1 windows: give --eval-global-b"
    with pytest.raises(ConfigError, match=says):
        guards.check_evaluation(config, 2)
    guards.check_evaluation(parse(f"{growing} --global-batch-size 2".split()), 2)


GOOD = """
8 1
2 4
4 4 --tensor-model-parallel-size 2 --sequence-parallel
3 4 --pipeline-model-parallel-size 4 --global-batch-size 3
7 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 \
  --global-batch-size 7 --microbatch-group-size-per-virtual-pipeline-stage 5
8 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 \
  --microbatch-group-size-per-virtual-pipeline-stage 8
8 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 \
  --no-overlap-p2p-communication
8 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --wlb-verify-shapes
8 2 --group-query-attention --num-query-groups 2 --tensor-model-parallel-size 2
8 1 --kv-channels 7 --position-embedding-type none
4 8 --context-parallel-size 4 --wlb-cp-overlap-groups 2 --wlb-cp-keep-gathered
4 2 --wlb-packing slim --wlb-cp-overlap-groups 2 --wlb-cp-keep-gathered
8 1 --use-rope-scaling --rope-scaling-factor 4
8 1 --position-embedding-type yarn --wlb-yarn-rotary-scaling-factor 8
8 1 --seq-length 512 --max-position-embeddings 512 --wlb-max-tokens 512
8 1 --seq-length 2
8 1 --hidden-dropout 0.5 --wlb-verify-plan-interval 0
8 1 --recompute-granularity selective
8 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2
8 1 --recompute-granularity full --recompute-method block --recompute-num-layers 3
8 3 --pipeline-model-parallel-size 3 --num-layers 1 --pipeline-model-parallel-layout E|t|L
8 2 --pipeline-model-parallel-size 2 --num-layers 6 --pipeline-model-parallel-layout Et|tt|tt|tL \
  --microbatch-group-size-per-virtual-pipeline-stage 4
8 2 --pipeline-model-parallel-size 2 --num-layers 6 --decoder-first-pipeline-num-layers 4 \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 2
8 1 --wlb-shape on --wlb-packing wlb
8 1 --wlb-micro-batches auto --wlb-packing original
8 1 --wlb-long-documents slice --wlb-packing slim --wlb-units 3
2 2 --micro-batch-size 2 --seq-length 512 --wlb-max-tokens 1024
3 2 --micro-batch-size 2 --decrease-batch-size-if-needed --global-batch-size 15
4 2 --step-batch-size-schedule 0:2,1M:8
2 4 --num-experts 8 --disable-bias-linear --expert-model-parallel-size 4
2 4 --num-experts 8 --disable-bias-linear --moe-layer-freq [0]+[1]*3
"""
"""Micro-batches, processes, and flags that pass: many at the limits that those above cross."""


@pytest.mark.parametrize("setting", GOOD.strip().splitlines())
def test_good_settings_pass(setting: str) -> None:
    num_micro_batches, world_size, *flags = setting.split()
    assert check_all(" ".join(flags), int(world_size)) == int(num_micro_batches)


ALONE = """
--step-batch-size-schedule 0:2,1M:8
--decrease-batch-size-if-needed
--fp8-format hybrid
--use-torch-fsdp2
--wlb-strategies auto
--wlb-metrics steps
--moe-token-dispatcher-type flex --num-experts 8
"""


@pytest.mark.parametrize("flags", ALONE.strip().splitlines())
def test_what_only_the_launcher_honours_is_refused_elsewhere(flags: str) -> None:
    guards.check_alone(parse([]))
    with pytest.raises(ConfigError, match=f"^{flags.split()[0]} is "):
        guards.check_alone(parse(flags.split()))


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

"""Settings to cost and S_max: what --wlb-cost, --wlb-hardware and --wlb-memory-gib do."""

import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_wlb.cost import DocumentCost, Execution, ProfiledCost, load_hardware
from megatron_wlb.cost.analytic import AnalyticModel
from megatron_wlb.cost.attention_latency import AnalyticAttention, AttentionProfile
from megatron_wlb.cost.hardware import read_hardware
from megatron_wlb.cost.table import Row, model_identity
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.balance.numbers import NumberChooser
from megatron_wlb.planning.from_config import (
    known_cost,
    make_evaluation_planner,
    make_planner,
    max_tokens,
    model_shape,
    padded_vocab_size,
    parallelism,
    recompute,
    run_of,
)
from megatron_wlb.planning.planner import Planner
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import DEFAULT_MACHINE, Config

VOCAB = 512


class Lengths:
    prefix = "lengths"
    targets = None
    lengths = np.array([900, 300, 40, 1000, 700, 20, 650, 330] * 20)


CORPORA = Corpora([Lengths()], 500, {"train": [(0, 160)]})  # type: ignore[list-item]
COEFFICIENTS = DocumentCost(1.0, 0.5, 2.0, 1.25)


def settings(*flags: str) -> Config:
    """Of flags, several in a text as on a command line."""
    words = f"--wlb-packing hold --seq-length 1024 --global-batch-size 4 {' '.join(flags)}"
    return parse(words.split())


def s_max(config: Config, dp_size: int = 1) -> int:
    return max_tokens(config, run_of(config, VOCAB, dp_size))


def write(tmp_path: Path, values: object) -> str:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(values))
    return str(path)


def table(config: Config, longest: int = 2048) -> ProfiledCost:
    rows = tuple(Row(d, 1.0 * d, 2.0 * d) for d in (64, longest))
    return ProfiledCost(model_identity(model_shape(config, VOCAB)), 1, 1, rows, rows)


def test_vocabulary_is_padded_as_megatron_does() -> None:
    flags = ("--make-vocab-size-divisible-by", "64", "--tensor-model-parallel-size", "2")
    assert padded_vocab_size(settings(*flags), 128) == 128
    assert padded_vocab_size(settings(*flags), 129) == 256


def test_settings_become_the_shape_and_layout() -> None:
    config = settings(
        "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2",
        "--qk-layernorm --disable-bias-linear --add-qkv-bias --hidden-dropout 0.1",
        "--untie-embeddings-and-output-weights --rotary-percent 0.5",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        "--recompute-granularity full --recompute-method block",
        "--recompute-num-layers 1",
    )
    shape = model_shape(config, VOCAB)
    assert (shape.gated, shape.rms_norm, shape.qk_norm, shape.dropout) == (True,) * 4
    assert (shape.linear_bias, shape.qkv_bias, shape.tied_embeddings) == (False, True, False)
    assert (shape.num_query_groups, shape.rotary_percent, shape.learned_positions) == (2, 0.5, 0)
    layout = parallelism(config, dp_size=3)
    assert (layout.pp_size, layout.vpp_size, layout.dp_size) == (2, 2, 3)
    assert recompute(config).groups(2) == [(1, True), (1, False)]
    learned = settings("--position-embedding-type", "learned_absolute")
    assert model_shape(learned, VOCAB).learned_positions == 1024
    assert model_shape(learned, VOCAB).rotary_percent == 0


def test_analytic_cost_is_that_of_the_named_hardware() -> None:
    costs = {}
    for name in (DEFAULT_MACHINE, "cpu"):
        config = settings("--wlb-hardware", name)
        costs[name] = known_cost(config, VOCAB)
        model = AnalyticModel(
            model_shape(config, VOCAB),
            Execution(parallelism(config), recompute(config), bf16=False),
            load_hardware(name),
        )
        assert costs[name] == model.cost()
    assert costs["cpu"].document_us(1024) > 100 * costs[DEFAULT_MACHINE].document_us(1024)
    assert known_cost(settings(), VOCAB) == costs[DEFAULT_MACHINE]
    with pytest.raises(ConfigError, match="unknown hardware h1000"):
        known_cost(settings("--wlb-hardware", "h1000"), VOCAB)


def test_measured_cost_is_not_known_yet() -> None:
    assert known_cost(settings("--wlb-cost", "measured"), VOCAB) is None


def test_cost_file_may_hold_coefficients_a_fit_or_tables(tmp_path: Path) -> None:
    config = settings()
    tables = table(config)
    fit = {"cost": COEFFICIENTS.as_dict(), "mean_error": 0.1, "max_error": 0.2, "num_samples": 9}
    measured = {"cost": COEFFICIENTS.as_dict(), "model": dict(tables.model)}
    for values, expected in (
        (COEFFICIENTS.as_dict(), COEFFICIENTS),
        (fit, COEFFICIENTS),
        (measured, COEFFICIENTS),
        (tables.as_dict(), tables),
        ({"cost": tables.as_dict()}, tables),
    ):
        assert known_cost(settings("--wlb-cost", write(tmp_path, values)), VOCAB) == expected


def test_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    tables = table(settings())
    for values in (
        tables.as_dict(),
        {"cost": COEFFICIENTS.as_dict(), "model": dict(tables.model)},
    ):
        flags = ("--wlb-cost", write(tmp_path, values), "--hidden-size", "128")
        with pytest.raises(ConfigError, match=r"cost\.json: measured .* hidden_size 64, .* 128"):
            known_cost(settings(*flags), VOCAB)


def planner(*flags: str) -> Planner:
    config = settings(*flags)
    cost = known_cost(config, VOCAB)
    assert cost is not None
    return make_planner(config, CORPORA, cost, dp_size=2)


def test_table_that_ends_before_s_max_is_refused_unless_allowed(tmp_path: Path) -> None:
    flags = ("--wlb-cost", write(tmp_path, table(settings(), longest=1500).as_dict()))
    for longer in ((), ("--wlb-max-tokens", "1501"), ("--wlb-memory-gib", "0.05")):
        with pytest.raises(ConfigError, match=r"ends at 1500 tokens, but \d+ were asked for"):
            planner(*flags, *longer)
    assert planner(*flags, "--wlb-max-tokens", "1500").next_plan() is not None
    cost = planner(*flags, "--wlb-cost-extrapolate").cost
    assert cost.document_us(3000) == pytest.approx(2 * cost.document_us(1500))


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ([1, 2], "expected names and values"),
        ({"cost": 3}, "cost is 3; give coefficients"),
        ({"forward_linear": 3}, "unknown entry forward_linear; use forward_linear_us"),
        ({"attention": []}, "model, tp_size, cp_size, linear are missing"),
    ],
)
def test_bad_cost_file_is_named(tmp_path: Path, values: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"--wlb-cost .*cost\.json: .*{complaint}"):
        known_cost(settings("--wlb-cost", write(tmp_path, values)), VOCAB)


def test_missing_cost_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--wlb-cost nowhere\.json: .*No such file"):
        known_cost(settings("--wlb-cost", "nowhere.json"), VOCAB)


def test_s_max_is_what_fits_the_memory() -> None:
    config = settings("--wlb-memory-gib", "0.05")
    fitting = s_max(config, 2)
    model = run_of(config, VOCAB, dp_size=2).memory
    assert 1024 < fitting < 4096
    limit = 0.05 * 2**30
    assert model.peak_bytes(0, [fitting] * 2) <= limit < model.peak_bytes(0, [fitting + 1] * 2)
    # More memory than a step can use: all its tokens in one micro-batch.
    assert s_max(settings("--wlb-memory-gib", "64")) == 4 * 1024
    assert s_max(settings()) == 2 * 1024
    run = run_of(settings(), VOCAB, dp_size=2)
    small = dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, memory_gib=1.16))
    assert 1024 < max_tokens(settings(), small) < 2 * 1024  # as a dry run has it
    assert s_max(settings("--wlb-max-tokens", "1500")) == 1500
    both = settings("--wlb-memory-gib", "0.05", "--wlb-max-tokens", "1500")
    assert s_max(both) == 1500


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("0.02",), r"--seq-length 1024 tokens do not fit --wlb-memory-gib 0\.02, which \d+"),
        (("0.05", "--wlb-max-tokens", "4000"), r"--wlb-max-tokens 4000 tokens do not fit"),
        (("0.001",), "weights, gradients and optimizer of pipeline rank 0 take"),
        (("0",), "--wlb-memory-gib is 0.0; give at least 1e-09"),
    ],
)
def test_memory_that_is_too_small_is_refused(flags: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        s_max(settings("--wlb-memory-gib", *flags))


def test_planner_packs_to_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    flags = ("--wlb-memory-gib", "0.05")
    with caplog.at_level(logging.INFO):
        packing = planner(*flags)
    fitting = s_max(settings(*flags), 2)
    assert packing.packer.limits.max_tokens == fitting
    assert f"S_max is {fitting} tokens, which fit 0.05 GiB" in caplog.text
    plan = packing.next_plan()
    assert plan is not None and max(m.length for m in plan) <= fitting


CP = "--context-parallel-size 2 --num-attention-heads 4 --hidden-size 256"


def attention_table(longest: int = 2048, **sizes: object) -> AttentionProfile:
    """Of a kernel for which every chunk is as long, so that few are best."""
    known = {"num_heads": 4, "num_groups": 4, "head_dim": 64, "dtype": "float32"} | sizes
    row = (1.0, 1.0)
    return AttentionProfile(
        kernel="some", machine="here", tile_queries=1, tile_keys=1, lengths=(1, longest),
        forward_us=(row, (1.0,)), backward_us=(row, (1.0,)), whole_forward_us=row,
        whole_backward_us=row, **known,
    )  # type: ignore[arg-type]  # fmt: skip


def hardware_file(tmp_path: Path, *tables: AttentionProfile) -> str:
    _, content = read_hardware("cpu")
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump({**content, "attention": [t.as_dict() for t in tables]}))
    return str(path)


def test_without_cp_there_is_no_sharding_to_choose() -> None:
    assert planner().selector is None


def test_cp_shards_each_micro_batch_as_the_flag_says() -> None:
    for mode in ("per-sequence", "per-document"):
        plan = planner(CP, "--wlb-cp-sharding", mode).next_plan()
        assert plan is not None and plan.shardings == {mode: 4}
        assert all(m.padded_length % 4 == 0 for m in plan)
    assert planner(CP).selector.mode == "adaptive"
    plan = planner(CP, "--wlb-cp-sharding hybrid").next_plan()
    assert plan is not None and sum(plan.shardings.values()) == 4


def test_shardings_are_chosen_by_measured_attention_of_such_heads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = hardware_file(tmp_path, attention_table(), attention_table(head_dim=128))
    with caplog.at_level(logging.INFO):
        plan = planner(CP, "--wlb-hardware", path).next_plan()
    assert "chosen by measured some attention (here)" in caplog.text
    # Each chunk takes as long: cutting every document is never faster.
    assert plan is not None and plan.shardings == {"per-sequence": 4}
    tensor_parallel = f"{CP} --tensor-model-parallel-size 2"
    assert planner(tensor_parallel, "--wlb-hardware", path).selector.latency.num_heads == 2


def test_shardings_are_chosen_by_whole_tiles_where_nothing_is_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = hardware_file(tmp_path, attention_table(head_dim=32), attention_table(dtype="bfloat16"))
    with caplog.at_level(logging.INFO):
        chosen = planner(CP, "--wlb-hardware", path).selector
    assert isinstance(chosen.latency, AnalyticAttention)
    assert "chosen by whole tiles at its rate" in caplog.text
    assert "has no table of float32 attention with heads of 64" in caplog.text
    assert chosen.latency.tflops == pytest.approx(load_hardware("cpu").attention_tflops)


def test_attention_measured_shorter_than_the_window_is_refused_unless_allowed(
    tmp_path: Path,
) -> None:
    assert planner(CP, "--wlb-hardware", hardware_file(tmp_path, attention_table(longest=1024)))
    path = hardware_file(tmp_path, attention_table(longest=1000))
    with pytest.raises(ConfigError, match="ends at 1000 tokens, but 1024 were asked for"):
        planner(CP, "--wlb-hardware", path)
    allowed = planner(CP, "--wlb-hardware", path, "--wlb-cost-extrapolate")
    assert allowed.next_plan() is not None


# ---- shaped plans


def planned(*flags: str, cost: object = COEFFICIENTS) -> Planner:
    config = settings("--num-layers 8", *flags)
    return make_planner(config, CORPORA, cost, 2, num_epochs=1)  # type: ignore[arg-type]


def test_shaping_is_for_pipelines_and_off_unless_asked_for() -> None:
    pp = "--pipeline-model-parallel-size 2"
    assert planned("--wlb-shape on").shaping is None
    assert planned(pp).shaping is None
    assert planned(pp, "--wlb-shape on").shaping is not None
    assert planned("--wlb-micro-batches auto").shaping is None
    assert isinstance(planned(pp, "--wlb-micro-batches auto").shaping, NumberChooser)
    config = settings("--num-layers 8 --wlb-micro-batches auto --wlb-shape on", pp)
    evaluated = make_evaluation_planner(config, CORPORA, COEFFICIENTS, 1, "train")
    assert evaluated.shaping is None

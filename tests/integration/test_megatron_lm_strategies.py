"""The launcher with strategies: replicas of other layouts in each step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.layouts import some_of
from helpers.strategy_ranks import strategies_file
from helpers.texts import write_texts
from megatron_lm_runs import (
    BOTH,
    LLAMA_EXPERTS,
    LLAMA_LATENT,
    WINDOW,
    Flags,
    launch,
    logged,
    run_without_launcher,
    validations,
)
from rank_runs import finish, losses, read_metrics, start

from megatron_wlb.cli.main import main
from megatron_wlb.measure_cost import main as measure_cost

pytestmark = pytest.mark.launcher

NUM_STEPS = 12
ROUNDING = 1e-6
"""Relative, of losses: fp32 sums in another order, over 12 updates; logs have seven digits."""
OF_NORMS = 1e-4
"""Of the gradients' norm, whose summands cancel."""
STRATEGIES = (
    "4*tp1:128",  # whose weights are those of one process
    "tp2pp2:128",
    "tp1:64+pp3:128",
    "cp2:128+tp2:128",
    "tp2cp2:128",
    "pp2vpp3:64+tp2:128",
    "tp2pp2sliced:128",
    "cp2pp2sliced:128",
    "tp1:64+pp3sliced:128",
    "tp1:128@1+tp1:128@3",  # two ranks are idle
)
FLAGS: Flags = BOTH | {
    "num_layers": 6,
    "num_attention_heads": 4,
    "train_iters": NUM_STEPS,
    "seed": 7,
    "wlb_hardware": "cpu",
    "make_vocab_size_divisible_by": 64,
    "clip_grad": 0.5,
    "weight_decay": 0.1,
}
ONE: Flags = {"wlb_packing": "slim", "wlb_units": 3, "wlb_slice_multiple": 8}
"""One process that trains the documents of each step as they come."""


EXPERTS: Flags = LLAMA_EXPERTS | {
    "qk_layernorm": None,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_z_loss_coeff": 0.1,
}
LATENT: Flags = LLAMA_LATENT | {
    "qk_layernorm": None,
    "mtp_num_layers": 2,
    "lr_warmup_iters": 2,
    "decoupled_lr": 2e-3,
    "decoupled_min_lr": 1e-4,
    "lr_decay_style": "linear",
}
MODELS: dict[str, tuple[Flags, tuple[str, ...]]] = {
    # and what Megatron's log says besides
    "dense": ({"log_params_norm": True, "log_num_zeros_in_grad": True}, ("params norm",)),
    "experts": (EXPERTS, ("seq_load_balancing_loss", "z_loss")),
    "latent": (LATENT, ("mtp_1 loss", "mtp_2 loss")),
}


def other_strategy_each_step() -> None:
    """Lets each step have the strategy after the one before, and not the fastest one."""
    from megatron_wlb.planning.balance.dispatch import StepDocuments
    from megatron_wlb.strategies.plan import assigner

    plans = assigner.StrategyPlanner.next_plan

    class OneOf(assigner.Assigner):
        step = 0

        def choose(self, lengths: Sequence[int]) -> assigner.Assignment:
            candidate = self.candidates[self.step % len(self.candidates)]
            chosen = assigner.assign(StepDocuments(lengths), candidate)
            assert chosen is not None
            return chosen

    def next_plan(planner: Any) -> Any:
        planner.assigner = OneOf(planner.assigner.candidates)
        planner.assigner.step = planner.step
        return plans(planner)

    assigner.StrategyPlanner.next_plan = next_plan  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents, and some that fill a window."""
    return write_texts(tmp_path_factory.mktemp("texts") / "a", 400, 3.5, most=WINDOW)


@pytest.mark.parametrize("model", some_of(MODELS, "dense", "experts"))
def test_another_strategy_in_each_step_trains_as_one_process(
    model: str, corpus: Path, tmp_path: Path
) -> None:
    more, figures = MODELS[model]
    flags = FLAGS | more | {"data_path": corpus, "eval_interval": 6, "eval_iters": 2}
    path = strategies_file(tmp_path, STRATEGIES)
    unlike = {"wlb_strategies": path, "wlb_metrics": "unlike"}
    if "num_experts" in more:
        unlike |= {"expert_model_parallel_size": 2}
    found = finish(launch(tmp_path, 4, flags | unlike, fault=other_strategy_each_step))
    alone = finish(launch(tmp_path, 1, flags | ONE | {"wlb_metrics": "alone"}))
    expected = losses(tmp_path / "alone")
    assert len(expected) == NUM_STEPS
    assert losses(tmp_path / "unlike") == pytest.approx(expected, rel=ROUNDING)
    evaluated = [[float(loss) for loss in validations(run)] for run in (found, alone)]
    assert len(evaluated[0]) == 4  # two in the run, and of both splits at its end
    assert evaluated[0] == pytest.approx(evaluated[1], rel=ROUNDING)
    for name in figures:
        said = [[float(value) for value in logged(run, name)] for run in (found, alone)]
        assert len(said[0]) == NUM_STEPS and said[0] == pytest.approx(said[1], rel=2 * ROUNDING)
    lines = [*read_metrics(tmp_path / "unlike")], [*read_metrics(tmp_path / "alone")]
    for one, other in zip(*lines, strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=OF_NORMS)
        assert one["tokens"] == other["tokens"]
    assert {line["strategy"] for line in lines[0]} == {*STRATEGIES}
    sliced = {line["strategy"] for line in lines[0] if "recomputed_tokens" in line}
    assert sliced == {one for one in STRATEGIES if "sliced" in one}


def test_killed_run_goes_on_under_other_strategies_and_without_any(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = FLAGS | {"data_path": corpus, "hidden_dropout": 0.1}
    path = strategies_file(tmp_path, (*STRATEGIES[1:3], "tp2pp2sliced:128"))
    mine = flags | {"wlb_strategies": path, "save": "ck", "save_interval": 3}
    finish(launch(tmp_path, 4, mine | {"wlb_metrics": "whole"}))
    expected = losses(tmp_path / "whole")
    assert len(expected) == NUM_STEPS
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "ck"), "--json", "--replay"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["lost"]["number"], report["twice"]["number"]) == (0, 0)
    assert (report["steps"], report["replayed"]) == (NUM_STEPS, NUM_STEPS)
    again = mine | {"load": "ck", "ckpt_step": 6, "save": None, "wlb_metrics": "again"}
    finish(launch(tmp_path, 4, again))
    assert losses(tmp_path / "again") == {n: expected[n] for n in range(7, NUM_STEPS + 1)}

    (tmp_path / "others").mkdir()
    others = strategies_file(tmp_path / "others", ("cp2:128", "2*tp1:128"), 2)
    # Its vocabulary is padded as for two tensor-parallel ranks.
    same = {"make_vocab_size_divisible_by": 128, "hidden_dropout": 0.0}
    two = again | same | {"wlb_strategies": others, "wlb_metrics": "two"}
    finish(launch(tmp_path, 2, two))
    plain = again | same | ONE | {"wlb_strategies": None, "wlb_metrics": "plain"}
    finish(launch(tmp_path, 1, plain))
    found = losses(tmp_path / "plain")
    assert [*found] == [*range(7, NUM_STEPS + 1)]
    assert losses(tmp_path / "two") == pytest.approx(found, rel=ROUNDING)

    weights = {"load": "ck", "ckpt_step": 12, "finetune": True, "train_iters": 1}
    stock = BOTH | {n: FLAGS[n] for n in ("num_layers", "num_attention_heads", "wlb_hardware")}
    stock |= same | weights | {"data_path": corpus, "wlb_hardware": None}
    (loss,) = map(float, logged(finish(run_without_launcher(tmp_path, 1, stock)), "lm loss"))
    assert loss < expected[2] - 0.3, "weights of the last step, not first ones"


@pytest.mark.long
def test_strategies_are_proposed_by_tables_that_each_layout_measured(
    corpus: Path, tmp_path: Path
) -> None:
    """Only layouts with a table are proposed, and one process trains the same."""
    # The first proposal's layout makes the weights, which are those of one process for any TP.
    flags = FLAGS | {"data_path": corpus, "use_cpu_initialization": True}
    model = BOTH | {"num_layers": 6, "num_attention_heads": 4, "data_path": corpus}
    layouts: dict[str, Flags] = {
        "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "cp2": {"context_parallel_size": 2, "make_vocab_size_divisible_by": 128},
    }
    (tmp_path / "costs").mkdir()
    for name, layout in layouts.items():
        measured = model | {"make_vocab_size_divisible_by": 64} | layout
        measured |= {"tables": f"costs/{name}.json", "log_interval": None, "eval_interval": None}
        finish(start(tmp_path, 2, measured, program=measure_cost))
    unlike = {"wlb_strategies": "auto", "wlb_cost": tmp_path / "costs", "wlb_metrics": "unlike"}
    finish(launch(tmp_path, 2, flags | {"make_vocab_size_divisible_by": 64} | unlike))
    finish(launch(tmp_path, 1, flags | ONE | {"wlb_metrics": "alone"}))
    expected = losses(tmp_path / "alone")
    assert len(expected) == NUM_STEPS
    assert losses(tmp_path / "unlike") == pytest.approx(expected, rel=ROUNDING)
    used = {line["strategy"].split(":")[0] for line in read_metrics(tmp_path / "unlike")}
    assert used <= {*layouts}, "2*tp1 is faster, but has no table"

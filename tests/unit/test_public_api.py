"""The names that users may import, and the page that shows them."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import megatron_wlb as wlb
from megatron_wlb import api

PROJECT = Path(wlb.__file__).parents[1]
PAGE = (PROJECT / "docs" / "python.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", PAGE, re.DOTALL)
BATCH = {"window": 64, "num_micro_batches": 4}


@pytest.mark.parametrize(
    ("code", "printed"), EXAMPLES, ids=("plan", "batch", "evaluate", "simulate")
)
def test_page_shows_what_its_code_prints(code: str, printed: str) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "docs/python.md", "exec"), {})
    assert output.getvalue() == printed


def test_package_offers_the_names_of_the_api() -> None:
    assert wlb.__all__ == sorted([*api.__all__, "SampleTrainer", "__version__"])
    for name in api.__all__:
        assert getattr(wlb, name) is getattr(api, name)
    with pytest.raises(AttributeError, match="no attribute 'plan_step'"):
        _ = wlb.plan_step


def test_page_names_each_public_function() -> None:
    functions = [name for name in api.__all__ if inspect.isfunction(getattr(api, name))]
    assert len(functions) == 7
    assert [name for name in functions if f"wlb.{name}(" not in PAGE] == []


def test_import_of_the_package_loads_nothing_heavy() -> None:
    script = (
        "import sys, megatron_wlb\n"
        "print({'numpy', 'yaml', 'torch', 'megatron', 'megatron_wlb.api'} & set(sys.modules))\n"
        "megatron_wlb.plan_steps\n"
        "print({'torch', 'megatron', 'matplotlib'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PROJECT
    )
    assert done.stdout.splitlines() == ["set()", "set()"]


@pytest.mark.parametrize("packing", ["original", "fixed-greedy:2", "wlb:2", "hold", "hold:1"])
def test_planned_steps_run_each_token_once(packing: str) -> None:
    lengths = np.random.default_rng(3).integers(1, 150, 90)
    layout = wlb.Parallelism(tp_size=2, dp_size=2, sequence_parallel=True)
    plans = list(wlb.plan_steps(lengths, packing=packing, layout=layout, **BATCH))
    seen = sorted(
        (d.number, d.offset + at) for p in plans for d in p.documents for at in range(d.length)
    )
    assert seen == [(index, at) for index, n in enumerate(lengths) for at in range(n)]
    assert {len(plan.micro_batches) for plan in plans} == {2}
    assert all(m.padded_length % 2 == 0 for plan in plans for m in plan)


def _longest(plan: wlb.StepPlan) -> float:
    return max(micro_batch.predicted_us for micro_batch in plan)


def test_simulated_step_is_of_the_planned_documents() -> None:
    layout = wlb.Parallelism(cp_size=2, pp_size=2)
    lengths = [4096, 3072, 2048, 1024] * 4
    settings = {"num_micro_batches": 4, "layout": layout, "packing": "wlb"}
    plans = list(wlb.plan_steps(lengths, window=4096, **settings))
    lines = [wlb.simulate_step(plan, layout, model="550m", hardware="a100") for plan in plans]
    assert [line.num_tokens for line in lines] == [plan.num_tokens for plan in plans]
    slowest, heaviest = max(lines, key=lambda line: line.step_us), max(plans, key=_longest)
    assert slowest is lines[plans.index(heaviest)]
    assert slowest.peak_bytes > 0


@pytest.mark.parametrize(
    ("lengths", "settings", "complaint"),
    [
        ([], {}, "lengths has no lengths"),
        ([3, 0], {}, "length number 2 is 0"),
        ([1.5], {}, "holds float64"),
        ("no/such/corpus", {}, "no/such/corpus"),
        ([3], {"packing": "holt"}, "hold"),
        ([3], {"packing": "wlb:x"}, "not a number of batches"),
        ([3], {"window": 1}, "window is 1"),
        ([3], {"seed": -1}, "seed is -1"),
        ([3], {"max_tokens": 63}, "63"),
        ([3], {"num_micro_batches": 0}, "0"),
        ([3], {"num_micro_batches": "a"}, "num_micro_batches is 'a'; give a whole number"),
        ([3], {"packing": 3}, "packing is 3; give a name"),
    ],
)
def test_api_refuses_at_the_call(lengths: list[int], settings: dict, complaint: str) -> None:
    for function in (wlb.plan_steps, wlb.evaluate_packing):
        with pytest.raises(wlb.WLBError, match=complaint):
            function(lengths, **{**BATCH, **settings})


def test_api_says_what_an_argument_has_to_be() -> None:
    plan = next(wlb.plan_steps([3, 4], **BATCH))
    for call, complaint in (
        (lambda: wlb.plan_steps([3], **BATCH, layout=3), "layout is 3; give a Parallelism"),
        (lambda: wlb.plan_steps([3], **BATCH, cost="7b"), "cost is '7b'; give a cost"),
        (lambda: wlb.simulate_step(plan, 3), "layout is 3; give a Parallelism"),
        (lambda: wlb.simulate_step(3), "plan is 3; give a StepPlan"),
        (lambda: wlb.simulate_step(plan, model=3), "model is 3; give a name, such as 7b"),
        (lambda: wlb.model_cost("7b", hardware=None), "hardware is None; give a name"),
    ):
        with pytest.raises(wlb.WLBError, match=complaint):
            call()

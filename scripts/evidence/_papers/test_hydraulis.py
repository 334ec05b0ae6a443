from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from _running import run_script

from _papers import hydraulis
from _papers.hydraulis import BREAKDOWN, CASES, HARDWARE, Case
from _papers.paper import Effort, K

QUICK = Effort(4, (1,), 0, hardware=HARDWARE)
SMALL = Case("7b", 8, "GitHub", "F1")


def test_iterations_have_the_printed_tokens_and_lengths() -> None:
    for case in (SMALL, Case("7b", 8, "CommonCrawl", "F3")):
        context, tokens = hydraulis.CONFIGURATIONS[case.configuration]
        steps = hydraulis.steps_of(case, 12, seed=1)
        sums = [sum(document.length for document in step) for step in steps]
        assert len(steps) == 12 and max(d.length for step in steps for d in step) <= context
        assert abs(np.mean(sums) / tokens - 1) < 0.1
    other = hydraulis.steps_of(SMALL, 12, seed=2)
    assert [d.length for d in other[0]] != [d.length for d in hydraulis.steps_of(SMALL, 12, 1)[0]]


def test_longest_of_common_crawl_is_as_the_appendix_says() -> None:
    """1.6M tokens have a longest document between 15K and 32K (A.1); 100K often one far below."""
    random = np.random.default_rng(0)
    drawn = np.minimum(hydraulis.DATA["CommonCrawl"](random, 48_000), 32 * K)
    large, small = (
        [part.max() for part in np.array_split(drawn, round(drawn.sum() / tokens))]
        for tokens in (1.6e6, 1e5)
    )
    assert min(large) > 12 * K and np.median(large) > 15 * K
    assert np.median(small) < 12 * K


def test_every_layout_of_table_3_holds_its_context() -> None:
    for case in CASES:
        if case.data == "GitHub" or case.configuration == "F3":
            continue  # The same layouts and contexts.
        assert hydraulis.printed_layout(case).strategy.max_tokens >= case.context


def test_strategies_are_faster_than_packing_in_the_printed_layout() -> None:
    found = hydraulis.end_to_end(SMALL, QUICK)
    assert min(found.over_packed()) > 1.1
    assert all(gain > 0.97 for gain in found.over_equal())  # chosen by a bound on the exchange
    assert str(found.packed.strategy.replicas[0].scheme) == "tp2pp2"


def test_parts_of_hydraulis_add_up() -> None:
    dealt, base, by_time, static, chosen = hydraulis.ablation(
        replace(BREAKDOWN, configuration="F1"), QUICK
    )
    assert dealt.gap > 0.2 and chosen.gap < 0.1
    # Table 3's layout has a pipeline here, so the number of micro-batches matters.
    assert by_time.step_us[0] < 0.95 * base.step_us[0]
    assert chosen.step_us[0] <= static.step_us[0] < by_time.step_us[0]


def test_breakdown_has_the_exchange_hidden_and_not() -> None:
    parts = hydraulis.breakdown(BREAKDOWN, QUICK, 1)
    assert parts["unlike"].propagation_us == parts["overlapped"].propagation_us
    assert parts["overlapped"].exchange_us < parts["unlike"].exchange_us / 2
    assert parts["equal"].propagation_us > parts["unlike"].propagation_us


def test_script_makes_a_small_page_of_hydraulis(tmp_path: Path) -> None:
    done = run_script(
        "reproduce_paper.py", "--paper hydraulis --small --only breakdown --json --out", tmp_path
    )
    assert done.returncode == 0, done.stderr
    page = " ".join((tmp_path / "hydraulis.md").read_text().split())
    assert page.startswith("# Hydraulis's experiments, simulated") and "`a800`" in page
    assert "--paper hydraulis --small --only breakdown` in" in page
    (section,) = json.loads(done.stdout)["sections"]
    printed = [row["paper"] for row in section["rows"]]
    assert printed == [1.58, 1.31, 1.44] * 2
    all_adapters, one_adapter = (section["rows"][at]["simulated"] for at in (0, 3))
    assert one_adapter > 3 * all_adapters > 3  # TP 16 over two nodes is slower by one
    assert (tmp_path / "images" / "hydraulis-breakdown.png").read_bytes().startswith(b"\x89PNG")

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from helpers.machines import H100

from megatron_wlb.cost import Execution, ModelShape, Parallelism
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.length_statistics import LengthStatistics
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.simulator.baseline import baseline
from megatron_wlb.simulator.trial import Outcome, Steps, trials
from megatron_wlb.study.page import Page, examples, fastest

WINDOW = 8192
SHAPE = ModelShape(
    hidden_size=256, ffn_hidden_size=640, num_layers=8, num_attention_heads=8, num_query_groups=8,
    kv_channels=32, vocab_size=1024, gated=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def page() -> Page:
    source = LengthSource.of_distribution("reference")
    base = Run(
        SHAPE,
        Execution(Parallelism(cp_size=2, pp_size=2, vpp_size=2)),
        H100,
        WINDOW,
        4,
    )
    variants = [
        PackingSettings.parse(name, WINDOW, 2 * WINDOW) for name in ("original", "wlb", "hold")
    ]
    steps = Steps(source, num=5, seeds=(1, 2), warm_up=4)
    modes = ["per-sequence", "adaptive"]
    outcomes = [one for variant in variants for one in trials(base, variant, steps, modes)]
    lengths = source.lengths(20, window=WINDOW, seed=1)
    return Page(
        base, outcomes, baseline(base, steps), lengths, "7b <on> 4", "CP 2 × PP 2",
        (("documents", "a</script><b>bad</b>"),), "wlb simulate --x '<!--'",
    )  # fmt: skip


def data_of(html: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_page_needs_nothing_but_itself(page: Page) -> None:
    html = page.html()
    markup = re.sub(r'<script type="application/json".*?</script>', "", html, flags=re.DOTALL)
    urls = re.findall(r'(?:src|href)=["\']?([^"\' >]+)', markup)
    assert urls == ["data:,"]
    assert set(re.findall(r"https?://[^\"' ]+", markup)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in html
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", markup)


def test_nothing_that_users_name_becomes_markup(page: Page) -> None:
    html = page.html()
    assert "<title>7b &lt;on&gt; 4</title>" in html
    assert "<b>bad" not in html and "'<!--'" not in html
    found = data_of(html)
    assert found["facts"] == [["documents", "a</script><b>bad</b>"]]
    assert found["texts"]["command"] == "wlb simulate --x '<!--'"
    assert "$DATA" not in html and "$TITLE" not in html


def test_page_says_that_it_is_simulated(page: Page) -> None:
    assert "Simulated: no time or byte in this page was measured" in page.html()
    assert page.base.said in page.data()["texts"]["compared"]
    assert "some of them assumed" in page.data()["texts"]["method"]


def test_table_has_every_outcome_and_marks_the_fastest_that_fits(page: Page) -> None:
    rows = page.data()["table"]
    assert [row["cells"][0] for row in rows] == [
        f"{packing}, {sharding}"
        for packing in ("original", "wlb", "hold")
        for sharding in ("per-sequence", "adaptive")
    ]
    best = fastest(page.outcomes)
    assert [row["best"] for row in rows] == [outcome is best for outcome in page.outcomes]
    assert len(page.data()["columns"]) == len(rows[0]["cells"])

    big = replace(best, out_of_memory="out of memory: pipeline rank 0 at F1.3")
    others = [big if outcome is best else outcome for outcome in page.outcomes]
    assert fastest(others) is not big
    marked = [row for row in replace(page, outcomes=others).data()["table"] if row["over"]]
    assert len(marked) == 1 and not marked[0]["best"]


def test_page_recommends_nothing_where_nothing_fits_memory(page: Page) -> None:
    none = [replace(one, out_of_memory="out of memory: rank 0") for one in page.outcomes]
    assert fastest(none) is None and len(examples(none)) == 3
    found = replace(page, outcomes=none).data()
    assert not any(row["best"] for row in found["table"])
    assert "None fits memory" in found["texts"]["compared"]
    assert "stands out" not in found["texts"]["compared"]
    assert [said for _, said in found["cards"]] == [
        f"the least peak, of {page.scenario.limit_gib:.1f} allowed: none fits"
    ]


def test_histogram_counts_the_pieces_of_long_documents_as_corpus_stats_does(page: Page) -> None:
    lengths = np.array([WINDOW] * 20 + [64 * WINDOW])
    found = replace(page, lengths=lengths).data()["lengths"]
    part = LengthStatistics.of(lengths, WINDOW).part(WINDOW + 1)
    assert found["series"][2]["shares"][-1] == pytest.approx(part.attention_share, abs=1e-4)
    assert part.attention_share < 0.8
    assert f"in pieces of at most {WINDOW:,} tokens" in found["text"]


def test_examples_are_the_base_and_each_packing_once(page: Page) -> None:
    drawn = examples(page.outcomes)
    assert drawn[0] is page.outcomes[0]
    assert [o.setting.name for o in drawn[1:]] == ["wlb", "hold"]
    assert len({o.sharding for o in drawn[1:]}) == 1


def test_histogram_counts_every_document_token_and_pair_once(page: Page) -> None:
    found = page.data()["lengths"]
    assert [len(s["shares"]) for s in found["series"]] == [len(found["edges"]) - 1] * 3
    for series in found["series"]:
        assert sum(series["shares"]) == pytest.approx(1, abs=1e-3)
    # Documents of exactly a window stand in the bar that ends there.
    documents, tokens, work = (s["shares"][-1] for s in found["series"])
    assert found["edges"][-1] == WINDOW
    expected = page.lengths[page.lengths > WINDOW // 2].astype(float)
    assert documents == pytest.approx(len(expected) / len(page.lengths), abs=1e-4)
    assert tokens == pytest.approx(expected.sum() / page.lengths.sum(), abs=1e-4)
    assert work == pytest.approx(
        (expected**2).sum() / (page.lengths.astype(float) ** 2).sum(), abs=1e-4
    )
    assert documents < tokens < work


def test_histogram_has_powers_of_two_in_the_bar_that_ends_there(page: Page) -> None:
    lengths = np.array([1, 2, 3, 4, 4, 4, 8192])
    found = replace(page, lengths=lengths).data()["lengths"]
    assert found["edges"][:3] == [1, 2, 4]
    shares = [round(7 * share) for share in found["series"][0]["shares"]]
    assert shares == [2, 4, *[0] * 10, 1]


def test_histogram_of_equal_lengths_has_a_bar(page: Page) -> None:
    found = replace(page, lengths=np.full(5, 1)).data()["lengths"]
    assert found["series"][0]["shares"][0] == 1


def test_timelines_are_those_of_the_simulated_steps(page: Page) -> None:
    for line, outcome in zip(page.data()["timelines"], examples(page.outcomes), strict=True):
        of = outcome.example.timeline
        assert line["step_us"] == of.step_us and len(line["ranks"]) == 2 and line["chunks"] == 2
        for rank, actions in enumerate(line["ranks"]):
            compute = [a for a in actions if a[0] in "FB"]
            assert len(compute) == 2 * 2 * 4
            assert sum(a[4] - a[3] for a in compute) == pytest.approx(of.busy_us[0][rank], abs=2)
            assert all(a[4] <= b[3] + 0.11 for a, b in itertools.pairwise(actions))
            assert actions[-1][4] == pytest.approx(of.step_us, abs=0.1)


def test_memory_parts_add_up_to_the_peak(page: Page) -> None:
    for packing in page.data()["memory"]:
        for rank in packing["ranks"]:
            assert sum(gib for _, gib, _ in rank["parts"]) == pytest.approx(rank["peak"])
            assert all(gib >= 0 for _, gib, _ in rank["parts"])


def test_levels_are_the_outcomes(page: Page) -> None:
    def values(outcome: Outcome) -> list[float]:
        return [outcome.pp_imbalance, outcome.cp_imbalance, outcome.dp_imbalance]

    for level, outcome in zip(page.data()["levels"], page.outcomes, strict=True):
        assert [v for _, v, _ in level["values"]] == pytest.approx(values(outcome), abs=1e-4)

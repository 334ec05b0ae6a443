"""Every token of a real corpus is planned exactly once an epoch, under every packing."""

from __future__ import annotations

import sysconfig
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_wlb.data.build_corpus import build_corpus
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.from_config import known_cost, make_planner
from megatron_wlb.settings.config import Config, from_flat

Piece = tuple[int, int, int]
"""Tokens ``[start, stop)`` of a stored document, and how many of them have a label."""


@pytest.fixture(scope="module")
def code_corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two corpora of this Python's own functions and classes, of up to some 40,000 bytes."""
    folder, stdlib = tmp_path_factory.mktemp("code"), Path(sysconfig.get_path("stdlib"))
    parts = {"first": ("argparse", "ast", "inspect", "tarfile"), "second": ("typing", "doctest")}
    for name, modules in parts.items():
        files = [stdlib / f"{module}.py" for module in modules]
        build_corpus(files, folder / name, python_definitions=True)
    return [folder / name for name in parts]


def all_plans(config: Config, dp_size: int) -> list[StepPlan]:
    """Steps until there are no more."""
    corpora = Corpora.open(config)
    cost = known_cost(config, 256)
    assert cost is not None
    planner = make_planner(config, corpora, cost, dp_size, num_epochs=2)
    plans = []
    while (plan := planner.next_plan()) is not None:
        plans.append(plan)
        assert len(plans) < 10_000, "does not end"
    return plans


def pieces(plans: Iterable[StepPlan]) -> dict[tuple[int, int, int], list[Piece]]:
    """What ran, in stored order, by epoch, corpus and document."""
    found: dict[tuple[int, int, int], list[Piece]] = defaultdict(list)
    for plan in plans:
        for micro_batch in plan:
            for span in micro_batch.spans:
                d = span.document
                start, stop = d.offset + span.start, d.offset + span.stop
                found[d.epoch, d.corpus, d.number].append((start, stop, span.num_targets))
    return {key: sorted(value) for key, value in found.items()}


def assert_each_token_once(plans: Iterable[StepPlan], lengths: list[list[int]], epochs: int) -> int:
    """The pieces of each document tile it, in each epoch; returns how many documents were cut."""
    found = pieces(plans)
    documents = [(c, i) for c, corpus in enumerate(lengths) for i in range(len(corpus))]
    assert sorted(found) == [(e, c, i) for e in range(epochs) for c, i in documents]
    for (_, corpus, index), of_document in found.items():
        length = lengths[corpus][index]
        assert of_document[0][0] == 0
        assert of_document[-1][1] == length
        for before, after in pairwise(of_document):
            assert before[1] == after[0], (corpus, index, of_document)
        # The stored document's last token has no successor; every other one has.
        assert sum(targets for _, _, targets in of_document) == length - 1
    return sum(len(of_document) > 1 for of_document in found.values())


PACKINGS: dict[str, dict[str, Any]] = {
    "original": {"wlb_packing": "original"},
    "fixed-greedy": {"wlb_packing": "fixed-greedy", "wlb_fixed_batches": 3},
    "fixed-solver": {"wlb_packing": "fixed-solver", "wlb_solver_limit": 0.02},
    "wlb": {"wlb_packing": "wlb"},
    "hold": {"wlb_packing": "hold"},
    "hold-look-ahead": {"wlb_packing": "hold", "wlb_look_ahead": 3, "wlb_delay_price": 0.01},
}


def settings(prefixes: list[Path], packing: str, **others: object) -> Config:
    if packing == "fixed-solver":
        pytest.importorskip("ortools")
    values = PACKINGS[packing] | {
        "data_path": tuple(map(str, prefixes)),
        "split": "1",
        "seq_length": 4096,
        "hidden_size": 32,
    }
    return from_flat(values | others)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("num_micro_batches", "dp_size"), [(8, 2), (3, 1), (4, 4)])
def test_every_token_is_planned_once_an_epoch(
    packing: str, num_micro_batches: int, dp_size: int, code_corpora: list[Path]
) -> None:
    lengths = [Corpus.open(prefix).lengths.tolist() for prefix in code_corpora]
    assert max(map(max, lengths)) > 3 * 4096, "no long documents: splitting is not tested"
    config = settings(code_corpora, packing, global_batch_size=num_micro_batches)
    plans = all_plans(config, dp_size)
    assert assert_each_token_once(plans, lengths, epochs=2)
    for plan in plans:
        assert [len(rank) for rank in plan.micro_batches] == [
            num_micro_batches // dp_size
        ] * dp_size
        assert max(m.length for m in plan) <= 2 * 4096
    if packing.startswith(("wlb", "hold")):
        assert any(plan.delay_steps for plan in plans), "nothing was delayed: no test of flushing"
    assert plans[-1].num_waiting == 0


def test_a_token_lost_or_run_twice_is_noticed(code_corpora: list[Path]) -> None:
    """Negative control of the test above."""
    lengths = [Corpus.open(prefix).lengths.tolist() for prefix in code_corpora]
    plans = all_plans(settings(code_corpora, "hold", global_batch_size=8), 1)
    for wrong in (plans[1:], [*plans, plans[3]]):
        with pytest.raises(AssertionError):
            assert_each_token_once(wrong, lengths, epochs=2)

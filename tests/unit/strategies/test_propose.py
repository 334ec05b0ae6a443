from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.cost import Execution, ModelShape, load_hardware
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.balance.dispatch import StepDocuments
from megatron_wlb.planning.balance.replica_costs import Scheme
from megatron_wlb.strategies.plan.assigner import Assigner, Candidate, assign
from megatron_wlb.strategies.plan.propose import StrategySpace, _rounded, propose, relaxed
from megatron_wlb.strategies.plan.strategy import Strategy

SHAPE = ModelShape(
    1024, 2816, 8, 8, 8, 128, 8192, True, rms_norm=True, linear_bias=False, tied_embeddings=False
)
HARDWARE = replace(load_hardware("a100"), launch_us=0.0)
SCHEMES = tuple(map(Scheme.parse, ("tp1", "tp2", "tp4", "tp8")))
SPACE = StrategySpace(SHAPE, Execution(), HARDWARE, 8, memory_gib=3.4, schemes=SCHEMES)
LONGEST = max(tokens for _, tokens in SPACE.costs)


def steps(seed: int, num: int, documents: int = 60, share: float = 0.04) -> list[list[int]]:
    """Mostly short documents, and in some steps one that only TP 8 takes."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        lengths = np.clip(random.lognormal(math.log(500), 0.9, documents), 32, 4000)
        long = random.random(documents) < share / 4
        lengths[long] = random.integers(LONGEST // 2, LONGEST, int(long.sum()))
        found.append(lengths.astype(int).tolist())
    return found


def total_us(candidates: list[Candidate], some: list[list[int]]) -> float:
    return sum(Assigner(candidates).choose(lengths).step_us for lengths in some)


def every_strategy(space: StrategySpace) -> Iterator[Strategy]:
    """All there are, whatever ranks they leave idle."""
    kinds = sorted(space.costs, key=lambda kind: -kind[0].num_ranks)

    def counts(at: int, left: int) -> Iterator[tuple[int, ...]]:
        if at == len(kinds):
            yield ()
            return
        for number in range(left // kinds[at][0].num_ranks + 1):
            for rest in counts(at + 1, left - number * kinds[at][0].num_ranks):
                yield (number, *rest)

    for numbers in counts(0, space.num_devices):
        if any(numbers):
            yield Strategy.of(
                space.cluster, [k for k, n in zip(kinds, numbers, strict=True) for _ in range(n)]
            )


def test_schemes_take_longer_documents_with_more_ranks() -> None:
    tokens = [tokens for _, tokens in SPACE.costs]
    assert len(tokens) == 4 and tokens == sorted(tokens) and tokens[0] < 8000 < LONGEST / 2
    tiny = replace(SPACE, memory_gib=0.7)
    assert tiny.rejected and all("GiB" in reason for reason in tiny.rejected.values())
    assert not tiny.rejected.keys() & {scheme for scheme, _ in tiny.costs}


def test_relaxed_strategy_is_the_best_there_is() -> None:
    """Where fractions are fine, all ranks are busy with what takes least of their time."""
    lengths = np.sort(np.concatenate(steps(1, 6)))
    first, *others = relaxed([*SPACE.costs.values()], 8, lengths)
    assert sum(s.num_replicas * s.costs.scheme.num_ranks for s in first) <= 8 + 1e-9
    assert max(s.costs.max_tokens for s in first) >= lengths[-1]
    per_rank = [
        np.where(lengths <= c.max_tokens, c.rank_us(lengths.tolist()).max(axis=0), np.inf)
        * c.scheme.num_ranks
        for c in SPACE.costs.values()
    ]
    best_us = np.min(per_rank, axis=0).sum() / 8
    # What these shares take, each with the documents for which they are best.
    names = [id(c) for c in SPACE.costs.values()]
    own = np.argmin(per_rank, axis=0)
    for share in first:
        at = names.index(id(share.costs))
        work_us = per_rank[at][own == at].sum()
        took_us = work_us / (share.num_replicas * share.costs.scheme.num_ranks)
        assert took_us == pytest.approx(best_us, rel=0.25)  # intervals, and 1/128 of the ranks
    assert others and all(s.costs.max_tokens for s in others[-1])


@pytest.mark.parametrize("numbers", [[0.3, 2.2, 9.0], [1.0, 1.5], [2.0]])
def test_rounded_strategies_are_near_and_fit(numbers: list[float]) -> None:
    sizes = [8, 4, 1][: len(numbers)]
    found = list(_rounded(numbers, sizes, 32))
    assert len(set(found)) == len(found) >= 2 ** (len(numbers) - 1) - 1 >= 0 and found
    for counts in found:
        assert sum(n * size for n, size in zip(counts, sizes, strict=True)) <= 32
    scaled = 32 / sum(n * s for n, s in zip(numbers, sizes, strict=True))
    assert {counts[0] for counts in found} <= {
        math.floor(numbers[0] * scaled), math.ceil(numbers[0] * scaled), 32 // sizes[0],
    }  # fmt: skip


def test_proposal_is_near_the_best_of_all_strategies() -> None:
    """Against every strategy of 8 ranks, chosen step by step."""
    sample, other = steps(2, 8), steps(3, 6)
    found = propose(SPACE, sample, longest=LONGEST)
    every = [SPACE.candidate(strategy) for strategy in every_strategy(SPACE)]
    assert len(every) > 20 and len(found.candidates) <= 10
    ours_us, best_us = total_us([*found.candidates], other), total_us(every, other)
    equal_us = total_us([found.best_equal], other)
    assert ours_us < 1.05 * best_us
    assert ours_us < 0.97 * equal_us  # there is something to gain here


def test_proposal_takes_the_longest_document_that_may_come() -> None:
    short = [[300, 700, 900] * 8] * 4
    without = propose(SPACE, short)
    assert all(candidate.strategy.max_tokens >= 900 for candidate in without.candidates)
    found = propose(SPACE, short, longest=LONGEST)
    assert Assigner(found.candidates).choose([LONGEST]).step_us > 0
    assert found.best_equal.strategy.max_tokens == LONGEST
    with pytest.raises(ConfigError, match=f"takes a document of {LONGEST + 1} tokens, the most"):
        propose(SPACE, short, longest=LONGEST + 1)


def test_equal_layout_stays_where_nothing_is_gained() -> None:
    """Negative control: only documents that one scheme alone takes."""
    sample = [[LONGEST - 16 * n for n in range(4)] for _ in range(4)]
    found = propose(SPACE, sample)
    assert [str(c.strategy) for c in found.candidates] == [str(found.best_equal.strategy)]
    assert found.best_equal.strategy.replicas[0].scheme == Scheme(8)


def test_proposal_is_the_same_each_time() -> None:
    sample = steps(4, 4, documents=30)
    texts = [[str(c.strategy) for c in propose(SPACE, sample).candidates] for _ in range(2)]
    assert texts[0] == texts[1]
    fresh = replace(SPACE, memory_gib=3.4)
    assert [str(c.strategy) for c in propose(fresh, sample).candidates] == texts[0]


def test_strategies_of_a_file_are_priced_and_checked() -> None:
    given = Strategy.parse("tp4:2k+4*tp1:1k", SPACE.cluster)
    candidate = SPACE.candidate(given)
    found = assign(StepDocuments([2048, *[1000] * 8]), candidate)
    assert found is not None and found.step_us > candidate.fixed_us > 0
    assert assign(StepDocuments([2049]), candidate) is None
    with pytest.raises(ConfigError, match="to take documents of 1048576 tokens, but memory"):
        SPACE.candidate(Strategy.parse("tp1:1024k", SPACE.cluster))


def test_exchange_that_memory_does_not_hold_at_once_runs_beside_no_pass() -> None:
    strategy = Strategy.of(SPACE.cluster, [(Scheme(), 256)] * 8)
    wide, tight = (
        replace(SPACE, memory_gib=memory_gib).candidate(strategy) for memory_gib in (8.0, 1.2)
    )
    assert all(some < every for some, every in zip(tight.push_us, wide.push_us, strict=True))
    # Weights have half the bytes of gradients, so more of them are under way at a time.
    assert wide.push_us[0] / tight.push_us[0] > 1.9 * wide.pull_us[0] / tight.pull_us[0] > 1
    whole_us, parts_us = (one.pull_us[0] + one.push_us[0] for one in (wide, tight))
    assert tight.fixed_us - wide.fixed_us == pytest.approx(whole_us - parts_us)

"""Samples that begin alike: what is found, what micro-batches run of it, and plans."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from helpers.workload import make_trees

import megatron_wlb as wlb
from megatron_wlb.cost.step_costs import StageCosts
from megatron_wlb.errors import ConfigError, PackingError
from megatron_wlb.plan import MicroBatchPlan, RowRun, Sharing, StepPlan, TreePart
from megatron_wlb.planning.balance.shared_plan import check_shared
from megatron_wlb.planning.balance.trees import SharedPrefixes, part_of
from megatron_wlb.runtime.stepping.step import check_chains
from megatron_wlb.settings.command_line import parse

Tokens = npt.NDArray[np.int64]
TREES = make_trees(59)
PP4 = wlb.Parallelism(tp_size=4, pp_size=4, sequence_parallel=True)


def samples_of(step: int) -> list[Tokens]:
    return [TREES.corpus.stored[document.number] for document in TREES.steps[step]]


def group(prompt: int, answers: int, longest: int, seed: int = 0) -> list[Tokens]:
    """Answers of unlike lengths to one prompt."""
    random = np.random.default_rng(seed)
    first = random.integers(0, 1000, prompt)
    return [
        np.concatenate([first, [n], random.integers(0, 1000, random.integers(1, longest))])
        for n in range(answers)
    ]


def common(a: Tokens, b: Tokens) -> int:
    return next((n for n, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]),
                min(len(a), len(b)))  # fmt: skip


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("seed", range(20))
def test_neighbours_share_all_that_there_is(step: int, seed: int) -> None:
    """Of any samples: what is left are the nodes of their trie, each once."""
    samples = samples_of(step)
    prefixes = SharedPrefixes.found(samples, least=1)
    assert sorted(prefixes.order) == list(range(len(samples)))
    random = np.random.default_rng(seed)
    some = random.choice(len(samples), random.integers(1, len(samples) + 1), replace=False)
    found = list(zip(*prefixes.neighbours(some.tolist()), strict=True))
    nodes = {tuple(samples[n][:stop]) for n in some for stop in range(1, len(samples[n]) + 1)}
    assert sum(len(samples[n]) - shared for n, shared in found) == len(nodes)
    for (before, _), (n, shared) in pairwise(found):
        assert shared == common(samples[before], samples[n])


def test_short_runs_are_no_branches() -> None:
    """Answers that begin alike by chance branch off where the first one does."""
    prompt = np.arange(200)
    answers = [[1, 2, 3, 4], [1, 2, 9], [1, 5], [7, 7], np.arange(300, 400), np.arange(300, 390)]
    samples = [np.concatenate([prompt, answer]) for answer in answers]
    prefixes = SharedPrefixes.found(samples, least=8)
    assert sorted(prefixes.common) == [0, 200, 200, 200, 200, 290]
    assert sorted(SharedPrefixes.found(samples, least=250).common) == [0] * 5 + [290]


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("step", [0, 1])
def test_each_path_is_its_sample(step: int, ahead: int) -> None:
    samples = samples_of(step)
    prefixes = SharedPrefixes.found(samples, least=1)
    paths = prefixes.paths(range(len(samples)), list(map(len, samples)), ahead)
    spans, sharing = part_of(paths, 0, sum(path.document.length for path in paths))
    plan = MicroBatchPlan(0, tuple(spans), 1024, 1.0, sharing=sharing)
    rows = np.concatenate([samples[s.document.number][s.document.offset :] for s in spans])
    owners = [samples[s.document.number] for s in spans for _ in range(s.length)]
    first = 0
    for span, runs, place in zip(spans, sharing.above, plan.places, strict=True):
        shared = np.concatenate([np.arange(*run) for run in (*runs, (0, 0))])
        own = np.arange(first, first := first + span.length)
        sample = samples[span.document.number]
        assert rows[np.concatenate([shared, own])].tolist() == sample.tolist()
        assert place == len(shared) == span.document.offset
        for at, row in enumerate(shared):  # Whoever runs it predicts the same at each depth.
            ahead_of = slice(at, at + 2 + ahead)
            assert owners[row][ahead_of].tolist() == sample[ahead_of].tolist()
            assert at + 1 + ahead < len(sample)
    assert sum(before for before, _ in plan.sharing.branches(spans)) > 100
    assert plan.num_targets == sum(len(sample) - 1 for sample in samples)


def test_given_branches_are_what_is_found() -> None:
    samples = group(100, 5, 40) + group(300, 3, 200, seed=1)
    given = [None, (0, 100), (1, 100), (0, 100), (3, 100), None, (5, 300), (6, 300)]
    lengths = list(map(len, samples))
    prefixes = SharedPrefixes.of(given, lengths)
    assert sorted(prefixes.common) == sorted(SharedPrefixes.of(samples, lengths).common)
    assert prefixes.neighbours([1, 4, 7]) == ([1, 4, 7], [0, 100, 0])


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        ([None], "shared has 1 entries for 2 samples"),
        ([None, (1, 3)], r"shared has \(1, 3\) for sample 1; give None, or an earlier sample"),
        ([None, (0, 9)], r"shared has \(0, 9\) for sample 1"),
        ([None, (0, 0)], r"shared has \(0, 0\) for sample 1"),
        ([None, (0,)], r"shared has \(0,\) for sample 1"),
        ([None, (0, 1.5)], r"shared has \(0, 1.5\) for sample 1"),
        ([[1] * 8, [1] * 7], "2 entries for 2 samples, not all of which are tuples or None"),
        ([[1] * 8], "1 entries for 2 samples"),
        ([None, [0, 4]], "give each sample a tuple"),
        ([[1] * 8, [[1], [2, 3]]], "give each sample a tuple"),
        (True, "shared is True; give each sample a tuple"),
    ],
)
def test_wrong_branches_are_refused(shared: list, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wlb.plan_batch([8, 8], max_tokens=64, shared=shared)


def test_histories_are_rows_of_the_longest_sample() -> None:
    """Each turn begins with the whole one before; a branch of an early turn is one of the last."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 1000, 500)
    turns = [tokens[:stop] for stop in (100, 180, 300, 500)]
    side = np.concatenate([tokens[:150], random.integers(1000, 2000, 60)])
    samples = [*turns[:2], side, *turns[2:], tokens[:90]]
    given = [None, (0, 100), (1, 150), (1, 180), (3, 300), (0, 90)]
    lengths = list(map(len, samples))
    prefixes = SharedPrefixes.of(given, lengths)
    assert prefixes.order[0] == 4  # the longest
    assert sorted(prefixes.common) == [0, 90, 100, 150, 180, 300]
    paths = prefixes.paths(range(6), lengths, 0)
    assert all(len(path.above) <= 1 for path in paths)


def test_samples_up_to_the_cap_are_planned() -> None:
    """Above its last multiple they run in slices, and never inside a micro-batch."""
    lengths, given = [1001, 900, 901], [None, (0, 800), (0, 800)]
    for layout in (PP4, wlb.Parallelism(tp_size=2, pp_size=2, vpp_size=2, dp_size=2)):
        plan = wlb.plan_batch(
            lengths, max_tokens=1001, layout=layout, cost="7b", shared=given, slices=True
        )
        assert max(m.padded_length for m in plan) <= 1001
        wlb.simulate_step(plan, layout)


def test_no_micro_batch_is_empty_on_all_ranks() -> None:
    for prompt, answers, longest in ((32000, 16, 2000), (3000, 4, 500)):
        samples = [s for seed in range(2) for s in group(prompt, answers, longest, seed)]
        plan = wlb.plan_batch(
            list(map(len, samples)), max_tokens=65536, layout=wlb.Parallelism(pp_size=2),
            cost="7b", shared=samples,
        )  # fmt: skip
        assert all(any(m.length for m in each) for each in zip(*plan.micro_batches, strict=True))


@pytest.mark.parametrize("slices", [False, True])
def test_sharing_never_makes_steps_with_experts_slower(slices: bool) -> None:
    """Replicas wait for each other: what is fastest for each alone may not be."""
    random = np.random.default_rng(5)
    layout = wlb.Parallelism(pp_size=2, dp_size=8, ep_size=8, etp_size=1)
    for number, size, prompt, median in ((40, 4, 200, 7.5), (64, 2, 100, 9.0)):
        drawn = np.minimum(60_000, random.lognormal(median, 1.2, number))
        lengths = [prompt + 100 + int(answer) for answer in drawn]
        given = [None if n % size == 0 else (n - n % size, prompt) for n in range(number)]
        us = []
        for shared in (None, given):
            plan = wlb.plan_batch(
                lengths, max_tokens=65536, layout=layout, cost="qwen3-30b-a3b", shared=shared,
                slices=slices,
            )  # fmt: skip
            us.append(wlb.simulate_step(plan, layout, model="qwen3-30b-a3b").pipeline_us)
        assert us[1] < 1.01 * us[0]


@pytest.mark.parametrize("slices", [False, True])
def test_branches_with_states_have_room_for_these(slices: bool) -> None:
    lengths = [4096 + number for number in range(66, 104) for _ in range(16)]
    plan = wlb.plan_batch(
        lengths, max_tokens=8192, layout=wlb.Parallelism(pp_size=4), cost="qwen3.5-35b-a3b",
        shared=[None, *[(0, 4096)] * (len(lengths) - 1)], slices=slices,
    )  # fmt: skip
    assert any(m.sharing.tree for m in plan) == slices
    assert 6000 < max(m.length + 20 * len(m.spans) for m in plan) < 8192


@pytest.mark.parametrize(
    ("cost", "layout"),
    [
        ("qwen3.5-35b-a3b", wlb.Parallelism(pp_size=4)),
        ("qwen3-30b-a3b", wlb.Parallelism(pp_size=4, dp_size=4, ep_size=4, etp_size=1)),
    ],
)
def test_trees_of_models_with_states_and_experts(cost: str, layout: wlb.Parallelism) -> None:
    """Replicas that share experts have chains alike, and some of their micro-batches are empty. A
    large tree runs in as many as its work asks for, whatever others run beside it.
    """
    random = np.random.default_rng(0)
    given: list[tuple[int, int] | None] = []
    for size in random.choice([2, 4, 12, 16], 13).tolist():
        given += [None, *[(len(given), 24000)] * (size - 1)]
    lengths = (24000 + random.integers(1000, 12000, len(given))).tolist()
    inside, trees = (
        wlb.plan_batch(
            lengths, max_tokens=65536, layout=layout, cost=cost, shared=given, slices=slices
        )
        for slices in (False, True)
    )
    assert any(m.sharing.tree for m in trees) and len(set(trees.chains)) == 1
    assert any(not m.length for m in trees) == (layout.dp_size > 1)
    assert sorted(document.number for document in trees.documents) == [*range(len(given))]
    check_chains(trees)
    times_us = [m.predicted_us for m in trees if m.length]
    assert max(times_us) < 1.5 * np.mean(times_us)
    us = [wlb.simulate_step(plan, layout, model=cost).pipeline_us for plan in (inside, trees)]
    assert us[1] < 0.85 * us[0]


def test_keys_that_ranks_copy_are_few() -> None:
    """Under context parallelism at most four times S_max in a micro-batch."""
    samples = group(16000, 128, 64)
    layout = wlb.Parallelism(tp_size=4, cp_size=2, pp_size=2, sequence_parallel=True)
    for slices in (False, True):
        plan = wlb.plan_batch(
            list(map(len, samples)), max_tokens=32768, layout=layout, cost="7b",
            shared=samples, slices=slices,
        )  # fmt: skip
        assert plan.num_tokens < 0.3 * sum(map(len, samples))
        keys = [sum(m.places) + m.length for m in plan]
        assert max(keys) <= 4.5 * 32768


def test_groups_do_not_share() -> None:
    with pytest.raises(ConfigError, match="shared prefixes and groups of samples do not go"):
        wlb.plan_batch([8, 8], max_tokens=64, shared=[None, (0, 4)], groups=[0, 0])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--attention-dropout 0.1", "--attention-dropout: one draw would serve all"),
        ("--hidden-dropout 0.1", "--hidden-dropout: one draw would serve all"),
        (
            "--num-experts 4 --moe-router-load-balancing-type seq_aux_loss "
            "--moe-aux-loss-coeff 0.1",
            "seq_aux_loss: it counts the tokens of each sample",
        ),
    ],
)
def test_models_in_which_samples_cannot_share_are_refused(flags: str, said: str) -> None:
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64"
    check_shared(parse(sizes.split()))
    with pytest.raises(ConfigError, match=said):
        check_shared(parse(f"{sizes} {flags}".split()))


def planned(samples: list[Tokens], layout: wlb.Parallelism, shared: bool, **named: int) -> StepPlan:
    lengths = list(map(len, samples))
    given = samples if shared else None
    return wlb.plan_batch(
        lengths, max_tokens=16384, layout=layout, cost="7b", shared=given, **named
    )


@pytest.mark.parametrize(
    "layout",
    [
        wlb.Parallelism(),
        PP4,
        wlb.Parallelism(tp_size=2, cp_size=2, dp_size=3, sequence_parallel=True),
        wlb.Parallelism(pp_size=4, vpp_size=2, dp_size=2),
    ],
)
def test_plans_share_and_leave_nothing_out(layout: wlb.Parallelism) -> None:
    samples = [s for seed in range(6) for s in group(2000, 8, 1500, seed)]
    whole, shared = (planned(samples, layout, each) for each in (False, True))
    assert shared == planned(samples, layout, True)
    assert sorted(n for m in shared for n in m.samples) == list(range(len(samples)))
    assert shared.num_targets == whole.num_targets
    assert shared.num_tokens < 0.6 * whole.num_tokens
    assert max(m.padded_length for m in shared) <= 16384
    assert len({len(rank) for rank in shared.micro_batches}) == 1
    each = [wlb.simulate_step(plan, layout).pipeline_us for plan in (whole, shared)]
    assert each[0] / each[1] > 1.4
    first = next(m for m in shared if m.sharing.uses)
    digests = {whole.digest, shared.digest}
    for sharing in (Sharing(), first.sharing._replace(uses=first.sharing.uses[1:])):
        changed = replace(first, sharing=sharing)
        ranks = [[changed if m is first else m for m in own] for own in shared.micro_batches]
        digests.add(replace(shared, micro_batches=tuple(map(tuple, ranks))).digest)
    assert len(digests) == 4, "ranks agree on what is shared"


def test_samples_that_share_nothing_are_planned_as_ever() -> None:
    random = np.random.default_rng(0)
    samples = [random.integers(0, 1000, n) for n in random.integers(10, 4000, 40)]
    assert planned(samples, PP4, True) == planned(samples, PP4, False)


@pytest.mark.parametrize(
    ("layout", "memory_gib"),
    [
        (PP4, None),
        (wlb.Parallelism(tp_size=2, pp_size=4, dp_size=2, sequence_parallel=True), None),
        (wlb.Parallelism(tp_size=4, pp_size=4, vpp_size=2, sequence_parallel=True), 40.0),
    ],
)
def test_trees_run_all_rows_in_order(layout: wlb.Parallelism, memory_gib: float | None) -> None:
    """Faster than inside micro-batches, where prompts are long."""
    samples = [s for seed in range(3) for s in group(12000, 8, 5000, seed)]
    given = [None if n % 8 == 0 else (n - n % 8, 12000) for n in range(len(samples))]
    lengths = [len(sample) for sample in samples]
    named = {"max_tokens": 20480, "layout": layout, "cost": "7b", "memory_gib": memory_gib}
    inside, plan = (
        wlb.plan_batch(lengths, shared=given, slices=slices, **named) for slices in (False, True)
    )
    assert plan == wlb.plan_batch(lengths, shared=given, slices=True, **named)
    check_chains(plan)
    assert max(m.padded_length for m in plan) <= 20480
    assert plan.num_targets == inside.num_targets == sum(lengths) - len(lengths)
    tokens: dict[int, list[int]] = {}
    known: dict[tuple[int, int], list[int]] = {}  # rows of trees: which token of which sample
    for micro_batch in plan:
        rows = []
        name, start, *_ = tree = micro_batch.sharing.tree or (-micro_batch.index - 1, 0, 0)
        for span, above in zip(micro_batch.spans, micro_batch.sharing.above, strict=True):
            number, first = span.document.number, span.document.offset
            own = samples[number][first + span.start : first + span.stop]
            before = [token for run in above for token in known.get((name, 0), [])[slice(*run)]]
            if not before and above:  # in this micro-batch alone
                before = [token for run in above for token in rows[slice(*run)]]
            assert before == samples[number][: first + span.start].tolist()
            rows += own.tolist()
            known[name, 0] = known.get((name, 0), []) + own.tolist()
            tokens.setdefault(number, []).extend(range(first + span.start, first + span.stop))
        assert len(known[name, 0]) == start + micro_batch.length, tree
    assert all(own == list(range(own[0], lengths[n])) for n, own in tokens.items())
    assert sorted(tokens) == list(range(len(samples)))
    each = [wlb.simulate_step(each, layout).pipeline_us for each in (inside, plan)]
    assert any(m.sharing.tree for m in plan) and each[0] / each[1] > 1.1
    if memory_gib is not None:
        assert max(own.peak_bytes for own in wlb.simulate_step(plan, layout).memory) < 2**30 * 41


def test_number_of_micro_batches_is_kept() -> None:
    """Shared, samples fit where whole ones do not."""
    samples = group(4000, 12, 900)
    plan = planned(samples, wlb.Parallelism(), True, num_micro_batches=1)
    assert [len(rank) for rank in plan.micro_batches] == [1]
    with pytest.raises(PackingError, match="do not fit 1 micro-batches"):
        planned(samples, wlb.Parallelism(), False, num_micro_batches=1)


def test_predicted_times_know_the_rows_above() -> None:
    """But for attention's whole tiles, which simulation counts."""
    samples = group(30000, 8, 1000)
    plan = wlb.plan_batch(list(map(len, samples)), max_tokens=65536, cost="7b", shared=samples)
    (micro_batch,) = plan
    (times_us,) = wlb.simulate_step(plan).times_us
    assert micro_batch.predicted_us == pytest.approx(float(times_us.sum()), rel=0.04)
    alone = replace(plan, micro_batches=((replace(micro_batch, sharing=Sharing()),),))
    (less_us,) = wlb.simulate_step(alone).times_us
    assert float(less_us.sum()) < 0.94 * float(times_us.sum())


def test_rows_of_earlier_micro_batches_are_counted_once() -> None:
    tree = TreePart(0, 50, 90)
    above = ((RowRun(0, 20), RowRun(30, 40)), (RowRun(10, 35),), (RowRun(0, 20), RowRun(50, 60)))
    assert Sharing(above, tree=tree).rows_before == 40
    assert Sharing(above).rows_before == 0, "they are its own"


def test_branch_costs_what_its_sample_takes_more_than_the_prefix() -> None:
    """Of a cost whose parts are known, and of one that is only asked for documents."""
    known = wlb.DocumentCost(1.0, 2e-3, 2.0, 4e-3)

    class Opaque:
        def work(self, lengths):
            return known.work(lengths)

    for cost in (known, Opaque()):
        stages = StageCosts((cost,))
        plain = stages.times_us([[700, 200]])
        times = stages.times_us([[700, 200]], branches=[[(500, 200)]])
        more = stages.times_us([[700]]) - stages.times_us([[500]]) - stages.times_us([[200]])
        base = stages.times_us([[]])
        assert times - plain == pytest.approx(more + base)


def test_planning_of_groups_is_fast() -> None:
    """512 samples; the bound leaves room for a busy machine."""
    samples = [s for seed in range(64) for s in group(1024, 8, 4000, seed)]
    lengths = list(map(len, samples))
    given = [None if n % 8 == 0 else (n - n % 8, 1024) for n in range(512)]
    took = []
    for _ in range(3):
        start_s = time.perf_counter()
        wlb.plan_batch(lengths, max_tokens=65536, layout=PP4, cost="7b", shared=given)
        took.append(time.perf_counter() - start_s)
    assert min(took) < 0.5

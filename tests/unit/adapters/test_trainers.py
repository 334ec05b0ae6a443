"""Adapters of other trainers: their form, the cap, and errors; their own tests are in evidence."""

from __future__ import annotations

import importlib
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_wlb.adapters.packing_scheduler import DEFAULT_COST, cost_of_config, groups_of, install
from megatron_wlb.adapters.trainers import (
    FLOPS_A_US,
    cost_of_flops,
    filled_ranks,
    halved,
    shared_ranks,
)
from megatron_wlb.adapters.verl import get_seqlen_balanced_partitions, micro_batches_of
from megatron_wlb.cost import Parallelism
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.balance.trees import SharedPrefixes

few_examples = settings(max_examples=30)
LENGTHS = st.lists(st.integers(1, 900), min_size=8, max_size=40)
LAYOUTS = [
    Parallelism(dp_size=2),
    Parallelism(pp_size=2, dp_size=3),
    Parallelism(pp_size=2, vpp_size=2, dp_size=2, group_size=3),
]


UNLIKE = [50, 9, 30, 70, 4, 60, 20, 10]


def first_fit(lengths: list[int], max_tokens: int, most: int) -> int:
    """Parts that the longest first, each in the first with room, fill."""
    parts: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = (own for own in parts if sum(own) + length <= max_tokens and len(own) < most)
        own = next(fitting, None)
        if own is None:
            parts.append(own := [])
        own.append(length)
    return len(parts)


@few_examples
@given(lengths=LENGTHS, parts=st.integers(1, 8), equal=st.booleans())
def test_partitions_have_each_sample_once_and_like_sums(lengths, parts, equal) -> None:
    lengths = lengths[: len(lengths) // parts * parts] if equal else lengths
    found = get_seqlen_balanced_partitions(lengths, parts, equal)
    assert sorted(n for own in found for n in own) == list(range(len(lengths)))
    assert len(found) == parts and all(found)
    assert not equal or len({len(own) for own in found}) == 1
    if not equal:
        sums = [sum(lengths[n] for n in own) for own in found]
        assert max(sums) <= sum(lengths) / parts + max(lengths)


@few_examples
@given(
    lengths=LENGTHS, multiple=st.integers(1, 3), least=st.integers(1, 6),
    pp_size=st.integers(1, 3), group=st.integers(1, 3),
)  # fmt: skip
def test_verl_s_micro_batches_keep_the_cap_and_groups(
    lengths, multiple, least, pp_size, group
) -> None:
    lengths = [length // group + 1 for length in lengths[: len(lengths) // group * group]]
    given_options = {"multiple": multiple, "least": least, "pp_size": pp_size, "group": group}
    try:
        found = micro_batches_of(lengths, 1000, (1.0, 2.1), **given_options)
    except ConfigError as error:
        assert "micro-batches are needed" in str(error)
        grouped = [sum(lengths[n : n + group]) for n in range(0, len(lengths), group)]
        needed = max(least, first_fit(grouped, 1000, len(grouped)))
        assert -(-needed // multiple) * multiple > len(grouped)
        return
    assert sorted(n for own in found for n in own) == list(range(len(lengths)))
    assert all(n // group * group + at in own for own in found for n in own for at in range(group))
    assert all(0 < sum(lengths[n] for n in own) <= 1000 for own in found)
    assert len(found) % multiple == 0 and len(found) >= least
    with pytest.raises(ConfigError, match=r"samples? \d+ has \d+ tokens, above max_token_len"):
        micro_batches_of([*lengths, *[1001] * group], 1000, (1.0, 2.1), **given_options)


def answers(groups: list[list[int]], prompt: int = 300) -> list[np.ndarray]:
    """Token ids of answers of these lengths, those of a group behind one prompt."""
    random = np.random.RandomState(0)
    found = []
    for own in groups:
        before = random.randint(0, 1000, prompt)
        found += [np.append(before, random.randint(0, 1000, length)) for length in own]
    return found


def rows_of(tokens: list[np.ndarray], part: list[int]) -> int:
    """Tokens of a part that differ, about: a branch has the last equal token, too."""
    shared = SharedPrefixes.found([tokens[n] for n in part])
    sizes = [len(tokens[n]) for n in part]
    return sum(path.document.length for path in shared.paths(range(len(part)), sizes, 0))


@few_examples
@given(
    groups=st.lists(
        st.lists(st.integers(1, 600), min_size=2, max_size=8), min_size=1, max_size=6
    ),
    least=st.integers(1, 4), pp_size=st.integers(1, 3), order=st.randoms(),
)  # fmt: skip
def test_answers_to_a_prompt_count_it_once_in_a_micro_batch(groups, least, pp_size, order) -> None:
    tokens = answers(groups)
    order.shuffle(tokens)
    lengths = [len(ids) for ids in tokens]
    given_options = {"least": min(least, len(tokens)), "pp_size": pp_size, "tokens": tokens}
    found = micro_batches_of(lengths, 1500, (1.0, 2.1), **given_options)
    assert sorted(n for own in found for n in own) == list(range(len(lengths)))
    assert all(found) and len(found) >= given_options["least"]
    assert all(rows_of(tokens, own) <= 1500 for own in found)


def test_answers_to_a_prompt_run_together() -> None:
    """Else each micro-batch would have the prompt of each again."""
    assert halved(np.ones(4, int), [[*range(4)]], 2, in_order=True) == [[0, 1], [2, 3]]
    tokens = answers([[20] * 8] * 4, prompt=1000)
    mixed = [tokens[n % 4 * 8 + n // 4] for n in range(32)]
    found = micro_batches_of([1020] * 32, 1200, (1.0, 2.1), tokens=mixed)
    assert sorted(map(sorted, found)) == [[*range(n, 32, 4)] for n in range(4)]
    apart = micro_batches_of([1020] * 32, 1200, (1.0, 2.1))
    assert len(apart) == 32


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        (Parallelism(pp_size=2, vpp_size=2, dp_size=2, group_size=3), [*[[50] * 4] * 3, [400, 10]]),
        *((Parallelism(dp_size=number), [UNLIKE] * prompts)  # fewer prompts than ranks
          for number, prompts in [(4, 1), (4, 3), (8, 2)]),
    ],
)  # fmt: skip
def test_ranks_whose_samples_share_have_as_many_micro_batches(layout, groups) -> None:
    cost, tokens = cost_of_flops(1.0, 2.1), answers(groups)
    ranks = shared_ranks(tokens, 800, layout, cost)
    assert len(ranks) == layout.dp_size and len({len(rank) for rank in ranks}) == 1
    assert len(ranks[0]) % (layout.group_size or 1) == 0
    assert sorted(n for rank in ranks for part in rank for n in part) == list(range(len(tokens)))
    assert all(part and rows_of(tokens, part) <= 800 for rank in ranks for part in rank)
    longest = shared_ranks([*tokens, np.arange(5000, 6000)], 800, layout, cost)
    assert any([len(tokens)] in rank for rank in longest)  # above the cap it is alone
    with pytest.raises(ConfigError, match=r"1 samples are too few for \d micro-batches"):
        shared_ranks(tokens[:1], 800, layout, cost)


def test_verl_s_ranks_refuse_together() -> None:
    """Else one would wait for another that has ended."""
    told: list[list[int]] = []

    def with_another(own: list[int], other: tuple[int, ...] = (2, -3, 0)) -> list[int]:
        told.append(own)
        return [*map(max, own, other)]

    given_options = {"work": (1.0, 2.1), "agreed": with_another}
    for lengths, group, said in [
        ([], 1, "has no samples"),
        ([900, 101, 5, 6], 2, "group of 2 samples 0 has 1001 tokens"),
        ([5, 6, 7], 2, "3 samples are no whole groups of force_group_size 2"),
        ([900] * 5, 1, "5 micro-batches are needed of 3 samples"),
    ]:
        with pytest.raises(ConfigError, match=said):
            micro_batches_of(lengths, 1000, group=group, **given_options)
    with pytest.raises(ConfigError, match="lengths: length number 2 is 0"):
        micro_batches_of([5, 0], 1000, tokens=[np.ones(5), np.ones(0)], **given_options)
    assert told == [[1, 0, 1], [1, 0, 1], [1, 0, 1], [5, -5, 0], [1, -2, 1]]
    with pytest.raises(ConfigError, match="another data-parallel rank"):
        micro_batches_of([5, 6], 1000, (1.0, 2.1), agreed=lambda own: [*own[:2], 1])


def test_verl_s_micro_batches_are_smallest_first_and_last_in_a_pipeline() -> None:
    """As many as are fastest, eight here, of which six are a multiple of three."""
    lengths = [9000, 1500, 4000, 7000, 2100, 3000, 5000, 8000]
    given_options = {"multiple": 3, "pp_size": 4}
    found = micro_batches_of(lengths, 12000, (1.0, 2.1), **given_options)
    loads = [sum(lengths[n] for n in own) for own in found]
    peak = loads.index(max(loads))
    assert len(found) == 6 and 0 < peak < 5
    assert loads == [*sorted(loads[:peak]), *sorted(loads[peak:], reverse=True)]
    in_order = micro_batches_of(lengths, 12000, (1.0, 2.1), balance=False, **given_options)
    assert in_order == sorted(found)


@few_examples
@given(
    lengths=LENGTHS,
    layout=st.sampled_from(LAYOUTS),
    most=st.sampled_from([None, 1, 2, 5]),
)
@example(lengths=[900, *[1] * 6], layout=LAYOUTS[0], most=3)
@example(lengths=[383, 959, 717, 65, 162, 937], layout=LAYOUTS[0], most=2)
@example(lengths=[900, 100, 90, 80, 70, 60], layout=LAYOUTS[1], most=2)
@example(lengths=[341, 237, 171, 924, 936, 395, 592, 918, 707, 291], layout=LAYOUTS[2], most=2)
@example(lengths=[760, 368, 815, 708, 966, 862, 758, 668], layout=LAYOUTS[2], most=None)
def test_what_first_fit_holds_is_planned_and_remedies_of_refusals_hold(
    lengths, layout, most
) -> None:
    group = layout.group_size or 1
    unit = layout.dp_size * group

    def ranks() -> list[list[list[int]]]:
        return filled_ranks(lengths, 1000, layout, DEFAULT_COST, most_samples=most)

    try:
        found = ranks()
    except ConfigError as error:
        number = first_fit(lengths, 1000, most or len(lengths))
        assert -(-number // unit) * unit > len(lengths)
        assert f"give a step a multiple of {unit}" in str(error)
        lengths = lengths * unit
        found = ranks()
    assert sorted(n for own in found for part in own for n in part) == list(range(len(lengths)))
    assert len(found) == layout.dp_size and len({len(own) for own in found}) == 1
    assert len(found[0]) % group == 0
    for part in (part for own in found for part in own):
        assert part and sum(lengths[n] for n in part) <= 1000 and len(part) <= (most or len(part))


@pytest.mark.parametrize("layout", [Parallelism(dp_size=2), Parallelism(pp_size=2, dp_size=2)])
def test_megatron_s_groups_have_each_sample_once_on_each_of_its_cp_ranks(layout) -> None:
    random = np.random.default_rng(2)
    samples = [(100 + n, int(length)) for n, length in enumerate(random.integers(8, 600, 50))]
    groups = groups_of(samples, 1024, layout, 2, DEFAULT_COST, 6)
    assert all(len(group) == 4 for group in groups)
    assert all(group[::2] == group[1::2] and all(group) for group in groups)
    assert sorted(n for group in groups for own in group[::2] for n in own) == [*range(100, 150)]
    length_of = dict(samples)
    for group in groups:
        for own in group:
            assert sum(length_of[n] for n in own) <= 1024 and len(own) <= 6
    with pytest.raises(ConfigError, match="sample 7 has 1025 tokens, above 1024"):
        groups_of([*samples, (7, 1025)], 1024, layout, 2, DEFAULT_COST)


class Packings(Enum):
    DP_BALANCED = "dp_balanced"


@pytest.mark.parametrize(
    ("key", "most"), [("dp_balanced", {"max_num_seqs": 2}), (Packings.DP_BALANCED, {})]
)
def test_megatron_s_scheduler_takes_its_layout_from_megatron(key, most) -> None:
    class Theirs:
        def run(self, *_given):
            return self.get_groups_and_subsamples([(n, 100) for n in range(16)])

    others = {"default_dynamic_cp": Theirs}
    scheduler_map = {**others, key: Theirs}
    install(scheduler_map)
    scheduler = scheduler_map[key]()
    assert isinstance(scheduler, Theirs) and scheduler_map | {key: None} == {**others, key: None}
    facts = {"max_seqlen_per_dp_cp_rank": 400, "cp_size": 1, "dp_size": 2}
    vars(scheduler).update(facts | {"microbatch_group_size_per_vp_stage": None} | most)
    config = SimpleNamespace(
        hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, kv_channels=16, num_layers=2
    )
    group = SimpleNamespace(size=lambda: 2)
    found = scheduler.run(iter(()), 1, group, group, group, group, "cpu", config)
    limit = most.get("max_num_seqs", 4)
    assert scheduler.pp_size == 2 and all(len(own) <= limit for one in found for own in one)
    assert sorted(n for one in found for own in one for n in own) == [*range(16)]


def test_megatron_s_flops_count_each_matrix_of_a_model() -> None:
    sizes = {"hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4, "kv_channels": 16}
    llama = SimpleNamespace(**sizes, num_query_groups=2, num_layers=3, gated_linear_unit=True)
    cost = cost_of_config(llama)
    # Queries, output, keys and values; gate, up and down.
    weights = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 256
    assert cost.forward_linear_us == pytest.approx(3 * 2 * weights / FLOPS_A_US)
    assert cost.forward_quadratic_us == pytest.approx(3 * 2 * 64 / FLOPS_A_US)


def test_too_few_samples_are_told() -> None:
    with pytest.raises(ConfigError, match="3 samples are too few"):
        filled_ranks([5, 6, 7], 64, Parallelism(dp_size=4), DEFAULT_COST)


@pytest.mark.parametrize(
    ("adapter", "name"),
    [
        ("verl", "rearrange_micro_batches"),
        ("slime", "build_dp_schedule"),
        ("packing_scheduler", "install"),
    ],
)
def test_former_path_of_an_adapter_names_the_new_one(adapter: str, name: str) -> None:
    with pytest.warns(FutureWarning, match=f"import megatron_wlb.adapters.{adapter} instead"):
        before = importlib.import_module(f"megatron_wlb.{adapter}")
    now = importlib.import_module(f"megatron_wlb.adapters.{adapter}")
    assert getattr(before, name) is getattr(now, name)

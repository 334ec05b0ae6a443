from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.balance.replica_costs import Scheme
from megatron_wlb.strategies.plan.strategy import (
    Cluster,
    Replica,
    Strategy,
    placed,
    read_strategies,
    write_strategies,
)

NODES = Cluster(32, 8)
POWERS = st.sampled_from((1, 2, 4, 8))
SCHEMES = st.builds(
    lambda tp, cp, pp, cut: Scheme(tp, cp, pp, sliced=cut and pp > 1),
    POWERS, st.sampled_from((1, 2, 16)), st.sampled_from((1, 2, 3)), st.booleans(),
)  # fmt: skip


def test_text_names_what_is_divided_and_counts_like_replicas() -> None:
    strategy = Strategy.parse("tp8pp2:128k+2*tp4cp2:32000", NODES)
    assert [str(r.scheme) for r in strategy.replicas] == ["tp8pp2", "tp4cp2", "tp4cp2"]
    assert [r.max_tokens for r in strategy.replicas] == [131072, 32000, 32000]
    assert str(strategy) == "tp8pp2:128k+2*tp4cp2:32000"
    assert str(Scheme()) == "tp1" and str(Scheme(1, 2, 4, 2)) == "cp2pp4vpp2"
    assert strategy.max_tokens == 131072


def test_placement_keeps_tp_in_a_node_and_pp_outermost() -> None:
    # The small replica is named first, but would leave the large one no whole node.
    small, large = placed(NODES, [Scheme(2), Scheme(4, 2, 2)])
    assert large == tuple(range(16)) and small == (16, 17)
    strategy = Strategy.parse("tp2:4k+tp4cp2pp2:8k", NODES)
    assert strategy.replicas[1].ranks == large, "the first stage's before the second's"
    assert {rank for replica in strategy.replicas for rank in replica.ranks} == {*range(18)}


def test_context_parallel_ranks_beyond_a_node_go_by_tensor_parallel_groups() -> None:
    (ranks,) = placed(Cluster(24, 8), [Scheme(4, 4)])
    assert ranks == tuple(range(16))


@given(st.lists(st.tuples(SCHEMES, st.integers(512, 900)), min_size=1, max_size=5))
@settings(max_examples=100)
def test_whatever_is_placed_is_valid_and_survives_text(kinds: list[tuple[Scheme, int]]) -> None:
    cluster = Cluster(64, 8)
    try:
        strategy = Strategy.of(cluster, kinds)
    except ConfigError as error:
        needed = sum(scheme.num_ranks for scheme, _ in kinds)
        assert needed > 64 or "left" in str(error)
        return
    ranks = [rank for replica in strategy.replicas for rank in replica.ranks]
    assert len({*ranks}) == len(ranks) and {*ranks} <= {*range(64)}
    assert Strategy.parse(str(strategy), cluster) == strategy
    moved = Strategy(cluster, strategy.replicas[::-1])
    assert Strategy.parse(str(moved), cluster) == moved


def test_ranks_of_ones_own_are_in_the_text() -> None:
    text = "tp2:4k@6-7+tp2:4k@0-1"
    strategy = Strategy.parse(text, Cluster(8, 8))
    assert strategy.replicas[0].ranks == (6, 7) and str(strategy) == text
    other = Strategy.parse("2*tp2:4k", Cluster(8, 8))
    assert str(other) == "2*tp2:4k" and other.key != strategy.key
    assert other.key != Strategy.parse("2*tp2:4k", Cluster(16, 8)).key


def test_file_of_strategies_comes_back(tmp_path: Path) -> None:
    texts = "tp8pp2:128k+2*tp4:32k", "4*tp8:16k", "tp1:1k@31"
    strategies = tuple(Strategy.parse(text, NODES) for text in texts)
    write_strategies(tmp_path / "some.yaml", strategies)
    assert read_strategies(tmp_path / "some.yaml") == strategies


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp16:4k", "TP 16, above the 8 devices of a node; use less TP"),
        ("5*tp8:4k", "5 replicas need 40 ranks of 32, and no node of 8 has 8 left for tp8"),
        ("tp8", "'tp8' is not a replica; give one such as tp8pp2:128k"),
        ("tp8tp4:1k", "'tp8tp4' is not a layout; give each size once"),
        ("0*tp8:1k", "number of replicas is 0; give at least 1"),
        ("vpp2:1k", "VPP 2 is for a pipeline, but PP is 1"),
        ("tp2sliced:1k", "sliced is for a pipeline, but PP is 1"),
        ("slicedpp2:1k", "'slicedpp2:1k' is not a replica"),
        ("tp8:4", "max_tokens is 4; give at least 8"),
        ("tp2:1k@0-1+tp2:1k@1-2", "rank 1 is in replicas 0 and 1; give it to one"),
        ("tp2:1k@0-2", "has 3 ranks, but needs 2"),
        ("tp2:1k@7-8", "tensor-parallel ranks 7-8 in 2 nodes of 8 devices; keep them in one"),
        ("tp1:1k@32", "rank is 32; give at most 31"),
        ("2*tp2:1k@0-1", "2 replicas have the ranks of one"),
        ("tp2:1k@0-1+tp2:1k", "1 of 2 replicas have ranks; give them to all or none"),
        ("", "'' is not a replica"),
    ],
)
def test_wrong_strategy_names_value_limit_and_remedy(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Strategy.parse(text, NODES)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_strategy_without_replicas_and_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no replicas"):
        Strategy(NODES, ())
    path = tmp_path / "wrong.yaml"
    for text, said in (
        ("", "expected names and values"),
        ("num_devices: 8", "devices_per_node"),
        ("num_devices: 8\ndevices_per_node: 8\nstrategy: [tp2:1k]", "unknown entry strategy"),
        ("num_devices: 8\ndevices_per_node: 8\nstrategies: []", "there are no strategies"),
        ("num_devices: 8\ndevices_per_node: 8\nstrategies: [tp9]", "not a replica"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said) as caught:
            read_strategies(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_kinds_stand_by_what_they_can_take() -> None:
    strategy = Strategy.parse("tp2:4k+tp8:64k+tp2:4k+tp1:4k", NODES)
    assert list(strategy.kinds.values()) == [(1,), (0, 2), (3,)]
    assert strategy.replicas[0] == Replica(Scheme(2), 4096, (8, 9))

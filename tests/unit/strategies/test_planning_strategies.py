"""Settings of a run with strategies: what is refused, what is proposed, and how plans go on."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.strategies import ListStream, documents

from megatron_wlb.cost.document import DocumentCost
from megatron_wlb.cost.table import ProfiledCost, Row, model_identity
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.planning.balance.replica_costs import Scheme
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.planner import Planner
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config
from megatron_wlb.strategies.plan import strategy_run as planned
from megatron_wlb.strategies.plan.assigner import Assigner, StrategyPlanner
from megatron_wlb.strategies.plan.strategy_run import StrategyRun

MODEL = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 256 "
    "--global-batch-size 3 --wlb-hardware cpu --make-vocab-size-divisible-by 64"
)
CORPORA: Any = SimpleNamespace(vocab_size=100)


def settings(folder: Path, *texts: str, flags: str = "", num_devices: int = 4) -> Config:
    lines = [f"num_devices: {num_devices}", "devices_per_node: 4", "strategies:"]
    path = folder / "strategies.yaml"
    path.write_text("\n".join([*lines, *(f"- {text}" for text in texts)]))
    return parse([*MODEL.split(), "--wlb-strategies", str(path), *flags.split()])


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2",
        "--context-parallel-size 2",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--sequence-parallel",
        "--wlb-packing slim",
        "--wlb-max-tokens 512",
        "--wlb-cost measured",
        "--micro-batch-size 2",
        "--wlb-micro-batches auto",
        "--moe-router-load-balancing-type global_aux_loss --num-experts 4",
    ],
)
def test_settings_that_strategies_cannot_have_are_refused_in_one_line(
    tmp_path: Path, flags: str
) -> None:
    config = settings(tmp_path, "4*tp1:256", flags=flags)
    says = f"^{flags.split()[0]} .*; leave one of them out$"
    with pytest.raises(ConfigError, match=says) as refused:
        planned.check(config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "num_ranks", "said"),
    [
        ("4*tp1:256", 2, "is for 4 devices, but 2 processes were started"),
        ("pp4:256", 4, "--num-layers is 6, which PP 4"),
        ("2*tp1:128", 4, "of up to 128 tokens, but --seq-length is 256"),
        ("pp2vpp4:256+tp1:256", 4, "--num-layers is 6"),
        ("4*tp1:900000k", 4, r"^--wlb-strategies .*strategies.yaml: tp1 is to take documents"),
    ],
)
def test_strategies_that_cannot_run_are_refused(
    tmp_path: Path, text: str, num_ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        StrategyRun.of(settings(tmp_path, text), CORPORA, num_ranks)


def test_replica_with_virtual_stages_takes_any_global_batch(tmp_path: Path) -> None:
    """Also where the batch of 3 windows would not divide over its pipeline's stages."""
    run = StrategyRun.of(settings(tmp_path, "cp2pp2vpp3:256"), CORPORA, 4)
    assert [*run.selectors] == [Scheme(1, 2, 2, 3)]


def test_numbers_of_processes_are_checked_before_megatron_divides_by_them(tmp_path: Path) -> None:
    config = settings(tmp_path, "2*tp1:256", num_devices=2)
    with pytest.raises(ConfigError, match="is for 2 devices, but 3 processes were started"):
        planned.check_ranks(config, 3)
    with pytest.raises(ConfigError, match=r"--global-batch-size is 3, .* give a multiple of 2$"):
        planned.check_ranks(config, 2)
    auto = parse([*MODEL.split(), "--wlb-strategies", "auto"])
    planned.check_ranks(auto, 3)
    with pytest.raises(ConfigError, match=r"give a multiple of 2$"):
        planned.check_ranks(auto, 2)


def test_heads_that_a_replica_would_divide_are_refused(tmp_path: Path) -> None:
    flags = "--group-query-attention --num-query-groups 2"
    with pytest.raises(ConfigError, match="tp4: --num-query-groups is 2, but TP 4"):
        StrategyRun.of(settings(tmp_path, "tp4:256", flags=flags), CORPORA, 4)


def test_replicas_have_their_own_layout_and_one_vocabulary(tmp_path: Path) -> None:
    run = StrategyRun.of(settings(tmp_path, "tp2:256+pp2:256", "4*tp1:256"), CORPORA, 4)
    assert run.padded_vocab_size == 128  # for TP 2
    for scheme in (Scheme(), Scheme(2), Scheme(1, 1, 2), Scheme(1, 1, 2, 3)):
        own = run.replica_config(scheme)
        p = own.parallel
        sizes = p.tensor_model_parallel_size, p.context_parallel_size
        assert (*sizes, p.pipeline_model_parallel_size, p.vpp_size) == scheme.sizes
        assert p.sequence_parallel == (scheme.tp_size > 1)
        multiple = own.model.make_vocab_size_divisible_by * scheme.tp_size
        assert -(-100 // multiple) * multiple == 128


def test_exchange_has_the_room_that_parameters_leave(tmp_path: Path) -> None:
    flags = "--wlb-memory-gib 0.25"
    run = StrategyRun.of(settings(tmp_path, "tp1:256+pp2:256", flags=flags), CORPORA, 4)
    (strategy,) = run.strategies
    whole, first, last, idle = (run.room_bytes(strategy, rank) for rank in range(4))
    assert whole < last < first < idle < 2**28  # the last stage has the final norm, too
    (alone, _), (stages, _) = run.candidates[0].groups
    # Weights and gradients, in fp32.
    assert idle - whole == 8 * alone.memory.num_parameters(0)
    assert idle - last == 8 * stages.memory.num_parameters(1)


def test_proposed_strategies_can_run() -> None:
    flags = "--mock-data --vocab-size 100 --group-query-attention --num-query-groups 1"
    config = parse([*MODEL.split(), *flags.split(), "--wlb-strategies", "auto"])
    run = StrategyRun.of(config, Corpora.open(config), 4)
    assert run.strategies
    assert all(s.cluster.num_devices == 4 for s in run.strategies)
    schemes = {replica.scheme for s in run.strategies for replica in s.replicas}
    assert all(scheme.tp_size == 1 for scheme in schemes), "one key/value head"
    again = StrategyRun.of(config, Corpora.open(config), 4)
    assert again.strategies == run.strategies


# Measured costs.


def tables(folder: Path, config: Config, *sizes: tuple[int, int], floor_us: float = 0.0) -> Path:
    """Tables of each TP and CP: 1 µs a token and rank, but no less than ``floor_us``."""
    shape = model_shape(config, 128)
    folder.mkdir()
    for tp, cp in sizes:
        us = [(d, max(d, floor_us) / (tp * cp)) for d in (64, 512, 1024, 4096)]
        rows = tuple(Row(d, each, 2 * each) for d, each in us)
        cost = ProfiledCost(model_identity(shape), tp, cp, rows, rows)
        (folder / f"tp{tp}cp{cp}.json").write_text(json.dumps(cost.as_dict()))
    return folder


def test_replicas_take_what_was_measured_in_their_layout(tmp_path: Path) -> None:
    texts = "tp2:256+pp2:256", "4*tp1:256", "tp2:256+pp2sliced:256"
    plain = settings(tmp_path, *texts)
    folder = tables(tmp_path / "costs", plain, (1, 1), (2, 1))
    run = StrategyRun.of(settings(tmp_path, *texts, flags=f"--wlb-cost {folder}"), CORPORA, 4)
    for candidate in run.candidates:
        for costs, _ in candidate.groups:
            whole_us = costs.rank_us([256]).sum() * costs.scheme.tp_size
            assert whole_us == pytest.approx(256 * (3 + 3), rel=1e-6)
    auto = parse([*MODEL.split(), "--mock-data", "--vocab-size", "100", "--wlb-strategies", "auto",
                  "--wlb-cost", str(folder)])  # fmt: skip
    found = StrategyRun.of(auto, Corpora.open(auto), 4)
    schemes = {r.scheme for s in found.strategies for r in s.replicas}
    assert schemes and {(s.tp_size, s.cp_size) for s in schemes} <= {(1, 1), (2, 1)}


def test_micro_batches_are_as_long_as_kernels_were_seen_to_need(tmp_path: Path) -> None:
    plain = settings(tmp_path, "4*tp1:4096")
    least = []
    for floor_us in (0.0, 1000.0):
        folder = tables(tmp_path / f"costs{floor_us}", plain, (1, 1), floor_us=floor_us)
        config = settings(tmp_path, "4*tp1:4096", flags=f"--wlb-cost {folder}")
        (candidate,) = StrategyRun.of(config, CORPORA, 4).candidates
        least.append(candidate.groups[0][0].least_tokens)
    assert least == [256, 1024]


@pytest.mark.parametrize(
    ("sizes", "text", "said"),
    [
        ([(1, 1)], "2*tp2:256", r"no tables for tp2, only for tp1; measure that TP and CP"),
        ([], "4*tp1:256", "is not a folder with tables"),
        ([(1, 1)], "4*tp1:8192", "to take documents of 8192 tokens, but .* 4096"),
    ],
)
def test_layouts_that_were_not_measured_are_refused(
    tmp_path: Path, sizes: list[tuple[int, int]], text: str, said: str
) -> None:
    folder = tables(tmp_path / "costs", settings(tmp_path, text), *sizes)
    with pytest.raises(ConfigError, match=said) as refused:
        StrategyRun.of(settings(tmp_path, text, flags=f"--wlb-cost {folder}"), CORPORA, 4)
    assert "\n" not in str(refused.value)


def test_costs_without_a_layout_or_with_one_twice_are_refused(tmp_path: Path) -> None:
    config = settings(tmp_path, "4*tp1:256")
    folder = tables(tmp_path / "costs", config, (1, 1))
    (folder / "again.json").write_text((folder / "tp1cp1.json").read_text())
    flags = f"--wlb-cost {folder}"
    with pytest.raises(ConfigError, match="TP 1 and CP 1 have tables in another file"):
        StrategyRun.of(settings(tmp_path, "4*tp1:256", flags=flags), CORPORA, 4)
    (folder / "again.json").write_text(json.dumps(DocumentCost(1, 1, 1, 1).as_dict()))
    with pytest.raises(ConfigError, match="coefficients have no layout"):
        StrategyRun.of(settings(tmp_path, "4*tp1:256", flags=flags), CORPORA, 4)


# Plans that go on.


def steps_of(planner: Any) -> list[list[int]]:
    found = []
    while (plan := planner.next_plan()) is not None:
        found.append(sorted(d.arrival for d in plan.documents))
    return found


LENGTHS = [[200, 5, 7], [30, 256], [4, 100, 9], [31]]


def test_documents_that_waited_in_a_plain_run_run_in_the_next_step(tmp_path: Path) -> None:
    run = StrategyRun.of(settings(tmp_path, "4*tp1:512"), CORPORA, 4)
    new = StrategyPlanner(ListStream(LENGTHS), Assigner(run.candidates))
    held = documents([50, 60], step=0)
    stream = ListStream(LENGTHS)
    stream.next_step()
    packer = {"packing": "hold", "num_micro_batches": 2, "held": [list(held[1])], "ahead": []}
    state = {"step": 1, "steps_read": 1, "packer": packer, "stream": stream.state_dict()}
    new.load_state_dict(state)
    assert new.state_dict() == state, "a save before the next step loses nothing"
    assert steps_of(new) == [[1, 3, 4], [5, 6, 7], [8]]
    assert new.state_dict()["packer"] is None


def test_documents_that_were_read_ahead_run_in_their_own_steps(tmp_path: Path) -> None:
    run = StrategyRun.of(settings(tmp_path, "4*tp1:512"), CORPORA, 4)
    cost = DocumentCost(1.0, 0.01, 2.0, 0.02)
    packer = PackingSettings("hold", 512, look_ahead=2).packer(
        num_micro_batches=2, window=256, cost=cost
    )
    lengths = [*LENGTHS, [12, 60], [3]]
    plain = Planner(ListStream(lengths), packer, cost, dp_size=1)
    first = plain.next_plan()
    assert first is not None
    ran = [d.arrival for d in first.documents]
    state = json.loads(json.dumps(plain.state_dict()))
    assert state["steps_read"] > state["step"] == 1
    waiting = [sorted(d.arrival for d in packer.waiting if max(d.step, 1) == n) for n in (1, 2)]
    assert all(waiting)

    def opened(state: Any) -> StrategyPlanner:
        made = StrategyPlanner(ListStream(lengths), Assigner(run.candidates))
        made.load_state_dict(state)
        assert made.state_dict() == state, "a save before the next step loses nothing"
        return made

    planner = opened(state)
    plans = [*iter(planner.next_plan, None)]
    steps = [sorted(d.arrival for d in plan.documents) for plan in plans]
    assert [plan.step for plan in plans] == [1, 2, 3, 4, 5]
    assert steps[:2] == waiting
    assert sorted([*ran, *chain(*steps)]) == list(range(sum(map(len, lengths))))
    for number in range(1, len(plans)):
        stopped = opened(state)
        for _ in range(number):
            stopped.next_plan()
        resumed = opened(json.loads(json.dumps(stopped.state_dict())))
        digests = [plan.digest for plan in iter(resumed.next_plan, None)]
        assert digests == [plan.digest for plan in plans[number:]]


def test_documents_of_other_packings_are_not_taken_over(tmp_path: Path) -> None:
    run = StrategyRun.of(settings(tmp_path, "4*tp1:512"), CORPORA, 4)
    new = StrategyPlanner(ListStream(LENGTHS), Assigner(run.candidates))
    state = new.state_dict() | {"packer": {"packing": "wlb"}}
    with pytest.raises(CheckpointError, match="--wlb-packing 'wlb'"):
        new.load_state_dict(state)


def test_plain_run_goes_on_where_strategies_stopped(tmp_path: Path) -> None:
    run = StrategyRun.of(settings(tmp_path, "4*tp1:512"), CORPORA, 4)
    before = StrategyPlanner(ListStream(LENGTHS), Assigner(run.candidates))
    first = before.next_plan()
    assert first is not None
    cost = DocumentCost(1.0, 0.01, 2.0, 0.02)
    packer = PackingSettings("hold", 512).packer(
        num_micro_batches=2, window=256, cost=cost, length_multiple=1
    )
    plain = Planner(ListStream(LENGTHS), packer, cost, dp_size=1)
    plain.load_state_dict(before.state_dict())
    ran = [arrival for step in steps_of(plain) for arrival in step]
    assert sorted(ran) == [3, 4, 5, 6, 7, 8]

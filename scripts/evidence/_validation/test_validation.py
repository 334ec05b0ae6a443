"""Judging recordings that are made up, so that what is to be found is known."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest
from _quickstart.recording import RecordedStep, Recording, chained, core_of

from _validation import judge as validation
from _validation.fit import fit_stage
from _validation.judge import (
    Row,
    calibrate,
    divided,
    judge,
    pairs,
    repeat_error,
    summarize,
)
from _validation.sharing import replay_shared
from megatron_wlb.cost.schedule.graph import graph_of
from megatron_wlb.cost.schedule.messages import slice_graph
from megatron_wlb.cost.slices import UnitTable
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import run_of
from megatron_wlb.settings.command_line import parse

BETWEEN_US, P2P_US, BESIDES_US = 40.0, 300.0, 5_000.0
SLICES_BETWEEN_US, SLICES_P2P_US = 90.0, 200.0
COEFFICIENTS = {"F": (200.0, 30.0, 5.0, 0.01), "B": (300.0, 50.0, 9.0, 0.03)}


SLICE_US = {"F": 700.0, "B": 900.0}


def stage_us(kind, stage, lengths, prefixes, is_slice):
    pairs = sum((p + d) ** 2 - p**2 for p, d in zip(prefixes, lengths, strict=True))
    counts = (1, len(lengths), sum(lengths), pairs, is_slice)
    each_us = *COEFFICIENTS[kind], SLICE_US[kind]
    return (1 + 0.2 * stage) * sum(c * n for c, n in zip(each_us, counts, strict=True))


def step_of(packing, number, lengths, vpp_size, num_cores, slower, prefixes=None, chains=()):
    """A step as a machine without noise would run it."""
    pp_size, num = 2, len(lengths)
    graph = slice_graph(pp_size, chains) if chains else graph_of(pp_size, vpp_size, num)
    before = prefixes or [[0] * len(segments) for segments in lengths]
    slices = [own > 1 for own in chains for _ in range(own)] or [False] * num
    between_us, p2p_us = (SLICES_BETWEEN_US, SLICES_P2P_US) if chains else (BETWEEN_US, P2P_US)
    times = np.array(
        [
            [
                [
                    slower * stage_us(kind, stage, *segments)
                    for segments in zip(lengths, before, slices, strict=True)
                ]
                for stage in range(graph.num_stages)
            ]
            for kind in "FB"
        ]
    )
    cores = [core_of(rank, pp_size, pp_size, num_cores) for rank in range(pp_size)]
    run = replay_shared(graph, times + between_us, np.full(num, p2p_us), cores)
    start = 1e6 * (number + 1)
    intervals = []
    for rank, actions in enumerate(graph.order):
        rows = []
        begins, ends = graph.of_rank(run.start_us, rank), graph.of_rank(run.stop_us, rank)
        for action, begin, end in zip(actions, begins, ends, strict=True):
            stage = action.chunk * pp_size + rank
            cpu = times["FB".index(action.kind), stage, action.micro_batch]
            rows.append((action.kind, start + begin + between_us, start + end, cpu))
        intervals.append(rows)
    last = max(rows[-1][2] for rows in intervals)
    first = min(rows[0][1] for rows in intervals)
    tokens = sum(map(sum, lengths))
    return RecordedStep(
        packing, number, start, start + last - first + BESIDES_US, tokens, [lengths], intervals,
        predicted_us=[[1.0] * num], plan_us=7e6, prefixes=[prefixes] if prefixes else [],
        chains=[list(chains)] if chains else [],
    )  # fmt: skip


def recording_of(tmp_path, *, vpp_size=1, num_cores=2, rounds=12, slower=1.0, repeats=(1.0,)):
    """``slower``: by how much the second packing's judged steps are, which nobody could foresee.
    ``repeats``: by how much each run of a step is.
    """
    vpp = f"--num-virtual-stages-per-pipeline-rank {vpp_size}" if vpp_size > 1 else ""
    config = parse(
        f"--pipeline-model-parallel-size 2 --num-layers 4 --seq-length 512 {vpp}".split()
    )
    random = np.random.default_rng(3)
    steps = []
    for number in range(rounds):
        for packing in ("original", "hold"):
            lengths = [random.integers(1, 500, random.integers(1, 6)).tolist() for _ in range(4)]
            factor = slower if packing == "hold" and number >= rounds // 3 else 1.0
            for repeat, more in enumerate(repeats):
                step = step_of(packing, number, lengths, vpp_size, num_cores, factor * more)
                steps.append(dataclasses.replace(step, repeat=repeat))
    model = run_of(config, 256, 1).memory
    for packing in ("original", "hold"):
        lengths = [[300], [20, 40], [100, 7], [1, 60]]
        padded = [sum(segments) for segments in lengths]
        used = [round(model.activation_peak_bytes(rank, padded) / 0.98) for rank in (0, 1)]
        step = step_of(packing, rounds, lengths, vpp_size, num_cores, 1.0)
        steps.append(dataclasses.replace(step, activation_bytes=used))
    path = write_recording(tmp_path, config, num_cores, ["original", "hold"], steps)
    return Recording.read(path)


def write_recording(tmp_path, config, num_cores, packings, steps):
    content = {
        "config": config.flat(),
        "vocab_size": 256,
        "world_size": 2,
        "num_cores": num_cores,
        "packings": packings,
        "steps": [dataclasses.asdict(step) for step in steps],
    }
    path = tmp_path / "recording.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(("vpp_size", "num_cores"), [(1, 2), (2, 2), (1, 1)])
def test_steps_of_a_machine_without_noise_are_met(tmp_path, vpp_size, num_cores):
    recording = recording_of(tmp_path, vpp_size=vpp_size, num_cores=num_cores)
    assert (recording.cores is None) == (num_cores == 2)
    calibration = calibrate(recording)
    assert calibration.fit_error < 1e-6
    if num_cores == 2:
        assert calibration.handovers == {"megatron": pytest.approx((BETWEEN_US, P2P_US))}
        assert calibration.besides_us == pytest.approx(BESIDES_US)
        assert calibration.slowdown == pytest.approx(1, rel=1e-3)
    rows = judge("pp2", recording, calibration)
    assert [row.packing for row in rows] == ["original", "hold"]
    for row in rows:
        assert row.num_steps == 8
        assert row.step_time_mape < (0.001 if num_cores == 2 else 0.03)
        assert row.operation_mape < 1e-6
        assert row.memory_mape == pytest.approx(0.02, abs=1e-4)
        assert row.simulated_tokens_per_s == pytest.approx(row.measured_tokens_per_s, rel=0.03)
        assert row.simulated_work_per_s == pytest.approx(row.measured_work_per_s, rel=0.03)
        assert 0.2 < row.measured_work_per_s < num_cores  # of two ranks, that wait at times
    summary = summarize({"pp2": recording})
    assert summary["ranking_agrees"]
    assert summary["memory_mape"] == pytest.approx(0.02, abs=1e-4)
    assert summary["step_time_mape"] == pytest.approx(np.mean([row.step_time_mape for row in rows]))
    assert json.loads(json.dumps(summary)) == summary


def sliced_steps(rounds, num_cores):
    """Steps of slices and of the same documents whole, whose work is the same."""
    random = np.random.default_rng(5)
    for number in range(rounds):
        long, cuts = int(random.integers(500, 900)), [0, 300, 450]
        others = random.integers(1, 400, (5, 3)).tolist()
        slices = [b - a for a, b in pairwise([*cuts, long])]
        lengths = [[n] for n in slices[:2]] + [[slices[2], *others[0]], *others[1:]]
        prefixes = [[n] + [0] * (len(own) - 1) for n, own in zip(cuts, lengths, strict=False)]
        prefixes += [[0] * len(own) for own in lengths[3:]]
        chains = (3, 1, 1, 1, 1)
        yield step_of("slim", number, lengths, 1, num_cores, 1.0, prefixes, chains)
        whole = [[long, *others[0]], others[1], others[2] + others[4], others[3]]
        yield step_of("original", number, whole, 1, num_cores, 1.0)


@pytest.mark.parametrize("num_cores", [2, 1])
def test_steps_of_slices_are_met_in_time_work_and_memory(tmp_path, num_cores):
    flags = "--pipeline-model-parallel-size 2 --num-layers 4 --seq-length 512"
    config = parse([*flags.split(), "--global-batch-size", "4"])
    steps = list(sliced_steps(12, num_cores))
    counted = next(sliced_steps(1, num_cores))
    model = run_of(config, 256, 1).memory
    units = chained(counted.lengths[0], counted.chains[0])
    order = slice_graph(2, tuple(counted.chains[0])).order
    used = [
        round(max(model.program_bytes(rank, actions, UnitTable.of(units)).peak) / 0.96)
        for rank, actions in enumerate(order)
    ]
    counted = dataclasses.replace(counted, round=12, activation_bytes=used)
    path = write_recording(tmp_path, config, num_cores, ["original", "slim"], [*steps, counted])
    recording = Recording.read(path)
    calibration = calibrate(recording)
    assert calibration.fit_error < 1e-6
    assert calibration.slice_us == pytest.approx(np.array([[700, 840], [900, 1080]]))
    if num_cores == 2:
        assert calibration.handovers == {
            "megatron": pytest.approx((BETWEEN_US, P2P_US)),
            "slices": pytest.approx((SLICES_BETWEEN_US, SLICES_P2P_US)),
        }
    original, slim = judge("pp2", recording, calibration)
    for row in (original, slim):
        assert row.step_time_mape < (0.001 if num_cores == 2 else 0.03)
        assert row.operation_mape < 1e-6
    assert slim.memory_mape == pytest.approx(0.04, abs=1e-3) and original.memory_mape is None
    # The same documents are the same work, whole or in slices of more micro-batches.
    seconds = [
        sum(s.step_us for s in divided(recording)[1] if s.packing == row.packing)
        for row in (original, slim)
    ]
    works = [row.measured_work_per_s * s for row, s in zip((original, slim), seconds, strict=True)]
    assert works[0] == pytest.approx(works[1], rel=1e-6)
    summary = summarize({"pp2": recording})
    assert json.loads(json.dumps(summary)) == summary


def test_what_changes_after_the_calibration_is_seen(tmp_path):
    recording = recording_of(tmp_path, slower=1.25)
    original, hold = judge("pp2", recording, calibrate(recording))
    assert original.step_time_mape < 0.02
    assert 0.15 < hold.step_time_mape < 0.2 and hold.step_time_bias < -0.15
    assert hold.operation_mape == pytest.approx(0.2)
    assert hold.replay_error < 0.02  # the schedule is as before


def row_of(packing, simulated, measured, error):
    return Row("pp2", packing, 8, 0, 0, 0, 0, None, 1, 1, simulated, measured, error)


def test_order_is_contradicted_only_beyond_the_noise():
    rows = [
        row_of("original", 1.5, 1.45, 0.003),
        row_of("hold", 1.7, 1.60, 0.003),
        row_of("wlb", 1.69, 1.61, 0.004),
    ]
    found = {pair.packings: pair for pair in pairs(rows)}
    assert list(found) == [("hold", "wlb"), ("hold", "original"), ("wlb", "original")]
    tie = found["hold", "wlb"]
    assert tie.measured_ratio == pytest.approx(1.60 / 1.61)
    assert tie.error == pytest.approx(0.005)
    assert not tie.is_apart and not tie.is_contradicted
    assert found["hold", "original"].is_apart and not found["hold", "original"].is_contradicted
    wrong = pairs([row_of("original", 1.5, 1.7, 0.003), row_of("hold", 1.7, 1.60, 0.003)])
    assert [pair.is_contradicted for pair in wrong] == [True]


def test_a_packing_that_only_simulation_prefers_is_a_contradiction(tmp_path):
    assert summarize({"pp2": recording_of(tmp_path, slower=1.0)})["ranking_agrees"]
    layout = summarize({"pp2": recording_of(tmp_path, slower=2.0)})["layouts"]["pp2"]
    (pair,) = layout["pairs"]
    assert pair["measured_ratio"] < 0.7 or pair["measured_ratio"] > 1.5  # hold is the slower one
    assert layout["pairs_apart"] == 1
    assert layout["ranking_agrees"] == (pair["packings"][0] == "original")


def test_the_middle_of_repeats_counts(tmp_path):
    recording = recording_of(tmp_path, repeats=(1.4, 1.0, 0.7))
    calm = recording_of(tmp_path)
    assert recording.timed == [dataclasses.replace(step, repeat=1) for step in calm.timed]
    assert 0.3 < repeat_error(recording) < 0.35  # a step's rest is the same each time
    assert repeat_error(calm) == 0
    # Of two the faster: what a machine does besides only adds.
    pair = recording_of(tmp_path, repeats=(1.4, 1.0))
    assert pair.timed == recording.timed


def test_slowdown_takes_up_what_the_fit_leaves(tmp_path, monkeypatch):
    recording = recording_of(tmp_path)
    monkeypatch.setattr(validation, "fit_stage", lambda samples: shorter(fit_stage(samples)))
    calibration = calibrate(recording)
    assert calibration.slowdown == pytest.approx(1 / 0.9, rel=0.01)
    for row in judge("pp2", recording, calibration):
        assert row.step_time_mape < 0.01


def shorter(fit):
    return dataclasses.replace(
        fit,
        forward=tuple(0.9 * c for c in fit.forward),
        backward=tuple(0.9 * c for c in fit.backward),
    )


def test_calibration_is_the_first_third(tmp_path):
    recording = recording_of(tmp_path)
    first, others = divided(recording)
    assert {step.round for step in first} == {0, 1, 2, 3}
    assert {step.round for step in others} == set(range(4, 12))
    assert {step.round for step in recording.counted} == {12}


def test_ranks_share_cores_in_turns_and_those_of_a_stage_one():
    assert [core_of(rank, 4, 4, 2) for rank in range(4)] == [0, 1, 0, 1]
    assert [core_of(rank, 4, 2, 2) for rank in range(4)] == [0, 0, 1, 1]
    assert [core_of(rank, 2, 2, 8) for rank in range(2)] == [0, 1]
    # Where there are enough, each process has one, also of those that compute together.
    assert [core_of(rank, 2, 1, 2) for rank in range(2)] == [0, 1]
    assert [core_of(rank, 4, 2, 4) for rank in range(4)] == [0, 1, 2, 3]


def test_recordings_that_cannot_be_judged_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"is no recording .* record it again"):
        Recording.read(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"steps": [{"loss": 1}]}')
    with pytest.raises(ConfigError, match="is no recording"):
        Recording.read(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="5 rounds are too few"):
        calibrate(recording_of(tmp_path, rounds=5))

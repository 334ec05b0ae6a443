"""A packing that a test defines is one in every command: its file and its name are all it takes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megatron_wlb.cli.main import main
from megatron_wlb.cost import CostModel, DocumentCost
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document
from megatron_wlb.planning.guards import check
from megatron_wlb.planning.packing import PackingSettings, packer, unread
from megatron_wlb.planning.packing.base import Limits, Packer, load_state, save_state
from megatron_wlb.runtime.megatron_lm import refusals
from megatron_wlb.settings.command_line import build_parser, parse
from megatron_wlb.settings.packings import PACKINGS, Place

SMALL = ["--window", "1024", "--num-micro-batches", "4", "--steps", "6"]


class RoundRobin(Packer):
    """Deals documents out in turn, K of them to a micro-batch in a row."""

    name = "round-robin"
    reads = frozenset({"max_tokens", "look_ahead"})
    number = "look_ahead"

    def __init__(self, limits: Limits, in_a_row: int = 1) -> None:
        self.limits, self.in_a_row = limits, max(1, in_a_row)
        self._waiting: list[Document] = []

    @classmethod
    def make(cls, settings: PackingSettings, limits: Limits, cost: CostModel) -> RoundRobin:
        return cls(limits, settings.look_ahead)

    @property
    def waiting(self) -> Sequence[Document]:
        return self._waiting

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        self.limits = self.limits.at(step)
        self.limits.check(documents)
        documents, self._waiting = [*self._waiting, *documents], []
        micro_batches: list[list[Document]] = [[] for _ in range(self.limits.num_micro_batches)]
        for turn, document in enumerate(documents):
            chosen = micro_batches[turn // self.in_a_row % len(micro_batches)]
            fits = sum(d.length for d in chosen) + document.length <= self.limits.max_tokens
            (chosen if fits else self._waiting).append(document)
        return micro_batches

    def flush(self, step: int) -> list[list[Document]]:
        return self.pack((), step)

    def state_dict(self) -> dict[str, Any]:
        return save_state(self, waiting=self._waiting)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        (waiting,) = load_state(self, state, "waiting")
        self.limits.check(waiting)
        self._waiting = waiting


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("deals documents in turn", f"{__name__}:RoundRobin")
    monkeypatch.setitem(PACKINGS, RoundRobin.name, place)


def test_help_and_command_line_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "round-robin: deals documents in turn" in " ".join(build_parser().format_help().split())
    config = parse(["--wlb-packing", "round-robin", "--wlb-look-ahead", "2"])
    assert PackingSettings.of_config(config.wlb, 2048).flags() == [
        "--wlb-packing", "round-robin", "--wlb-max-tokens", "2048", "--wlb-look-ahead", "2",
    ]  # fmt: skip
    assert PackingSettings.parse("round-robin:2", 1024, 2048).title == "round-robin"


def test_pack_and_simulate_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    source = ["--distribution", "reference", *SMALL]
    for command, *more in (["pack"], ["simulate", "--model", "550m", "--pp-size", "2"]):
        named = ["--packing", "original,round-robin:3", "--json"]
        assert main([command, *source, *more, *named]) == 0
        said = json.dumps(json.loads(capsys.readouterr().out))
        assert '"round-robin' in said


def test_its_planner_resumes_where_it_stopped() -> None:
    def planner() -> Packer:
        cost = DocumentCost(1.0, 0.001, 2.0, 0.002)
        return packer("round-robin", num_micro_batches=2, window=64, cost=cost)

    documents = [Document(0, n, 0, 50, True, 0, n, 0) for n in range(8)]
    first, second = planner(), planner()
    first.pack(documents, 0)
    assert len(first.waiting) == 4
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.pack([], 1) == first.pack([], 1) != [[], []]


def test_what_it_cannot_do_is_refused_everywhere() -> None:
    with pytest.raises(ConfigError, match="round-robin packing has no shaped steps; leave"):
        PackingSettings.parse("round-robin+shape", 1024, 2048)
    flags = ["--wlb-packing", "round-robin", "--wlb-shape", "on"]
    flags += ["--pipeline-model-parallel-size", "2"]
    with pytest.raises(ConfigError, match="round-robin packing has no shaped steps; leave"):
        check(parse(flags), 2)
    assert unread(parse([*flags, "--wlb-hold-tau", "2"]).wlb)["wlb_hold_tau"].endswith(" hold")


def test_the_launcher_refuses_what_a_packing_says(monkeypatch: pytest.MonkeyPatch) -> None:
    args = argparse.Namespace(
        mock_data=True, skip_train=True, defer_embedding_wgrad_compute=True,
        wlb_packing="round-robin", world_size=2,
        tensor_model_parallel_size=1, pipeline_model_parallel_size=2, context_parallel_size=1,
    )  # fmt: skip
    refusals.check(args)
    monkeypatch.setattr(RoundRobin, "cannot", {"--defer-embedding-wgrad-compute": "it is made up"})
    with pytest.raises(ConfigError, match="does not work with --wlb-packing: it is made up; leave"):
        refusals.check(args)

"""Which ranks differ, and in what, is said by name; ranks are compared over a store."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_wlb.errors import LostRankError, PlanError, WLBError
from megatron_wlb.runtime.ranks import agreement
from megatron_wlb.runtime.ranks.agreement import Held, differences, of_settings
from megatron_wlb.settings.config import Config, WlbConfig

SAME = {"numpy": "2.3.5", "--seed": "7"}


def held(*values: Mapping[str, str]) -> list[Held]:
    return [Held(rank, f"n{rank}", own) for rank, own in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([SAME] * 3, ""),
        (
            [SAME, SAME | {"numpy": "2.1.0"}, SAME],
            "rank 1 (host n1) has numpy 2.1.0, the others 2.3.5",
        ),
        (
            [SAME, SAME | {"--seed": "8"}],
            "rank 0 (host n0) has --seed 7, rank 1 (host n1) 8",
        ),
        (
            [SAME, {"numpy": "2.3.5"}, SAME],
            "rank 1 (host n1) has --seed nothing, the others 7",
        ),
        (
            [SAME] * 6 + [SAME | {"--seed": "8"}] * 5,
            "ranks 6, 7, 8 and 2 more (hosts n6, n7, n8) have --seed 8, the others 7",
        ),
        (
            [{name: "0" for name in "abcde"}] * 2 + [{name: "1" for name in "abcde"}],
            "rank 2 (host n2) has a 1, the others 0; rank 2 (host n2) has b 1, the others 0; rank "
            "2 (host n2) has c 1, the others 0; and 2 more differ",
        ),
        (
            [{"cost": "x" * 500 + "1"}, {"cost": "x" * 500 + "2"}],
            f"rank 0 (host n0) has cost …{'x' * 20}1, rank 1 (host n1) …{'x' * 20}2",
        ),
    ],
)
def test_differences_name_the_minority_and_both_values(
    values: Sequence[Mapping[str, str]], expected: str
) -> None:
    assert differences(held(*values)) == expected


def told_by_store(
    values: Sequence[Mapping[str, str]],
    num: int | None = None,
    store: dist.Store | None = None,
) -> list[WLBError]:
    """What each rank raises that compares itself, of so many that should."""
    store, raised = store or dist.HashStore(), []

    def compare(rank: int) -> None:
        limit = datetime.timedelta(seconds=0.3 if num else 20)
        try:
            agreement.compare_by_store(store, rank, num or len(values), values[rank], limit)
        except WLBError as error:
            raised.append(error)

    threads = [threading.Thread(target=compare, args=(rank,)) for rank in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_store_tells_every_rank_the_same() -> None:
    assert told_by_store([SAME] * 5) == []
    errors = told_by_store([SAME, SAME, SAME | {"--seed": "8"}, SAME, SAME])
    assert len(errors) == 5 and len(set(map(str, errors))) == 1
    assert isinstance(errors[0], PlanError)
    assert str(errors[0]).startswith("ranks differ: rank 2 (host ")
    assert "has --seed 8, the others 7; start all ranks with the same" in str(errors[0])


def test_rank_that_does_not_come_is_named_in_time() -> None:
    errors = told_by_store([SAME, SAME], num=4)
    assert [type(error) for error in errors] == [LostRankError] * 2
    assert "2 of 4 are missing: ranks 2, 3" in str(errors[0])


@pytest.mark.parametrize("before", [[SAME] * 2, [SAME, {"--seed": "8"}]], ids=["same", "other"])
def test_restart_is_compared_anew(
    before: Sequence[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()  # torchrun's stays over its restarts
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    told_by_store(before, store=store)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    errors = told_by_store([SAME, SAME | {"--seed": "9"}], store=store)
    assert len(errors) == 2 and "--seed 7, rank 1" in str(errors[0])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert told_by_store([SAME] * 2, store=store) == []


def test_settings_are_those_that_change_training(tmp_path: Path) -> None:
    file, copy, other = (tmp_path / name for name in ("file.yaml", "copy.yaml", "other.yaml"))
    file.write_text("a: 1\n")
    copy.write_text("a: 1\n")
    other.write_text("a: 2\n")

    def of(**wlb: str) -> dict[str, str]:
        return of_settings(replace(Config(), wlb=WlbConfig(**wlb)).flat())

    assert of(wlb_metrics="here") == of(wlb_metrics="there"), "it is for people"
    assert of(wlb_hardware=str(file)) == of(wlb_hardware=str(copy)), "copies are the same"
    assert of(wlb_hardware=str(file)) != of(wlb_hardware=str(other))
    assert of(wlb_packing="hold") != of(wlb_packing="wlb")
    assert "--data-path" not in of(), "machines may have copies elsewhere"
    assert of_settings({"profile": True}) == of_settings({"profile": False})
    assert of_settings({"hook": object()}) == of_settings({"hook": object()})


def test_software_has_versions_sources_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    before = agreement.of_software()
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("HOME", "/elsewhere")
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_UB_SOCKET_IFNAME", "eth1")
    monkeypatch.setattr(np, "__version__", "2.1.0")
    assert dict(agreement.of_software().items() - before.items()) == {
        "numpy": "2.1.0",
        "variable NCCL_ALGO": "Ring",
        "variable NVTE_FUSED_ATTN": "0",
    }

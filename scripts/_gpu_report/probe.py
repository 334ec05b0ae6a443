"""What a machine with one GPU can show of several ranks: the programs, the queues, NCCL, MPS."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch

from _gpu_report import sharing
from _gpu_report.drawing import Pictures, table
from _gpu_report.environment import gpu_facts
from _gpu_report.results import Results
from _gpu_report.running import StartedError, run_together, world
from megatron_wlb.errors import CompatibilityError

CONNECTIONS = (1, 8)
QUEUES_S, MEETING_S = 20.0, 30.0
TURNS, AT_ONCE, GLOO = "2 ranks in turns", "4 ranks at once, 25 % of the SMs each", "2 ranks, gloo"
HELD_UP = 0.5
"""A share of the long kernel's time after which a stream was held up, or a host waited."""


def measure(results: Results) -> None:
    on_gpu = torch.cuda.is_available() and not results.tiny
    found = gpu_facts()
    names = ("name", "driver_version", "compute_mode", "mig.mode.current")
    results.put("machine", {
        **{name: found[name] for name in names if name in found},
        "MPS": sharing.mps_program() or f"there is no {sharing.MPS}",
        "NCCL that torch was built with": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu
        else "none: no GPU",
    })  # fmt: skip
    if not on_gpu:
        _meet(results, GLOO, 2, {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"})
        return
    for number in CONNECTIONS:
        results.attempt(f"queues, {number} connections", lambda n=number: _queues(n), StartedError)
    try:
        with sharing.mps(4):
            results.figures["machine"]["MPS server"] = "starts"
    except CompatibilityError as error:
        results.figures["machine"]["MPS server"] = str(error)
    try:
        results.figures["machine"]["NCCL of ranks"] = sharing.check_nccl()
    except CompatibilityError as error:
        results.put(TURNS, {"obstacle": str(error)})
        return
    _meet(results, TURNS, 2, sharing.environment(2))

    def at_once() -> Any:
        with sharing.mps(4) as shared:
            return _met(results, AT_ONCE, 4, sharing.environment(4) | shared)

    results.attempt(AT_ONCE, at_once, StartedError, CompatibilityError)


def _queues(connections: int) -> Any:
    command = [sys.executable, "-m", "_gpu_report.queues"]
    given = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=given,
                              timeout=QUEUES_S)  # fmt: skip
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or ""
        raise StartedError(f"{error}: {str(said)[-300:]}") from None
    return json.loads(done.stdout)


def _meet(results: Results, name: str, num: int, environment: Mapping[str, str]) -> None:
    results.attempt(name, lambda: _met(results, name, num, environment), StartedError)


def _met(results: Results, name: str, num: int, environment: Mapping[str, str]) -> Any:
    command = [sys.executable, "-m", "_gpu_report.meeting"]
    given = [{**one, **environment} for one in world(num)]
    folder = results.out / "probe" / name.partition(",")[0].replace(" ", "-")
    return json.loads(run_together(command, given, folder, MEETING_S)[0].splitlines()[-1])


def wrong(figures: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}, rank {rank}: {figure.removesuffix(' is right')} was received wrong"
        for name, found in figures.items()
        for rank, own in enumerate(found.get("ranks", ()))
        for figure, value in own.items()
        if figure.endswith("is right") and not value
    ]


def lines(figures: Mapping[str, Any], pictures: Pictures) -> list[str]:
    del pictures
    queues, calls, met, missing = [], [], [], []
    for name, found in figures.items():
        if "obstacle" in found:
            missing.append(f"- {name}: {found['obstacle']}".replace("\n", " / "))
        elif name.startswith("queues"):
            connections = name.split()[1]
            for rows, kind in ((queues, "held up"), (calls, "waits")):
                rows += [
                    [connections, what, f"{share:.0%}", "yes" if share > HELD_UP else "no"]
                    for what, share in found[kind].items()
                ]
        elif "ranks" in found:
            means = {
                key: statistics.fmean(own[key] for own in found["ranks"] if key in own)
                for key in found["ranks"][-1]
            }
            met += [[name, key, f"{value:,.4g}"] for key, value in means.items()]
    return [
        *table(["machine", "found"], list(figures.get("machine", {}).items())),
        "",
        *table(["connections", "between a long kernel and one of another stream", "that one ends "
                "after, of the long one's time", "held up"], queues),
        "",
        *table(["connections", "call beside a long kernel", "returns after, of its time",
                "the host waits"], calls),
        "",
        *table(["ranks", "figure, mean of ranks", "value"], met),
        *[""] * bool(missing),
        *missing,
    ]  # fmt: skip

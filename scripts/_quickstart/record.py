"""What the launcher runs for a recording: the stand-in's ``pretrain``, a step at a time, in turns.

``torchrun … -m megatron_wlb.launch scripts/_quickstart/record.py FLAGS``, one run a packing. Each
tells what it has done on stdout, and sleeps on stdin until it hears what comes next:
:func:`_quickstart.recording.make` starts the runs and conducts them. The loop, the step and all
between are Megatron's and the launcher's; plans are only kept, so that a step can run again.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import time
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training import get_args, get_tokenizer, training

from _quickstart.live_bytes import LiveBytes, step_bytes
from _quickstart.recording import SAYS, core_of
from _quickstart.timeline import StepTimers
from megatron_wlb.cost import Cost, cost_from_dict
from megatron_wlb.plan import StepPlan
from megatron_wlb.runtime.measuring import measure
from megatron_wlb.runtime.megatron_lm import arguments, chunks
from megatron_wlb.runtime.ranks.transfer import from_first_rank, of_all_ranks


class Turns:
    """A run that waits for its turn before each step."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        """What is told next."""
        self.cost: Cost
        self.plans: list[tuple[StepPlan, float]] = []
        """And the µs that each took."""
        self.timers = StepTimers()

    def ask(self) -> Any:
        """Tells what was done, once all ranks are idle; returns what comes next, on all of them."""
        torch.distributed.barrier()
        return from_first_rank(self._ask)

    def _ask(self) -> Any:
        sys.stdout.write(f"{SAYS}{json.dumps(self.said)}\n")
        sys.stdout.flush()
        return json.loads(sys.stdin.readline() or "null")  # null: nobody conducts any more

    def share_cost(self, measure: Any, model: Any, *more: Any) -> Cost:
        """Measures the cost if no other run has; all plan by the same."""
        world_size, pp_size = torch.distributed.get_world_size(), model.groups.pp.size()
        cores = sorted(os.sched_getaffinity(0))
        core = core_of(torch.distributed.get_rank(), world_size, pp_size, len(cores))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {cores[core]})
        known = self.ask()
        self.cost = cost_from_dict(known) if known else measure(model, *more)
        self.said = {
            "config": arguments.config_of(get_args()).flat(),
            "vocab_size": get_tokenizer().vocab_size,
            "world_size": world_size,
            "num_cores": len(cores),
            "cost": self.cost.as_dict(),
        }
        return self.cost

    def train_step(
        self, original: Any, forward: Any, data: Any, model: Any, optimizer: Any, scheduler: Any,
        config: Any, schedule: Any, **more: Any,
    ) -> Any:  # fmt: skip
        """Megatron's, of the plan that is asked for."""
        if not self.plans:
            gc.collect()
            gc.freeze()  # What is there stays: the collector need not look through it again.
        told = self.ask()
        if told is None:
            sys.exit("the quickstart is gone")
        while len(self.plans) <= told["round"]:
            start_s = time.monotonic()
            plan = next(data)
            self.plans.append((plan, (time.monotonic() - start_s) * 1e6))
        plan, plan_us = self.plans[told["round"]]
        data, config.timers = RerunDataIterator(iter([plan])), self.timers
        used: list[int] = []
        if told["counts_bytes"]:
            schedule = partial(_counted, schedule, used)
        gc.collect()  # Not in the midst of a step.
        torch.distributed.barrier()
        self.timers.take()
        start_s = time.monotonic()
        done = original(forward, data, model, optimizer, scheduler, config, schedule, **more)
        torch.distributed.barrier()
        stop_s = time.monotonic()
        losses, intervals, all_used = zip(
            *of_all_ranks((done[0].get("lm loss"), self.timers.take(), used)), strict=True
        )
        rows, cost = plan.micro_batches, self.cost
        self.said = {
            "round": told["round"],
            "plan_us": plan_us,
            "start_us": start_s * 1e6,
            "stop_us": stop_s * 1e6,
            "loss": float(losses[-1]),
            "num_tokens": plan.num_tokens,
            "imbalance": plan.imbalance,
            "delay_steps": plan.delay_steps,
            "lengths": [[list(m.lengths) for m in row] for row in rows],
            "predicted_us": [[m.predicted_us for m in row] for row in rows],
            "intervals": intervals,
            "activation_bytes": [own for (own,) in all_used] if used else None,
            "prefixes": [[list(m.prefixes) for m in row] for row in rows] if plan.chains else [],
            "chains": plan.chains,
            "documents": [
                (d.corpus, d.epoch, d.number, n - at, cost.document_us(n) - work_before)
                for m in plan for d, at, n in m.spans
                for work_before in [cost.document_us(at) if at else 0.0]
            ],
        }  # fmt: skip
        if more["iteration"] + 1 == get_args().train_iters:
            self.ask()  # The loop ends when no other run is timed.
        return done


def _counted(schedule: Any, used: list[int], **options: Any) -> Any:
    """Runs forward and backward, and notes the most bytes that they add."""
    gc.unfreeze()
    model = chunks.of_chunks(options["model"])
    with LiveBytes() as live:
        # What exists already, or operations that return it would count it as new.
        live.watch(o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
        reports, _, added = step_bytes(live, model, partial(schedule, **options))
    used.append(added)
    return reports


if __name__ == "__main__":
    turns = Turns()
    shared = partial(turns.share_cost, measure.measured_cost)
    mock.patch.object(measure, "measured_cost", shared).start()
    training.train_step = partial(turns.train_step, training.train_step)
    runpy.run_module("megatron_wlb.pretrain_gpt", run_name="__main__")

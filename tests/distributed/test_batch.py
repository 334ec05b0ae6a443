"""What building batches leaves behind."""

from __future__ import annotations

import dataclasses
import gc

from helpers.gloo import GlooPool

from megatron_wlb.settings.command_line import parse

FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-layers 4 --seq-length 64 --vocab-size 59 "
    "--make-vocab-size-divisible-by 32 --global-batch-size 3"
)


def kept_after_steps() -> list[int]:
    """Micro-batches whose tensors are alive after each of three steps of three.

    The steps' micro-batches have other numbers, as those of a data-parallel rank have.
    """
    from helpers.ranks import build_runner, scatter_for
    from helpers.workload import make_workload

    from megatron_wlb.runtime.attention.core import PlanSeqParams

    config = parse(FLAGS.split())
    workload = make_workload([[8, 30, 5, 9]] * 3, vocab_size=59)
    runner = build_runner(config, workload)
    kept = []
    for number in range(3):
        plan = scatter_for(config, workload, 1, number)
        ranks = [
            tuple(dataclasses.replace(m, index=3 * number + m.index) for m in rank)
            for rank in plan.micro_batches
        ]
        runner.run(dataclasses.replace(plan, micro_batches=tuple(ranks)))
        gc.collect()
        kept.append(sum(isinstance(found, PlanSeqParams) for found in gc.get_objects()))
    return kept


def test_a_step_keeps_no_tensors_of_the_one_before(gloo: GlooPool) -> None:
    (kept,) = gloo.run(1, kept_after_steps)
    assert max(kept) <= 3

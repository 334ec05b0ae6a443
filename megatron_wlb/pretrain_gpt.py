"""The embedded trainer: a GPT on megatron-core alone, with Megatron's flag names.

``torchrun --nproc-per-node 2 -m megatron_wlb.pretrain_gpt --pipeline-model-parallel-size 2
--data-path corpus …`` on GPUs, or on CPUs under the CPU emulation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_wlb import interrupts  # noqa: F401 - before all that takes time
from megatron_wlb.runtime.rank_main import end, rank_main
from megatron_wlb.runtime.ranks import watchdog
from megatron_wlb.settings import allocator
from megatron_wlb.settings.command_line import parse


def train(argv: Sequence[str]) -> None:
    """Trains as the command line says."""
    config = parse(argv)
    allocator.choose()
    # Imports torch, and then Megatron under the device's conditions.
    from megatron_wlb.runtime.ranks import agreement
    from megatron_wlb.runtime.trainer import distributed
    from megatron_wlb.simulator.choose import settled

    device = distributed.choose_device(config.wlb.wlb_device)
    allocator.tell(device)
    watchdog.watch(config.wlb.wlb_hang_seconds, end)
    agreement.compare_at_start(config.flat(), config.parallel.distributed_timeout_minutes)
    config = settled(config, int(os.environ.get("WORLD_SIZE", "1")))
    distributed.initialize(config, device)
    from megatron_wlb.runtime.trainer.loop import Trainer

    Trainer(config, device).train()
    distributed.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code. Errors are one line unless ``WLB_TRACEBACK=1``."""
    return rank_main(lambda: train(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())

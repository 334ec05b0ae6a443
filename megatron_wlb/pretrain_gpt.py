"""The embedded trainer: a GPT on megatron-core alone, with Megatron's flag names.

``torchrun --nproc-per-node 2 -m megatron_wlb.pretrain_gpt --pipeline-model-parallel-size 2
--data-path corpus …`` on GPUs, or on CPUs under the CPU emulation.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence

from megatron_wlb.config import parse
from megatron_wlb.errors import WLBError


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code. Errors are one line unless ``WLB_TRACEBACK=1``."""
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.ERROR,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stdout,
    )
    # Megatron tells of its buckets and indices at length; its warnings stay.
    logging.getLogger("megatron").setLevel(logging.WARNING)
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        # Imports torch, and then Megatron under the device's conditions.
        from megatron_wlb.runtime import distributed

        device = distributed.choose_device(config.wlb.wlb_device)
        distributed.initialize(config, device)
        from megatron_wlb.runtime.trainer import Trainer

        Trainer(config, device).train()
        distributed.shutdown()
    except WLBError as error:
        if os.environ.get("WLB_TRACEBACK") == "1":
            raise
        if rank != 0:
            # Most errors are the same on all ranks: torchrun ends the others once rank 0 has
            # said it. One that only this rank has is said a little later.
            time.sleep(2)
        where = f" (rank {rank})" if rank else ""
        sys.stderr.write(f"error{where}: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

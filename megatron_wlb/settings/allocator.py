"""How torch divides a GPU's memory: said in the environment, before it first asks for some.

Micro-batches differ in length from step to step. Segments of one size each do not fit the next
ones, and memory runs out while much of it is free; segments that grow in place do not have that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

logger = logging.getLogger(__name__)

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
VALUE = "expandable_segments:True"
_NEW_VARIABLE = "PYTORCH_ALLOC_CONF"  # torch 2.9 and later read it too
_chosen = False


def choose(flags: Sequence[str] = ()) -> None:
    """Lets segments grow, unless the user has said how memory is divided, or Megatron's ``flags``
    register buffers with NCCL, for which it refuses such segments.
    """
    global _chosen
    if "--use-nccl-ub" in flags:
        return
    if VARIABLE not in os.environ and _NEW_VARIABLE not in os.environ:
        os.environ[VARIABLE], _chosen = VALUE, True


def tell(device: str) -> None:
    """Logs what :func:`choose` did, where there is a GPU."""
    if _chosen and device == "cuda":
        logger.info("%s is not set; it is taken as %s", VARIABLE, VALUE)

"""What the optimizer refuses before a run is lost by it."""

from __future__ import annotations

from unittest import mock

import pytest
from helpers.gloo import GlooPool
from helpers.workload import make_workload

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.settings.command_line import parse

FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-layers 2 --seq-length 64 --vocab-size 59 "
    "--make-vocab-size-divisible-by 32 --global-batch-size 2 "
)


def build(flags: str) -> None:
    """As on a GPU where there is neither TransformerEngine nor Apex."""
    from helpers.ranks import build_trainer
    from megatron.core.optimizer import distrib_optimizer

    trainer = build_trainer(parse((FLAGS + flags).split()), make_workload([[8]], vocab_size=59))
    with mock.patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", False):
        _ = trainer.optimizer


def test_checkpoints_that_could_not_be_loaded_are_refused(gloo: GlooPool) -> None:
    for flag in ("--save run", "--load run"):
        with pytest.raises(CompatibilityError, match="neither TransformerEngine nor Apex"):
            gloo.run(1, build, f"--use-distributed-optimizer {flag}")
    gloo.run(1, build, "--use-distributed-optimizer")
    gloo.run(1, build, "--save run")

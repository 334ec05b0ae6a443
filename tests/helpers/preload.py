"""Megatron-core, imported under the CPU emulation, for processes to be forked with.

The fork server of :mod:`helpers.gloo` imports this module; nothing else should.
Whatever starts threads must stay out of it: a forked process has none of them.
"""

from __future__ import annotations

import argparse
import os
import sys

from megatron_wlb.runtime.emulation import cpu

cpu.install()

# After the emulation, which refuses a Megatron that was imported before it.
import megatron.core.distributed  # noqa: E402
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import megatron.core.optimizer  # noqa: E402
import megatron.core.parallel_state  # noqa: E402
import megatron.core.pipeline_parallel.schedules  # noqa: E402

from megatron_wlb.runtime.compat import hooks  # noqa: E402
from megatron_wlb.runtime.compat.source import MegatronSource  # noqa: E402

hooks.problems_of_installed(MegatronSource.installed())  # Ranks keep what is found here.

# The training loop too, of the checkout where one is named: which Megatron a rank finds is for the
# rank to say. Each rank would import all of transformers for a tokenizer.
_places = [*filter(None, [os.environ.get("MEGATRON_LM_PATH")])]
sys.path[:0] = _places
import megatron.core.tokenizers.text  # noqa: E402
import megatron.training.training  # noqa: E402, F401
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.training.argument_utils import ArgumentGroupFactory  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402

import megatron_wlb.runtime.megatron_lm.install  # noqa: E402, F401

for _place in _places:
    sys.path.remove(_place)

# What a flag's help says, which each rank would look up in Megatron's sources for half a second.
_docstrings = ArgumentGroupFactory._get_field_docstrings
_said: dict[type, dict[str, str]] = {}


def _once(factory: ArgumentGroupFactory, of: type) -> dict[str, str]:
    if of not in _said:
        _said[of] = _docstrings(factory, of)
    return {**_said[of]}


ArgumentGroupFactory._get_field_docstrings = _once
add_megatron_arguments(argparse.ArgumentParser())
# A rank's first save starts a process for a queue, which would import torch: it is forked, as that
# of asynchronous saves is.
filesystem_async.get_write_results_queue.__defaults__ = ("fork",)

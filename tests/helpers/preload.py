"""Megatron-core, imported under the CPU emulation, for processes to be forked with.

The fork server of :mod:`helpers.gloo` imports this module; nothing else should.
Whatever starts threads must stay out of it: a forked process has none of them.
"""

from __future__ import annotations

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

hooks.problems(MegatronSource.installed())  # Ranks keep the sources that are read here.

# The training loop too, of the checkout where one is named: which Megatron a rank finds is for the
# rank to say. Each rank would import all of transformers for a tokenizer.
_places = [*filter(None, [os.environ.get("MEGATRON_LM_PATH")])]
sys.path[:0] = _places
import megatron.core.tokenizers.text  # noqa: E402
import megatron.training.training  # noqa: E402, F401

import megatron_wlb.runtime.megatron_lm.install  # noqa: E402, F401

for _place in _places:
    sys.path.remove(_place)

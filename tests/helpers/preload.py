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

from megatron_wlb.runtime.compat import targets  # noqa: E402
from megatron_wlb.runtime.compat.source import MegatronSource  # noqa: E402

targets.problems(MegatronSource.installed())  # Ranks keep the sources that are read here.

if _checkout := os.environ.get("MEGATRON_LM_PATH"):
    # Its training loop too; only there: which Megatron a rank finds is for the rank to say.
    sys.path.insert(0, _checkout)
    import megatron.training.training  # noqa: F401

    sys.path.remove(_checkout)

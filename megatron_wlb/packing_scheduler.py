"""Where :mod:`megatron_wlb.adapters.packing_scheduler` was; the next release has it not."""

import warnings

from megatron_wlb.adapters.packing_scheduler import *  # noqa: F403

warnings.warn("import megatron_wlb.adapters.packing_scheduler instead", FutureWarning, stacklevel=2)

"""Where :mod:`megatron_wlb.adapters.packing_scheduler` was before; this path goes with the next release."""

import warnings

from megatron_wlb.adapters.packing_scheduler import *  # noqa: F403

warnings.warn("import megatron_wlb.adapters.packing_scheduler instead", FutureWarning, stacklevel=2)

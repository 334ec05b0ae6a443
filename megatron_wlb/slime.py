"""Where :mod:`megatron_wlb.adapters.slime` was before; this path goes with the next release."""

import warnings

from megatron_wlb.adapters.slime import *  # noqa: F403

warnings.warn("import megatron_wlb.adapters.slime instead", FutureWarning, stacklevel=2)

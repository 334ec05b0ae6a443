"""Where :mod:`megatron_wlb.adapters.verl` was before; this path goes with the next release."""

import warnings

from megatron_wlb.adapters.verl import *  # noqa: F403

warnings.warn("import megatron_wlb.adapters.verl instead", FutureWarning, stacklevel=2)

"""Where :mod:`megatron_wlb.adapters.verl` was; the next release has it not."""

import warnings

from megatron_wlb.adapters.verl import *  # noqa: F403

warnings.warn("import megatron_wlb.adapters.verl instead", FutureWarning, stacklevel=2)

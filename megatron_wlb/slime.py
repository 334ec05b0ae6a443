"""Where :mod:`megatron_wlb.adapters.slime` was; the next release has it not."""

import warnings

from megatron_wlb.adapters.slime import *  # noqa: F403

warnings.warn("import megatron_wlb.adapters.slime instead", FutureWarning, stacklevel=2)

"""Workload-balanced 4D-parallel training of large language models, as a plugin for Megatron-LM.

Data flows one way: documents -> plan -> run. Start reading at :mod:`megatron_wlb.planning.planner`.
"""

__version__ = "0.1.0"

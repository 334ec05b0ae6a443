"""A model that runs plans, for tests, measurements, samples at hand and short studies.

It has no loop: a real run is the launcher's (:mod:`megatron_wlb.runtime.megatron_lm`).
"""

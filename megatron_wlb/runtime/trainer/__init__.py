"""The embedded trainer: a small loop on megatron-core, for the quickstart and the oracle tests.

It is frozen: it gets no features of Megatron-LM. What a real run needs goes into
:mod:`megatron_wlb.runtime.megatron_lm`.
"""

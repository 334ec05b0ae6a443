"""Strategies: what layout each model replica of a step has, what it costs, and who stores what.

After Hydraulis (§5, Appendix B). Which documents a replica runs is in
:mod:`megatron_wlb.planning.balance.assign`, which strategies a run chooses from in
:mod:`megatron_wlb.strategies.plan.propose`.
"""

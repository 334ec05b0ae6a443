"""What a step would cost: Megatron's pipeline schedules as data, a replay of them, and plots.

``order`` says which action each pipeline rank runs next and what it receives; ``engine`` replays
an order with given times; ``plot`` draws lengths, micro-batches and timelines. Plain Python: no
torch and no megatron. (``plot`` needs matplotlib, so nothing is imported here.)
"""

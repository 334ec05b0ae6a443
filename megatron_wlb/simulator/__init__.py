"""What a step would cost: a replay of schedules, whole steps, their memory, traces.

``engine`` makes timelines of orders and times; ``step`` puts a whole step together, with ``memory``
and ``sharing``; ``trace`` shows it. Plain Python: no torch and no megatron.
"""

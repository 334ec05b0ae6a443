"""What a step would cost: schedules as data, a replay of them, whole steps, traces and plots.

``order`` says which action each pipeline rank runs next and what it receives, and ``text`` reads
and writes that; ``graph`` replays an order with given times, in arrays, and ``engine`` makes
timelines of it; ``costs`` says what the parts of a step take, and ``step`` puts a whole one
together, with ``memory``; ``trace`` and ``plot`` show it. Plain Python: no torch and no megatron.
(``plot`` needs matplotlib, so nothing is imported here.)
"""

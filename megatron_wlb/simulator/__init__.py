"""What a step would cost: a replay of schedules, whole steps, their memory, traces."""

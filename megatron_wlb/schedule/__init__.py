"""Pipeline schedules as data: orders of actions, graphs, text."""

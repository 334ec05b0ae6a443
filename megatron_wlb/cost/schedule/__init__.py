"""Pipeline schedules as data: orders of actions, and graphs of them."""

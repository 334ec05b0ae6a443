"""Documents to plans: planner, plans made ahead, shaping, and all of it from settings."""

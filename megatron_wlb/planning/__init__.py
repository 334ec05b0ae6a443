"""Plans made ahead, shaped steps, and all that plans need, from settings."""

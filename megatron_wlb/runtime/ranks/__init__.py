"""What ranks hold alike, tell each other and wait for."""

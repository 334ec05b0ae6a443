"""What a run is told: configuration, command line, recipes."""

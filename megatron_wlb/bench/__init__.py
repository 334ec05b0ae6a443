"""Measurements: the quickstart, recorded runs, rates of a machine."""

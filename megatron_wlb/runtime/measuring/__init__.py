"""Figures of a run, and of the machine that it runs on."""

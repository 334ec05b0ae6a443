"""Packings, layouts and papers compared by simulation: tables, plots, pages."""

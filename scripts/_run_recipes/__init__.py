"""The parts of ``scripts/run_recipes.py``."""

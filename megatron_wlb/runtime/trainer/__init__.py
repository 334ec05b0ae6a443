"""The embedded trainer."""

"""One step of a plan: its batches, its messages, its order."""

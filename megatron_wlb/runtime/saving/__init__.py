"""What checkpoints of both trainers share."""

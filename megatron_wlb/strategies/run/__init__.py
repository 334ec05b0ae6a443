"""Runs strategies (Hydraulis §5): unlike replicas, which may be others in each step.

Weights and optimizer state are in a store of shards. A step pulls what its replicas need, runs each
replica's schedule in process groups of its own, and pushes gradients.
"""

"""Attention over documents: kernels, context parallelism, positions."""

"""Megatron on a CPU."""

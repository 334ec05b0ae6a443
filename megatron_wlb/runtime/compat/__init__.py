"""Megatron's sources and versions: what is hooked, checked and patched."""

"""Megatron's GPT, changed for documents."""

"""What runs a plan on Megatron-core. With the trainer, the only code that imports ``megatron``."""

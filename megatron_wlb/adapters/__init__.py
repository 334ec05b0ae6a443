"""Other trainers on plans of this package: verl, slime, Megatron-core's schedulers."""

"""What turns the training loop of a Megatron-LM checkout, ``megatron.training``, into one that
runs step plans: installed by :mod:`megatron_wlb.launch`, undone by one call.
"""

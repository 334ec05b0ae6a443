"""The names of Megatron-LM's ``megatron.training`` that are replaced or called, with the parameters
counted on; beside those of megatron-core in :mod:`megatron_wlb.runtime.targets`.
"""

from __future__ import annotations

_T = "megatron.training.training"
_C = "megatron.training.checkpointing"

TRAINING_TARGETS: dict[str, dict[str, str]] = {
    # Version -> "module:name" -> parameters that must be there.
    "0.16.1": {
        "megatron.training.arguments:add_megatron_arguments": "parser",
        "megatron.training.initialize:validate_args": "args defaults",
        f"{_T}:pretrain": (
            "train_valid_test_dataset_provider model_provider model_type forward_step_func"
        ),
        f"{_T}:get_model": "model_provider_func model_type wrap_with_ddp",
        f"{_T}:get_forward_backward_func": "",
        f"{_T}:dummy_train_step": "data_iterator",
        f"{_T}:num_floating_point_operations": "args batch_size",
        f"{_T}:training_log": "loss_dict learning_rate iteration grad_norm is_first_iteration",
        f"{_T}:compute_throughputs_and_append_to_progress_log": (
            "iteration num_floating_point_operations_so_far"
        ),
        f"{_T}:save_checkpoint": "iteration model optimizer opt_param_scheduler",
        f"{_T}:load_checkpoint": "ddp_model optimizer opt_param_scheduler",
        f"{_C}:generate_state_dict": "args model optimizer rng_state",
        f"{_C}:_load_base_checkpoint": "load_dir args rank0",
        "megatron.training.utils:get_blend_and_blend_per_split": "args",
        "megatron.training.utils:append_to_progress_log": "string",
        "megatron.core.models.gpt:GPTModel.__init__": "self config transformer_layer_spec",
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__": "cls config hidden_size",
        "megatron.core.utils:unwrap_model": "model",
    },
}

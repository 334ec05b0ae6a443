"""How ``megatron.training`` is spoken to, one class a version: the newest in full, an older one as
what differs. Nothing else asks for a version of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


class MegatronLM:
    """Models are built from a configuration that the script makes of its arguments: from 0.19."""

    trains_prompts: tuple[str, ...] = ("default",)
    """Formats of conversations whose prompts are targets too."""

    def with_provider(self, set_up: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keywords of a call of ``setup_model_and_optimizer``, so that ``get_model`` is asked
        for models, and builds them by the arguments of that moment.
        """
        container = copy.copy(set_up["cfg_container"])
        container.model = None

        def provider(
            pre_process: bool,
            post_process: bool,
            vp_stage: int | None = None,
            config: Any = None,
            pg_collection: Any = None,
        ) -> Any:
            from megatron.training import get_args
            from megatron.training.argument_utils import gpt_config_from_args

            made = gpt_config_from_args(get_args(), config)
            builder = made.get_builder_cls()(made)
            return builder.build_model(pg_collection, pre_process, post_process, vp_stage)

        return {**set_up, "cfg_container": container, "model_provider_func": provider}


class MegatronLM019(MegatronLM):
    """Another format than the default trains prompts: up to 0.19."""

    trains_prompts = "default", "identity"


class MegatronLM018(MegatronLM019):
    """The script gives a function that builds its models: up to 0.18."""

    def with_provider(self, set_up: Mapping[str, Any]) -> Mapping[str, Any]:
        return set_up

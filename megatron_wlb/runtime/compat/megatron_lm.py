"""How ``megatron.training`` is spoken to, one class a version: the newest in full, an older one as
what differs. Nothing else asks for a version of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


class MegatronLM:
    """Models are built from a configuration that the script makes of its arguments: from 0.19 on.
    Arguments are parsed and checked by the script, before ``pretrain``: from 0.18 on.
    """

    checks_arguments_in = "megatron.training.arguments"
    """The module by whose name ``validate_args`` is called."""

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

    def append_to_progress_log(self, folder: str, line: str) -> None:
        """Writes a line to ``progress.txt`` in ``folder``, which is that of ``--save``."""
        from megatron.training.utils import append_to_progress_log

        append_to_progress_log(folder, line)


class MegatronLM018(MegatronLM):
    """The script gives a function that builds its models: up to 0.18."""

    def with_provider(self, set_up: Mapping[str, Any]) -> Mapping[str, Any]:
        return set_up


class MegatronLM017(MegatronLM018):
    """Arguments are parsed and checked inside ``pretrain``: 0.16 and 0.17."""

    checks_arguments_in = "megatron.training.initialize"

    def append_to_progress_log(self, folder: str, line: str) -> None:
        from megatron.training.utils import append_to_progress_log

        append_to_progress_log(line)

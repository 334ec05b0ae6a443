"""How ``megatron.training`` is spoken to, one class a version: the newest in full, an older one as
what differs. Nothing else asks for a version of it.
"""

from __future__ import annotations


class MegatronLM:
    """Arguments are parsed and checked by the script, before ``pretrain``: from 0.18 on."""

    checks_arguments_in = "megatron.training.arguments"
    """The module by whose name ``validate_args`` is called."""

    def append_to_progress_log(self, folder: str, line: str) -> None:
        """Writes a line to ``progress.txt`` in ``folder``, which is that of ``--save``."""
        from megatron.training.utils import append_to_progress_log

        append_to_progress_log(folder, line)


class MegatronLM017(MegatronLM):
    """Arguments are parsed and checked inside ``pretrain``: 0.16 and 0.17."""

    checks_arguments_in = "megatron.training.initialize"

    def append_to_progress_log(self, folder: str, line: str) -> None:
        from megatron.training.utils import append_to_progress_log

        append_to_progress_log(line)

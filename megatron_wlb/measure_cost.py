"""Measures the cost tables of a model, layout and machine, and writes them for ``--wlb-cost FILE``.

Run under torchrun with Megatron's flags of the model and its layout: it is built as for training,
but nothing is trained. Tables go as far as S_max.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_wlb import interrupts  # noqa: F401 - before all that takes time
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.files import write_text
from megatron_wlb.runtime.rank_main import check_writable, rank_main
from megatron_wlb.settings.command_line import Parser, parse
from megatron_wlb.settings.config import Config


def run(config: Config, path: Path) -> None:
    """Measures on all ranks; rank 0 writes ``path``.

    Raises :class:`ConfigError` where ``path`` cannot be written (found before measuring), or no
    vocabulary is known.
    """
    check_writable("--tables", path)
    from megatron_wlb.runtime.trainer import distributed

    given = config.data.vocab_size
    trainer = distributed.start(config, None if given is None else Corpora([], given, {}))
    import torch

    from megatron_wlb.planning.from_config import max_tokens, model_shape, run_of
    from megatron_wlb.runtime.measuring.measure import measure_tables

    model, processes = trainer.model, torch.distributed.get_world_size()
    padded = model.gpts[0].vocab_size
    on_gpu = model.device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu"
    tables = measure_tables(
        model,
        model_shape(config, padded),
        max_tokens(config, run_of(config, padded, model.groups.dp.size())),
        trainer.corpora.vocab_size,
        f"{name}, {processes} processes, torch {torch.__version__}",
    )
    if torch.distributed.get_rank() == 0:
        write_text(path, json.dumps(tables.as_dict(), indent=1))
    distributed.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m megatron_wlb.measure_cost", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--tables", type=Path, required=True, help="JSON file to write")

    def program() -> None:
        own, rest = parser.parse_known_args(argv)
        run(parse(rest), own.tables)

    return rank_main(program)


if __name__ == "__main__":
    sys.exit(main())

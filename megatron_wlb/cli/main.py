"""The ``wlb`` command: one sub-command a module, imported only when it runs."""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Sequence

from megatron_wlb import __version__
from megatron_wlb.cli.flags import add_command
from megatron_wlb.errors import run_program
from megatron_wlb.settings.command_line import Parser

COMMANDS = {
    "audit": "prove which documents a run trained on, each token once",
    "compare": "say which of two runs was faster, and how sure that is",
    "corpus": "turn text files into a corpus that Megatron reads, or say what is in one",
    "doctor": "say what is installed, what fits, and what is wrong",
    "pack": "compare the packings on your documents, without training",
    "profile": "measure this machine's attention and linear rates, for the costs that plans are "
    "made with",
    "recipe": "show or run a Megatron recipe (model_config.yaml)",
    "tune": "find the packing settings that suit your documents",
    "simulate": "predict time and memory of training steps: packings and shardings side by side",
    "plan": "find the layout, batch and packing that train a model fastest on so many GPUs",
}
"""Name -> one line of help. The module of that name has ``configure(parser)``, which sets ``run``:
a function from the parsed arguments to the exit status. With ``PASSES_ON`` these have what stands
after ``--`` as ``extra``."""

_EPILOG = """\
examples:
  wlb corpus build ~/books notes.jsonl --out corpora/books --tokenizer bpe
  wlb corpus stats corpora/books --window 32768 --plot lengths.png
  wlb pack corpora/books --window 32768 --num-micro-batches 8
  wlb tune corpora/books --window 32768 --num-micro-batches 8 --max-delay 0.3
  wlb simulate corpora/books --model 7b --tp-size 8 --pp-size 4 --report step.html
  wlb plan corpora/books --model 7b --num-devices 64 --out 7b.yaml
  wlb profile --out machine.yaml
  wlb audit checkpoints
  wlb compare stock.log balanced.jsonl --window 131072
  wlb doctor --megatron ~/Megatron-LM
  wlb recipe run configs/experiment/7b-128k.yaml --dry-run

'wlb COMMAND --help' says more. Errors are one line and an exit status of their own;
WLB_TRACEBACK=1 shows where they come from.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; the exit status: 0, an error's own, or 128 + signal.

    Help and the version end in SystemExit, as argparse has it.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    return run_program(lambda: _run(words))


def _run(argv: list[str]) -> int:
    parser = Parser(
        prog="wlb",
        description="Workload-balanced training on long, uneven documents with Megatron-LM.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-wlb {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    extra: list[str] | None = None
    for name, summary in COMMANDS.items():
        command = add_command(commands, name, summary)
        if name in argv[:1]:
            loaded = importlib.import_module(f"megatron_wlb.cli.{name}")
            loaded.configure(command)
            if getattr(loaded, "PASSES_ON", False):
                # Split here: argparse cannot tell them from positionals between options.
                end = argv.index("--") if "--" in argv else len(argv)
                argv, extra = argv[:end], argv[end + 1 :]
    args = parser.parse_args(argv)
    if extra is not None:
        args.extra = extra
    if not hasattr(args, "run"):  # no command
        parser.print_help(sys.stderr)
        return 2
    # Plans are millions of small values without cycles; to look for some in them takes longer than
    # to make them.
    gc.set_threshold(200_000, 20, 100)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())

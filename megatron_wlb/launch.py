"""Runs your own ``pretrain_gpt.py`` with workload-balanced micro-batches.

``torchrun … -m megatron_wlb.launch /path/to/Megatron-LM/pretrain_gpt.py <its flags> --wlb-packing
hold``. Without a script, ``torchrun … -m megatron_wlb.launch <flags>``, the training loop is that
of the installed megatron-core, and :mod:`megatron_wlb.pretrain_gpt` stands in for the script.

Without any ``--wlb-*`` flag the script runs as if it had been started itself: neither torch nor
Megatron is imported before, and nothing is replaced. ``--wlb-device cpu`` alone runs it, unchanged,
under the CPU emulation.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_wlb import interrupts
from megatron_wlb.errors import CompatibilityError, ConfigError, refuse_all
from megatron_wlb.extensions import load
from megatron_wlb.runtime.megatron_lm import arguments, refusals
from megatron_wlb.runtime.rank_main import rank_main
from megatron_wlb.settings import allocator
from megatron_wlb.settings.command_line import (
    Parser,
    add_flags,
    taken_out,
    unknown_flags,
    with_settings_file,
)  # fmt: skip
from megatron_wlb.settings.config import WlbConfig, flag_of

EXAMPLES = """examples:
  torchrun --nproc-per-node 8 -m megatron_wlb.launch ~/Megatron-LM/pretrain_gpt.py \\
      --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 … --wlb-packing hold
  # Megatron's own packing, on the same path, to compare with:
  torchrun … -m megatron_wlb.launch ~/Megatron-LM/pretrain_gpt.py … --wlb-packing original
  # without a checkout, with the training loop of megatron-core's wheel (0.19 or later):
  torchrun --nproc-per-node 8 -m megatron_wlb.launch --num-layers 32 … --wlb-packing hold
  # all flags, Megatron's and these:
  python -m megatron_wlb.launch --wlb-packing hold --help
"""
STAND_IN = "megatron_wlb.pretrain_gpt"
"""The module that runs where no script is named."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script; returns the exit code. Our errors are one line, as of :func:`rank_main`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[:1] in (["-h"], ["--help"]):
        _parser().print_help()
        return 0 if words else ConfigError.exit_code
    script, flags = (None, words) if words[0].startswith("-") else (words[0], words[1:])
    plain = not any(flag.startswith("--wlb-") for flag in flags) and not _asks_for_help(flags)
    if plain and script is None:  # which is ours
        return rank_main(partial(run_script, script, flags), set_up_logs=False)
    if plain and Path(str(script)).is_file():
        run_script(script, flags)
        return 0
    return rank_main(partial(launch, script, flags), set_up_logs=False)


def launch(script: str | None, flags: Sequence[str]) -> None:
    """Installs what the flags ask for, then runs the script.

    Raises :class:`WLBError` before any process group exists, for all that can be known by then.
    """
    if script is not None and not Path(script).is_file():
        raise ConfigError(f"{script} is not a file; give the path of Megatron-LM's pretrain_gpt.py")
    flags = with_settings_file(flags)
    wlb, others = _parser().parse_known_args(flags)
    known = [flag_of(field.name) for field in dataclasses.fields(WlbConfig)]
    refuse_all(unknown_flags((word for word in others if word.startswith("--wlb-")), known))
    plans = arguments.asks_for_plans(flags)
    if plans:
        refusals.check_words(flags)
        allocator.choose(flags)
        if os.environ.get("RANK", "0") != "0":  # what planning says, all ranks would say
            logging.getLogger("megatron_wlb").setLevel(logging.ERROR)
    _find_megatron(script)
    try:
        # These import torch, and then Megatron under the device's conditions.
        from megatron_wlb.runtime import emulation

        if emulation.device_for(wlb.wlb_device) == "cpu":
            load("cpu")()
        if plans or _asks_for_help(flags):
            from megatron_wlb.runtime.megatron_lm import install

            if plans:
                install.install(allow_untested=wlb.wlb_allow_untested_megatron)
            else:
                install.install_flags()
    except ImportError as error:
        remedy = (
            f"{script} must lie in a checkout of Megatron-LM"
            if script is not None
            else "install megatron-core 0.19 or later, or name a checkout's pretrain_gpt.py"
        )
        raise CompatibilityError(
            f"megatron.training cannot be imported ({error}); {remedy}"
        ) from error
    if not plans and not _asks_for_help(flags):  # Megatron's own parser does not know it
        _, flags = taken_out("--wlb-device", flags)
    run_script(script, flags)


def _asks_for_help(flags: Sequence[str]) -> bool:
    return any(flag in ("-h", "--help") for flag in flags)


def run_script(script: str | None, flags: Sequence[str]) -> None:
    interrupts.restore()
    sys.argv = [script or "pretrain_gpt.py", *flags]
    _find_megatron(script)
    if script is None:
        runpy.run_module(STAND_IN, run_name="__main__")
    else:
        runpy.run_path(script, run_name="__main__")


def _find_megatron(script: str | None) -> None:
    """Puts the folder of a script first, as Python does: a checkout's ``megatron`` is there."""
    if script is not None:
        sys.path[0] = str(Path(script).resolve().parent)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megatron_wlb.launch",
        usage="torchrun … -m megatron_wlb.launch [PRETRAIN_GPT.PY] [its flags] [--wlb-… flags]",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add_flags(parser, "workload balance", WlbConfig, defaults=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())

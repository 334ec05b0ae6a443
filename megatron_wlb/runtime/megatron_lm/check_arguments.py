"""Whether a checkout's own parser and checks take a command line, without a process group or a GPU.

A program of its own (``python -m``), because it imports Megatron, and on a machine without GPUs the
CPU emulation: ``check_arguments.py CHECKOUT WORLD_SIZE flags…``. Exit code 0, or why not
on the last line of stderr.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_wlb.errors import ConfigError, WLBError

_MODULE = "megatron_wlb.runtime.megatron_lm.check_arguments"
TIMEOUT_S = 600.0
"""A check takes 10 s of CPU time, nearly all of it imports, which a slow disk prolongs."""
_OURS = 64
"""Exit code when Megatron takes the arguments, but a guard of ours does not."""


def check(
    checkout: str | Path,
    world_size: int,
    flags: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs this program, with ``environment`` over this process's own.

    Raises :class:`ConfigError` with what Megatron, or a guard of ours on what it parsed, says
    against it, or where that takes longer than :data:`TIMEOUT_S`.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", _MODULE, str(checkout), str(world_size), *flags],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"Megatron-LM in {checkout} has not checked the arguments in {TIMEOUT_S:g} s; try "
            "again when the machine has less to do, or leave out --megatron (MEGATRON_LM_PATH) to "
            "check without it"
        ) from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["(no message)"]
        if done.returncode == _OURS:
            raise ConfigError(done.stderr.strip().rpartition("\n\n")[2])
        raise ConfigError(
            f"Megatron-LM in {checkout} refuses the arguments: {said[-1].strip()}; correct them, "
            "or leave out --megatron to check without it"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Parses and checks as ``pretrain_gpt.py`` under the launcher would."""
    checkout, world_size, *flags = sys.argv[1:] if argv is None else argv
    sys.path.insert(0, checkout)
    os.environ |= {"RANK": "0", "WORLD_SIZE": world_size, "LOCAL_RANK": "0"}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            _check(flags)
    except WLBError as error:
        sys.stderr.write(f"\n\n{error}\n")
        return _OURS
    return 0


def _check(flags: list[str]) -> None:
    import torch

    from megatron_wlb.runtime.megatron_lm import arguments, cpu, refusals

    planned = arguments.asks_for_plans(flags)
    if planned:
        refusals.check_words(flags)
    if not torch.cuda.is_available():
        cpu.install()
    from megatron.training.arguments import parse_args, validate_args

    sys.argv = ["pretrain_gpt.py", *flags]
    args = parse_args(arguments.add_arguments if planned else None)
    given = copy.copy(args)
    if planned:
        arguments.prepare(args)
    # What runs on GPUs is asked for, so the emulation's refusals around it do not count.
    inspect.unwrap(validate_args)(args, {"tokenizer_type": "GPT2BPETokenizer"})
    if planned:
        refusals.check(given)


if __name__ == "__main__":
    sys.exit(main())

"""What a command line of the launcher would do, without a process group or a GPU.

A program of its own (``python -m``), because it imports Megatron, and on a machine without GPUs the
CPU emulation: ``dry_run.py CHECKOUT NUM_DEVICES flags…``; without a checkout ``""``. The flags pass
Megatron's own parser and checks, and then ours as in a run. The last line of stdout is an answer in
JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_wlb import errors
from megatron_wlb.errors import CompatibilityError, ConfigError, WLBError
from megatron_wlb.launch import STAND_IN
from megatron_wlb.settings.config import Config
from megatron_wlb.simulator.forecast import forecast

TIMEOUT_S = 600.0
"""It takes 10 s of CPU time, nearly all of it imports, which a slow disk prolongs."""


def predict(
    flags: Sequence[str],
    num_devices: int,
    checkout: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The forecast of a run by the Megatron of ``checkout``, or else the installed one, and what
    the run would tell. ``environment`` goes over this process's own.

    Raises :class:`WLBError` of all that the run would refuse, as it does.
    """
    found = ask(str(checkout or ""), num_devices, flags, environment or {})
    if "error" in found:
        kind, message = found["error"]
        raise getattr(errors, kind)(message)
    return found["forecast"], found["told"]


def ask(
    checkout: str, num_devices: int, flags: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Runs this program; its :func:`answer`."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, checkout, str(num_devices), *flags],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"Megatron-LM has not checked the arguments in {TIMEOUT_S:g} s; try again when the "
            "machine has less to do"
        ) from None
    if done.returncode or not done.stdout:  # --help ends well, too
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["(no message)"]
        raise ConfigError(f"Megatron-LM fails at the arguments: {said[-1].strip()}; correct them")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    checkout, num_devices, *flags = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        found = answer(checkout, int(num_devices), flags)
    sys.stdout.write(f"{json.dumps(found)}\n")
    return 0


def answer(checkout: str, num_devices: int, flags: Sequence[str]) -> dict[str, Any]:
    """The ``forecast`` and what is ``told`` besides, or the ``error``: its class and message."""
    if checkout:
        sys.path.insert(0, checkout)
    with _noted() as told:
        try:
            config = settings(flags, num_devices)
            if not checkout:  # its script would run, if this Megatron has what it needs
                importlib.import_module(STAND_IN)
            found = forecast(config, num_devices)
        except WLBError as error:
            return {"error": [type(error).__name__, str(error)]}
    return {"forecast": found, "told": told}


def settings(flags: Sequence[str], num_devices: int) -> Config:
    """The settings of a run on so many devices, checked as it checks them. The emulation's own
    demands do not count, as what runs on GPUs is asked for; nor do files that are elsewhere.
    """
    import torch

    from megatron_wlb.runtime.compat import hooks
    from megatron_wlb.runtime.megatron_lm import arguments, cpu_loop, refusals

    refusals.check_words(flags)
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(num_devices), "LOCAL_RANK": "0"}
    try:
        if not torch.cuda.is_available():
            cpu_loop.install()
        from megatron.training.arguments import parse_args, validate_args

        from megatron_wlb.runtime.megatron_lm import install
    except ImportError as error:
        raise CompatibilityError(
            f"megatron.training cannot be imported ({error}); install megatron-core, or name a "
            "checkout with --megatron"
        ) from error
    sys.argv = ["pretrain_gpt.py", *flags]
    args = parse_args(arguments.add_arguments)
    hooks.check(allow_untested=args.wlb_allow_untested_megatron)
    refusals.check(args)
    arguments.prepare(args)
    defaults = {"tokenizer_type": "GPT2BPETokenizer"}
    install.megatrons_own_checks(inspect.unwrap(validate_args), args, defaults)
    return install.settle(args)


@contextlib.contextmanager
def _noted() -> Iterator[list[str]]:
    """What our modules log meanwhile."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    ours = logging.getLogger("megatron_wlb")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield told
    finally:
        ours.removeHandler(handler)


if __name__ == "__main__":
    sys.exit(main())

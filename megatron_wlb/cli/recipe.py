"""``wlb recipe show|run``: Megatron's recipe files (``model_config.yaml``) as launch commands."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_wlb.cli.flags import add_command, flag
from megatron_wlb.cli.output import console, facts, remark, say
from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import MOST_DEVICES, text_of_flag, whole_number
from megatron_wlb.runtime.megatron_lm import dry_run
from megatron_wlb.runtime.megatron_lm.arguments import asks_for_plans
from megatron_wlb.settings.command_line import with_settings_file
from megatron_wlb.settings.recipe import Recipe, launch_command, quoted, read_recipe
from megatron_wlb.simulator.baseline import COLUMNS

_EPILOG = """\
FILE is a recipe of Megatron-LM (tests/functional_tests/test_cases/**/model_config.yaml) or one of
configs/experiment, which are the rows of WLB-LLM's Table 1. Variables in it come from the
environment. What stands after -- is appended to its flags, and so overrides them.

examples:
  wlb recipe show configs/experiment/7b-128k.yaml
  wlb recipe run configs/experiment/7b-128k.yaml --dry-run
  wlb recipe run configs/experiment/7b-128k.yaml --dry-run -- --wlb-packing wlb
  wlb recipe run my_recipe.yaml -- --train-iters 50
  wlb recipe run my_recipe.yaml --megatron ~/Megatron-LM
  sbatch --nodes 8 scripts/slurm/pretrain_gpt.sbatch configs/experiment/7b-128k.yaml
"""
PASSES_ON = True
_HELP = {
    "show": "print the launch command that a recipe stands for",
    "run": "start training on this machine, or predict it (--dry-run)",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    for name, summary in _HELP.items():
        usage = f"wlb recipe {name} [options] FILE [-- flags that are appended to its own]"
        action = add_command(actions, name, summary, usage=usage, epilog=_EPILOG)
        action.add_argument("file", type=text_of_flag, metavar="FILE", help="the recipe")
        checkout = "Megatron-LM checkout (default: $MEGATRON_LM_PATH, or megatron-core's own loop)"
        flag(action, "--megatron PATH", checkout)
        flag(action, "--script NAME", "in the checkout (default: pretrain_gpt.py)")
        flag(action, "--nnodes N", "default: NUM_NODES of the recipe")
        flag(action, "--nproc-per-node N", "default: GPUS_PER_NODE of the recipe, or 8")
        flag(action, "--rdzv-endpoint HOST:PORT", "of several nodes: the first")
        flag(action, "--rdzv-id ID", "of several nodes: the job", "wlb")
        flag(action, "--log-dir PATH", "each rank's output is written there too")
        flag(action, "--run-number N", "take MODEL_ARGS_N where it is there", 1)
        action.add_argument(
            "--json", action="store_true", help="print the result as one JSON object"
        )
        if name == "run":
            flag(
                action,
                "--dry-run",
                "start nothing: predict layout, S_max, memory and step time by Megatron's own "
                "parser and checks, and refuse what the run would, or what cannot fit",
            )
        action.set_defaults(run=_run if name == "run" else _show)


def _show(args: argparse.Namespace) -> int:
    recipe = read_recipe(args.file, os.environ, run_number=args.run_number)
    command = _command(args, recipe)
    if args.json:
        values = asdict(recipe) | {"path": str(recipe.path), "command": command}
        print(json.dumps(values))
        return 0
    variables = {*recipe.unresolved, "MASTER_ADDR"}  # of the shell that it is pasted into
    for name, value in recipe.environment.items():
        print(f"export {name}={quoted(value, variables)}")
    print(_as_shell(command, variables))
    _notes(recipe)
    return 0


def _run(args: argparse.Namespace) -> int:
    recipe = read_recipe(args.file, os.environ, run_number=args.run_number)
    if args.dry_run:
        return _dry_run(args, recipe)
    recipe.require_resolved()
    command, script = _command(args, recipe), _script(args)
    if script is not None and not script.is_file():
        raise ConfigError(f"{script} is no file; give --megatron a checkout that has {script.name}")
    num_nodes, _ = _machine(args, recipe)
    if num_nodes > 1 and not args.rdzv_endpoint:
        raise ConfigError(
            f"{args.file} runs on {num_nodes} nodes; give --rdzv-endpoint HOST:PORT "
            "on each of them, or use scripts/slurm/pretrain_gpt.sbatch"
        )
    _notes(recipe)
    sys.stdout.flush()
    environment = {**os.environ, **recipe.environment}
    os.execve(sys.executable, [sys.executable, *command[1:]], environment)


def _dry_run(args: argparse.Namespace, recipe: Recipe) -> int:
    flags = with_settings_file([*recipe.arguments, *args.extra])
    if not asks_for_plans(flags):
        raise ConfigError(
            f"{args.file} has no --wlb-… flag: it runs as stock Megatron does, which is not "
            "modelled; append one, as in -- --wlb-packing hold"
        )
    checkout = _checkout(args)
    if checkout is not None and not (checkout / "megatron" / "training").is_dir():
        raise ConfigError(
            f"--megatron {checkout} has no megatron/training; give the path of a checkout of "
            "Megatron-LM"
        )
    num_devices = math.prod(_machine(args, recipe))
    found, told = dry_run.predict(flags, num_devices, checkout, recipe.environment)
    for line in told:
        remark(line)
    if args.json:
        print(json.dumps(found | {"unresolved": recipe.unresolved}))
    else:
        Console().print(_table(recipe, found))
        say(console(), found["frame_said"])
        _notes(recipe)
    return 0


def _command(args: argparse.Namespace, recipe: Recipe) -> list[str]:
    num_nodes, devices_per_node = _machine(args, recipe)
    torchrun = ["--nproc-per-node", str(devices_per_node)]
    if num_nodes > 1:
        endpoint = args.rdzv_endpoint or "$MASTER_ADDR:29500"
        torchrun = ["--nnodes", str(num_nodes), *torchrun, "--rdzv-backend", "c10d"]
        torchrun += ["--rdzv-endpoint", endpoint, "--rdzv-id", args.rdzv_id]
    if args.log_dir:
        torchrun += ["--log-dir", args.log_dir, "--tee", "3"]
    return launch_command(recipe, _script(args), torchrun, args.extra)


def _checkout(args: argparse.Namespace) -> Path | None:
    given = args.megatron or os.environ.get("MEGATRON_LM_PATH")
    return Path(given).expanduser() if given else None


def _script(args: argparse.Namespace) -> Path | None:
    """The script of the checkout that runs. None: what stands in for it where there is none."""
    checkout = _checkout(args)
    if checkout is None and args.script is not None:
        raise ConfigError(f"--script {args.script} is in a checkout; give --megatron PATH too")
    return None if checkout is None else checkout / (args.script or "pretrain_gpt.py")


def _machine(args: argparse.Namespace, recipe: Recipe) -> tuple[int, int]:
    """Nodes, and devices of each: as the flags say, else as the recipe does."""
    for name, value in (("--nnodes", args.nnodes), ("--nproc-per-node", args.nproc_per_node)):
        if value is not None:
            whole_number(name, value, 1, MOST_DEVICES)
    return args.nnodes or recipe.num_nodes, args.nproc_per_node or recipe.devices_per_node


def _as_shell(command: list[str], variables: Collection[str]) -> str:
    """The command for a shell that puts ``variables`` in, a flag with its values a line."""
    lines = [command[:3]]  # python -m megatron_wlb.torchrun
    for word in command[3:]:
        if word.startswith("--") or word == "-m":
            lines.append([])
        lines[-1].append(word)
    return " \\\n  ".join(" ".join(quoted(w, variables) for w in line) for line in lines)


def _notes(recipe: Recipe) -> None:
    """On stderr: what the command does not say."""
    err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if recipe.unresolved:
        err.print(f"note: not set in the environment: {', '.join(recipe.unresolved)}")
    for script in recipe.scripts:
        err.print(f"note: {script} of the recipe is not run; see {recipe.path}")


def _table(recipe: Recipe, found: Mapping[str, Any]) -> Table:
    def said(name: str) -> str:
        return COLUMNS[name].form.format(found[name])

    windows, fitting = (found[name] / found["window"] for name in ("max_tokens", "fitting_tokens"))
    sizes = " × ".join(
        f"{axis.upper()} {found[f'{axis}_size']}" for axis in ("tp", "cp", "pp", "dp")
    )
    experts = f", EP {found['ep_size']}" if found["ep_size"] > 1 else ""
    units = found["units"]
    rows = {
        "parameters": f"{found['parameters'] / 1e9:.2f} billion",
        "layout": f"{found['num_devices']} devices: {sizes}, VPP {found['vpp_size']}{experts}",
        "micro-batches a rank": str(found["micro_batches_a_rank"]),
        "window": f"{found['window']:,} tokens",
        **({} if units is None else {"units a rank": f"{units}, of one step"}),
        "S_max": f"{found['max_tokens']:,} tokens, {windows:.3g} windows (up to {fitting:.3g} fit)",
        "memory, largest stage": f"{said('peak_gib')} GiB, at most {found['most_gib']:.1f} of "
        f"{found['limit_gib']:.1f} for tensors; {found['state_gib']:.1f} of it weights, gradients "
        "and optimizer",
        "step": f"{said('step_ms')} ms, with gradient reduction and update",
        "tokens a second": said("tokens_per_s"),
        "MFU": said("mfu"),
        "documents": f"lengths {found['lengths']}",
        f"{found['title']} against original": f"{said('speedup')}, net {said('net_speedup')}",
    }
    return facts(f"{recipe.path}, simulated: {found['steps']} steps", rows)

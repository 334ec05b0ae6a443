"""``wlb profile``: this machine's attention and linear rates, for ``--wlb-hardware FILE``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from rich.table import Table

from megatron_wlb.cli import output
from megatron_wlb.cli.flags import flag
from megatron_wlb.cost.attention_latency import MAX_LENGTH, AttentionProfile
from megatron_wlb.cost.hardware import FIGURES, hardware_names, load_hardware, read_hardware
from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text
from megatron_wlb.reading import whole_number
from megatron_wlb.runtime.measuring.hardware_file import base_of, hardware_content
from megatron_wlb.settings.config import WlbConfig

DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"heads": ["32/32x128", "64/8x128"], "dtype": "bfloat16", "longest": 131072},
    "cpu": {"heads": ["4/4x64"], "dtype": "float32", "longest": 4096},
}
SMALL_LONGEST = {"cuda": 16384, "cpu": 1024}
LEAST = 16
"""The least longest document: of fewer tokens times are all overhead."""
REPEATS, SMALL_REPEATS = 7, 3

_EPILOG = """\
what is measured:
  attention   latency of chunks of q queries and k keys, forward and backward, in variable-length
              calls that fill the device, for q and k = 1, 2, 4 ... up to --longest
  linear      matrix products and element-wise operations, and what attention of long documents
              reaches
  states      recurrences of gated delta nets and Mamba-2, where fla and mamba_ssm are installed
  kernels     what a kernel takes besides its work, and what its launch takes the host (GPU only)
What one device cannot tell (links, overlaps) is taken from --base, with its source.

--heads are those of one device: with --tensor-model-parallel-size 4, a model of 32 query and 8
key/value heads of 128 is 8/2x128. Other numbers of heads are scaled from the nearest measured ones.

examples:
  wlb profile --out h100.yaml
  wlb profile --out h100.yaml --base h100.yaml --force --heads 8/2x128    (adds a table)
  OMP_NUM_THREADS=1 wlb profile --device cpu --small --out cpu.yaml

then:
  torchrun ... -m megatron_wlb.launch ... --wlb-hardware h100.yaml --wlb-cp-sharding hybrid ...
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    flag(parser, "--out FILE", "YAML to write", required=True)
    flag(parser, "--device", "where to measure", "auto", choices=("auto", "cuda", "cpu"))
    flag(
        parser,
        "--heads H/GxD",
        "query heads / key/value heads x head dimension (default: 32/32x128 64/8x128 on a GPU, "
        "4/4x64 on a CPU)",
        of=str,
    )
    about = "default: bfloat16 on a GPU, float32 on a CPU"
    flag(parser, "--dtype", about, choices=("bfloat16", "float32"))
    kernels = get_args(get_type_hints(WlbConfig)["wlb_attention_kernel"])
    about = "attention kernel, as --wlb-attention-kernel"
    flag(parser, "--kernel", about, "auto", choices=kernels)
    flag(
        parser,
        "--longest N",
        "longest document in tokens; give the window, --seq-length (default: 131072 on a GPU, 4096 "
        "on a CPU)",
    )
    flag(parser, "--repeats N", f"runs of each point (default: {REPEATS})")
    flag(
        parser,
        "--base NAME|FILE",
        f"for what is not measured: {', '.join(hardware_names())} or a file; attention tables of a "
        "file are kept (default: by the device's name)",
    )
    flag(parser, "--small", "shorter and fewer runs, to try it out")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    flag(parser, "--no-plot", "leave out the pictures beside FILE")
    flag(parser, "--force", "replace FILE where it exists")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=_profile)


def _profile(args: argparse.Namespace) -> int:
    out: Path = args.out
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out {out} is not a YAML file; let its name end in .yaml")
    if out.exists() and not args.force:
        raise ConfigError(f"--out {out} exists; choose another name, or --force to replace it")
    output.check_file("--out", out)
    import torch

    from megatron_wlb.runtime.gpt.attention.kernels import Demand
    from megatron_wlb.runtime.measuring.attention_rates import measure_attention
    from megatron_wlb.runtime.measuring.rates import machine_name, measure_rates

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no GPU; give --device cpu")
    defaults = DEFAULTS[device]
    shapes = [_shape(text) for text in args.heads or defaults["heads"]]
    base = args.base or base_of(device, torch.cuda.get_device_name() if device == "cuda" else "")
    base_path, content = read_hardware(base)
    load_hardware(base)  # its errors now, not after measuring
    machine = machine_name(device)
    for name, value, least in (("--longest", args.longest, LEAST), ("--repeats", args.repeats, 1)):
        if value is not None:
            whole_number(name, value, least, MAX_LENGTH)
    longest = args.longest or (SMALL_LONGEST[device] if args.small else defaults["longest"])
    profiles = []
    dtype = getattr(torch, args.dtype or defaults["dtype"])
    repeats = args.repeats or (SMALL_REPEATS if args.small else REPEATS)
    measure = partial(
        measure_attention, longest=longest, repeats=repeats, machine=machine, seed=args.seed
    )
    for heads, groups, dim in shapes:
        demand = Demand(torch.device(device), dtype, heads, groups, dim)
        with output.progress_bar(f"attention {heads}/{groups}x{dim}") as progress:
            profiles.append(measure(demand, args.kernel, progress=progress))
    rates = measure_rates(device)
    content = hardware_content(content, base_path.name, rates, profiles, machine, device)
    style: dict[str, Any] = {
        "sort_keys": False,
        "allow_unicode": True,
        "default_flow_style": None,
        "width": 100,
    }
    write_text(out, yaml.safe_dump(content, **style))
    plots = [] if args.no_plot else _plot(out, profiles)
    if args.json:
        print(json.dumps({"file": str(out), "plots": plots, **content}))
    else:
        _show(content, profiles)
    return 0


def _shape(text: str) -> tuple[int, int, int]:
    """``32/8x128`` -> query heads, key/value heads, head dimension."""
    found = re.fullmatch(r"(\d+)/(\d+)x(\d+)", text)
    heads, groups, dim = (int(number) for number in found.groups()) if found else (0, 0, 0)
    if not (heads and groups and dim) or heads % groups:
        raise ConfigError(
            f"--heads {text} is not query heads / key/value heads x head dimension; give e.g. "
            "32/8x128"
        )
    return heads, groups, dim


def _plot(out: Path, profiles: Sequence[AttentionProfile]) -> list[str]:
    from megatron_wlb.study.plot import plot_attention

    paths = []
    for profile in profiles:
        heads = f"{profile.num_heads}-{profile.num_groups}x{profile.head_dim}"
        path = out.with_name(f"{out.stem}-{heads}.png")
        plot_attention(profile, path)
        paths.append(str(path))
    return paths


def _show(content: Mapping[str, Any], profiles: Sequence[AttentionProfile]) -> None:
    table = Table(title=content["description"], title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for name in FIGURES:
        if name in content:
            table.add_row(name, f"{content[name]['value']:g}", content[name]["source"])
    for profile in profiles:
        table.add_section()
        lengths, last = profile.lengths, profile.lengths[-1]
        table.add_row(
            "attention",
            f"{profile.num_heads}/{profile.num_groups}x{profile.head_dim}",
            f"{profile.kernel}, {profile.dtype}; predicts chunks off the grid to "
            f"{profile.error:.1%} (median), spread of repeats {profile.spread:.1%}, tiles "
            f"{profile.tile_queries} × {profile.tile_keys}",
        )
        for q in (n for n in lengths if n in (16, 128, 1024) or n == last // 2):
            if q < last:
                forward, backward = (profile.tflops(q, last, backward=b) for b in (False, True))
                rates = f"{forward:.3g}", f"TF/s forward, {backward:.3g} backward"
                table.add_row(f"{q} queries, {last} keys", *rates)
    output.console().print(table)

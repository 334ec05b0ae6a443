"""What commands that pack without training have in common: documents, batch, cost."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from megatron_wlb.config import Config, from_flat, parse
from megatron_wlb.cost import Cost, ProfiledCost, cost_from_dict, read_cost_file
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.lengths import DISTRIBUTIONS
from megatron_wlb.errors import ConfigError
from megatron_wlb.packing.evaluate import Layout, Workload
from megatron_wlb.packing.reference import REFERENCE_COST, REFERENCE_WINDOW

DEFAULT_VOCAB_SIZE = 32000
"""Of a model file that names none, where the corpus does not either."""

SOURCES = f"""\
documents, one of:
  PREFIX …             a corpus in Megatron's .bin/.idx; only the .idx is read, in random order
  --distribution NAME  synthetic: {", ".join(DISTRIBUTIONS)}
  --lengths FILE       one length a line, or an .npy array
"""
COSTS = """\
cost of a document, one of:
  (nothing)            LLaMA2-7B at a window of 128K on 16 GPUs, modelled: the paper's Table 2
  --model FILE         the analytic cost of your model: a YAML file of training settings, as for
                       --wlb-config (num_layers: 32, hidden_size: 4096, …), on --hardware
  --cost FILE          tables that megatron_wlb.measure_cost wrote, or coefficients
"""


def add_source(parser: argparse.ArgumentParser) -> None:
    """The flags that :func:`source` reads."""
    group = parser.add_argument_group("documents")
    group.add_argument("prefixes", nargs="*", metavar="PREFIX", help="corpus, .bin/.idx left off")
    group.add_argument("--distribution", metavar="NAME", help="synthetic lengths: reference, …")
    group.add_argument("--lengths", type=Path, metavar="FILE", help="a length a line, or .npy")
    group.add_argument(
        "--window",
        type=int,
        default=REFERENCE_WINDOW,
        metavar="TOKENS",
        help=f"training's --seq-length (default: {REFERENCE_WINDOW})",
    )
    group.add_argument("--seed", type=int, default=1, metavar="N", help="default: 1")


def source(args: argparse.Namespace) -> LengthSource:
    """The one that the flags name. Raises :class:`ConfigError` for none or several."""
    given = [bool(args.prefixes), args.distribution is not None, args.lengths is not None]
    if sum(given) != 1:
        raise ConfigError(
            f"{'several sources of documents' if any(given) else 'no documents'}; give one of a "
            "corpus PREFIX, --distribution NAME and --lengths FILE"
        )
    if args.window < 2:
        raise ConfigError(f"--window is {args.window}; give at least 2 tokens")
    if not 0 <= args.seed < 2**32 - 1:
        raise ConfigError(f"--seed is {args.seed}; give 0 to {2**32 - 2}")
    if args.distribution is not None:
        return LengthSource.of_distribution(args.distribution)
    if args.lengths is not None:
        return LengthSource.of_file(args.lengths)
    return LengthSource.of_corpora(args.prefixes)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The flags that :func:`workload` reads, besides the source's."""
    group = parser.add_argument_group("batch and cost")
    group.add_argument(
        "--max-windows",
        type=float,
        default=2.0,
        metavar="X",
        help="S_max in windows: longest micro-batch that memory allows (default: 2)",
    )
    group.add_argument(
        "--max-age", type=int, default=12, metavar="N", help="as --wlb-max-age (default: 12)"
    )
    group.add_argument("--max-step-tokens", type=int, metavar="N", help="as --wlb-max-step-tokens")
    group.add_argument(
        "--long-documents",
        choices=("split", "truncate", "error"),
        default="split",
        help="documents over the window, as --wlb-long-documents (default: split)",
    )
    group.add_argument(
        "--length-multiple",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches are padded to a multiple: TP with sequence parallelism (default: 1)",
    )
    group.add_argument(
        "--dp-size", type=int, metavar="N", help="with --pp-size: step times by Megatron's 1F1B"
    )
    group.add_argument(
        "--pp-size",
        type=int,
        metavar="N",
        help="pipeline stages; without it a step takes as long as its slowest micro-batch",
    )
    group.add_argument("--model", type=Path, metavar="FILE", help="training settings, YAML")
    group.add_argument("--hardware", metavar="NAME|FILE", help="of --model (default: h100-sxm)")
    group.add_argument("--cost", type=Path, metavar="FILE", help="measured tables, coefficients")
    group.add_argument(
        "--cost-extrapolate",
        "--wlb-cost-extrapolate",  # as errors about tables call it
        action="store_true",
        help="go beyond the end of measured tables",
    )


def max_tokens(args: argparse.Namespace) -> int:
    """S_max in tokens."""
    if not 0 < args.max_windows < 2**31:
        raise ConfigError(f"--max-windows is {args.max_windows:g}; give a number of at least 1")
    return int(args.max_windows * args.window)


def workload(args: argparse.Namespace, documents: LengthSource, num_micro_batches: int) -> Workload:
    """What the flags describe, for one N."""
    layout = None
    if args.dp_size is not None or args.pp_size is not None:
        layout = Layout(
            1 if args.dp_size is None else args.dp_size, 1 if args.pp_size is None else args.pp_size
        )
    return Workload(
        source=documents,
        window=args.window,
        num_micro_batches=num_micro_batches,
        cost=cost(args),
        seed=args.seed,
        long_documents=args.long_documents,
        max_age=args.max_age,
        max_step_tokens=args.max_step_tokens,
        length_multiple=args.length_multiple,
        layout=layout,
    )


def cost(args: argparse.Namespace) -> Cost:
    """The cost that the flags name; LLaMA2-7B's if they name none.

    Raises :class:`ConfigError` for files that hold none, or a cost of another model.
    """
    # Not at the top: only this needs the runtime's reading of settings.
    from megatron_wlb.runtime.planning import known_cost, padded_vocab_size

    if args.model is None:
        if args.hardware is not None:
            raise ConfigError("--hardware is the machine of --model FILE; give that as well")
        return REFERENCE_COST if args.cost is None else _cost_of_file(args)
    config = _settings(args)
    vocab_size = config.data.vocab_size
    if vocab_size is None:
        known = [Corpus.open(prefix).vocab_size for prefix in args.prefixes]
        vocab_size = max((size for size in known if size), default=DEFAULT_VOCAB_SIZE)
    found = known_cost(config, padded_vocab_size(config, vocab_size))
    if found is None:
        raise ConfigError(
            f"--model {args.model} asks for a cost that is measured in training; leave wlb_cost "
            "out, or give --cost FILE"
        )
    return found


def _settings(args: argparse.Namespace) -> Config:
    config = parse(["--wlb-config", str(args.model)])
    settings = config.flat()
    if args.hardware is not None:
        settings["wlb_hardware"] = args.hardware
    if args.cost is not None:
        settings["wlb_cost"] = str(args.cost)
    if args.cost_extrapolate:
        settings["wlb_cost_extrapolate"] = True
    return from_flat(settings)


def _cost_of_file(args: argparse.Namespace) -> Cost:
    try:
        values = read_cost_file(args.cost)
        inner = values.get("cost", values)
        if not isinstance(inner, Mapping):
            raise ConfigError(f"cost is {inner!r}; give coefficients by name")
        found = cost_from_dict(inner)
    except ConfigError as error:
        raise ConfigError(f"--cost {args.cost}: {error}") from None
    if isinstance(found, ProfiledCost) and args.cost_extrapolate:
        return dataclasses.replace(found, extrapolate=True)
    return found

"""What commands that pack without training have in common: documents, batch, cost."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_wlb.command_line import yaml_arguments
from megatron_wlb.config import Config, flag_of, from_flat
from megatron_wlb.cost import Cost, ProfiledCost, cost_from_dict, read_cost_file
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.lengths import DISTRIBUTIONS
from megatron_wlb.errors import ConfigError
from megatron_wlb.forecast import settings_of
from megatron_wlb.packing.evaluate import Layout, Workload
from megatron_wlb.packing.reference import REFERENCE_COST, REFERENCE_WINDOW
from megatron_wlb.recipe import read_recipe
from megatron_wlb.runtime.planning import known_cost, padded_vocab_size

NUM_MICRO_BATCHES = 4
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
  --model FILE         the analytic cost of your model on --hardware: a YAML file of training
                       settings, as for --wlb-config (num_layers: 32, hidden_size: 4096, …), or a
                       Megatron recipe (MODEL_ARGS). What it says of the window, the global batch
                       and the pipeline is taken as well
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
        metavar="TOKENS",
        help=f"training's --seq-length (default: {REFERENCE_WINDOW})",
    )
    group.add_argument("--seed", type=int, default=1, metavar="N", help="of the sample; default: 1")


def fill_defaults(args: argparse.Namespace) -> None:
    """What the command line leaves open and ``--model`` says: window, N, pipeline stages.

    Raises :class:`ConfigError` for a file that is none.
    """
    config, written = Config(), set[str]()
    if getattr(args, "model", None) is not None:
        config, written = model_settings(args), set(_model_arguments(args.model))
    if args.window is None:
        args.window = config.data.seq_length if "--seq-length" in written else REFERENCE_WINDOW
    if getattr(args, "num_micro_batches", 0) is None:
        number = NUM_MICRO_BATCHES
        if "--global-batch-size" in written:
            number = config.training.global_batch_size
        args.num_micro_batches = [str(number)]
    # Without a pipeline the file does not tell what shares the work, as it has no DP size.
    p = config.parallel
    if getattr(args, "pp_size", 0) is None and p.pipeline_model_parallel_size > 1:
        args.pp_size = p.pipeline_model_parallel_size
        if args.vpp_size is None:
            args.vpp_size = p.num_virtual_stages_per_pipeline_rank


def numbers_of_micro_batches(args: argparse.Namespace) -> list[int]:
    """Each N once. Raises :class:`ConfigError` for what is no number above 0."""
    numbers = [number for text in args.num_micro_batches for number in text.split(",") if number]
    for number in numbers:
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(
                f"--num-micro-batches {number} is no number above 0; write several like 4,16"
            )
    if not numbers:
        raise ConfigError("--num-micro-batches names none; write several like 4,16")
    return list(dict.fromkeys(map(int, numbers)))


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


def add_packing_rules(group: argparse._ArgumentGroup) -> None:
    """``--max-age`` and ``--long-documents``, as in training."""
    group.add_argument(
        "--max-age", type=int, default=12, metavar="N", help="as --wlb-max-age (default: 12)"
    )
    add_long_documents(group)


def add_long_documents(group: argparse._ArgumentGroup) -> None:
    """``--long-documents``, as in training."""
    group.add_argument(
        "--long-documents",
        choices=("split", "truncate", "error"),
        default="split",
        help="documents over the window, as --wlb-long-documents (default: split)",
    )


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The flags that :func:`workload` reads, besides the source's."""
    group = parser.add_argument_group("batch and cost")
    group.add_argument(
        "--num-micro-batches",
        nargs="+",
        metavar="N",
        help="micro-batches of a step over all data-parallel ranks (default: --model's "
        f"global_batch_size, or {NUM_MICRO_BATCHES})",
    )
    group.add_argument(
        "--max-windows",
        type=float,
        default=2.0,
        metavar="X",
        help="S_max in windows: longest micro-batch that memory allows (default: 2)",
    )
    add_packing_rules(group)
    group.add_argument("--max-step-tokens", type=int, metavar="N", help="as --wlb-max-step-tokens")
    group.add_argument(
        "--length-multiple",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches are padded to a multiple: TP with sequence parallelism (default: 1)",
    )
    group.add_argument(
        "--dp-size",
        type=int,
        metavar="N",
        help="data-parallel ranks that share a step (default: 1, with --pp-size)",
    )
    group.add_argument(
        "--pp-size",
        type=int,
        metavar="N",
        help="pipeline stages (default: --model's): steps take what Megatron's 1F1B does in a "
        "simulation; without any, as long as their slowest micro-batch",
    )
    group.add_argument("--vpp-size", type=int, metavar="N", help="model chunks a stage (VPP)")
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
    """What the flags describe, for one N. Raises :class:`WLBError` where it cannot be packed."""
    documents.check(window=args.window, long_documents=args.long_documents)
    sizes = args.dp_size, args.pp_size, args.vpp_size
    layout = None
    if any(size is not None for size in sizes):
        layout = Layout(*(1 if size is None else size for size in sizes))
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
    if args.model is None:
        if args.hardware is not None:
            raise ConfigError("--hardware is the machine of --model FILE; give that as well")
        return REFERENCE_COST if args.cost is None else cost_of_file(args)
    config = model_settings(args)
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


def _model_arguments(path: Path) -> Sequence[str]:
    """The command line that a file of settings, or a Megatron recipe, stands for."""
    words = yaml_arguments(str(path))
    if flag_of("MODEL_ARGS") in words:
        return read_recipe(path, os.environ).arguments
    return words


def model_settings(args: argparse.Namespace) -> Config:
    """Of ``--model`` FILE. Raises :class:`ConfigError` for a file that is none."""
    try:
        config = settings_of(_model_arguments(args.model))
    except ConfigError as error:
        raise ConfigError(f"--model {args.model}: {error}") from None
    settings = config.flat()
    if args.hardware is not None:
        settings["wlb_hardware"] = args.hardware
    if args.cost is not None:
        settings["wlb_cost"] = str(args.cost)
    if args.cost_extrapolate:
        settings["wlb_cost_extrapolate"] = True
    return from_flat(settings)


def cost_of_file(args: argparse.Namespace) -> Cost:
    """What ``--cost`` names. Raises :class:`ConfigError` for a file that holds none."""
    try:
        values = read_cost_file(args.cost)
        found = cost_from_dict(values.get("cost", values))
    except ConfigError as error:
        reason = str(error).removeprefix(f"{args.cost}: ")
        raise ConfigError(f"--cost {args.cost}: {reason}") from None
    if isinstance(found, ProfiledCost) and args.cost_extrapolate:
        return dataclasses.replace(found, extrapolate=True)
    return found

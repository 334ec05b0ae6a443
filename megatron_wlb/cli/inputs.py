"""What commands that pack without training have in common: documents, batch, cost."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import get_args

from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.model import MODELS, Model, add_model_flag, read_model
from megatron_wlb.cli.output import remark
from megatron_wlb.cost import (
    AnalyticModel,
    Cost,
    Execution,
    ModelShape,
    Parallelism,
    load_hardware,
)
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.cost.model_file import padded_vocabulary
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.documents import LongDocuments
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.lengths import DISTRIBUTIONS
from megatron_wlb.data.mock import LENGTHS
from megatron_wlb.errors import ConfigError
from megatron_wlb.packing.reference import REFERENCE_COST, REFERENCE_WINDOW
from megatron_wlb.planning.from_config import (
    known_cost,
    model_shape,
    padded_vocab_size,
    parallelism,
    recompute,
)
from megatron_wlb.planning.run import Run, Workload, read_cost
from megatron_wlb.reading import (
    MOST_MICRO_BATCHES,
    MOST_TOKENS,
    real_number,
    text_of_flag,
    whole_number,
)
from megatron_wlb.settings.config import Config, from_flat
from megatron_wlb.study.forecast import DEFAULT_VOCAB_SIZE

NUM_MICRO_BATCHES = 4

SOURCES = f"""\
documents, one of:
  PREFIX …             a corpus in Megatron's .bin/.idx; only the .idx is read, in random order
  --distribution NAME  synthetic: {", ".join(DISTRIBUTIONS)}
  --lengths FILE       one length a line, or an .npy array
"""
COSTS = f"""\
cost of a document, one of:
  (nothing)            LLaMA2-7B at a window of 128K on 16 GPUs, modelled: the paper's Table 2
  --model NAME|FILE    the analytic cost of that model on --hardware
  --cost FILE          tables that megatron_wlb.measure_cost wrote, or coefficients
{MODELS}"""


def add_source(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("documents")
    group.add_argument(
        "prefixes",
        nargs="*",
        action="extend",
        type=text_of_flag,
        metavar="PREFIX",
        help="corpus, .bin/.idx left off",
    )
    flag(group, "--distribution NAME", "synthetic lengths: reference, …")
    flag(group, "--lengths FILE", "a length a line, or .npy")
    flag(group, "--window TOKENS", f"training's --seq-length (default: {REFERENCE_WINDOW})")
    flag(group, "--seed N", "of the sample", 1)


def fill_window(args: argparse.Namespace) -> Model:
    """Fills ``--window`` where it is not given, and returns the model that ``--model`` names."""
    given = getattr(args, "model", None)
    model = Model(Config()) if given is None else read_model(given)
    if args.window is None:
        args.window = model.window or REFERENCE_WINDOW
    return model


def add_micro_batch_size(group: argparse._ArgumentGroup) -> None:
    about = "windows that a micro-batch stands for, as training's (default: --model's, or 1)"
    flag(group, "--micro-batch-size N", about)


def fill_micro_batch_size(args: argparse.Namespace, model: Model) -> int:
    """Fills ``--micro-batch-size`` where it is not given; returns it."""
    size: int = model.micro_batch_size or 1
    if args.micro_batch_size is not None:
        size = whole_number("--micro-batch-size", args.micro_batch_size, 1, MOST_MICRO_BATCHES)
    args.micro_batch_size = size
    return size


def fill_defaults(args: argparse.Namespace) -> None:
    """What the command line leaves open and ``--model`` says: window, batch, pipeline stages.

    Raises :class:`ConfigError` for a file that is none.
    """
    model = fill_window(args)
    size = fill_micro_batch_size(args, model)
    if args.num_micro_batches is None:
        args.num_micro_batches = [model.num_micro_batches(size) or NUM_MICRO_BATCHES]
    # Without a pipeline or devices the file does not tell what shares the work.
    p = model.config.parallel
    pp_size = p.pipeline_model_parallel_size
    if pp_size > 1 and getattr(args, "pp_size", 0) in (None, pp_size):
        args.pp_size = pp_size
        if args.vpp_size is None:
            args.vpp_size = p.vpp_size if p.vpp_size > 1 else None
        if (args.vpp_size or 1) == p.vpp_size:
            sizes = model.shape.num_layers, args.pp_size, p.vpp_size
            args.stage_layers = p.split.uneven(*sizes)
    if args.dp_size is None:
        inner = p.tensor_model_parallel_size * p.context_parallel_size
        args.dp_size = model.dp_size(inner * (args.pp_size or 1))


def numbers_of_micro_batches(args: argparse.Namespace) -> list[int]:
    """Each N once. Raises :class:`ConfigError` for what is no number above 0."""
    return list(
        dict.fromkeys(
            whole_number("--num-micro-batches", number, 1, MOST_MICRO_BATCHES)
            for number in args.num_micro_batches
        )
    )


def source(args: argparse.Namespace) -> LengthSource:
    """The one that the flags name, or that of a ``--model`` whose file says ``--mock-data``.

    Raises :class:`ConfigError` for none or several.
    """
    given = [bool(args.prefixes), args.distribution is not None, args.lengths is not None]
    name = getattr(args, "model", None)
    model = Config() if any(given) or name is None else read_model(name).config
    mock = model.wlb.wlb_mock_lengths or LENGTHS if model.data.mock_data else None
    if sum(given) != 1 and mock is None:
        raise ConfigError(
            f"{'several sources of documents' if any(given) else 'no documents'}; give one of a "
            "corpus PREFIX, --distribution NAME and --lengths FILE"
        )
    whole_number("--window", args.window, 2, MOST_TOKENS)
    whole_number("--seed", args.seed, 0, 2**32 - 2)
    if mock is not None:
        return LengthSource.named(mock)
    if args.distribution is not None:
        return LengthSource.of_distribution(args.distribution)
    if args.lengths is not None:
        return LengthSource.of_file(args.lengths)
    return LengthSource.of_corpora(args.prefixes)


def obstacles(args: argparse.Namespace) -> set[str]:
    """What ``--model`` has that some packings cannot run with."""
    if args.model is None:
        return set()
    model = read_model(args.model)
    training = model.config.training
    delayed = training.fp8_format is not None and training.fp8_recipe == "delayed"
    found = {"experts": bool(model.shape.experts), "delayed scaling": delayed}
    return {name for name, has in found.items() if has}


def add_packing_rules(group: argparse._ArgumentGroup) -> None:
    flag(group, "--max-age N", "as --wlb-max-age", 12)
    add_long_documents(group)


def add_long_documents(group: argparse._ArgumentGroup) -> None:
    about = (
        "documents over the window, as --wlb-long-documents; slice is for slim, others split them "
        "then"
    )
    policies = get_args(LongDocuments)
    flag(group, "--long-documents", about, policies[0], choices=policies)


def add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch and cost")
    about = f"(default: by --model's global_batch_size, or {NUM_MICRO_BATCHES})"
    about = f"micro-batches of a step over all data-parallel ranks {about}"
    flag(group, "--num-micro-batches N", about, of=int)
    add_micro_batch_size(group)
    about = "S_max in windows: longest micro-batch that memory allows"
    flag(
        group,
        "--max-windows X",
        f"{about} (default: --model's, or 2 × --micro-batch-size as far as its memory allows)",
    )
    add_packing_rules(group)
    flag(group, "--max-step-tokens N", "as --wlb-max-step-tokens")
    about = "micro-batches are padded to a multiple: TP with sequence parallelism"
    flag(group, "--length-multiple N", f"{about} (default: --model's, or 1)")
    flag(
        group,
        "--dp-size N",
        "data-parallel ranks that share a step (default: --model's, or 1 with --pp-size)",
    )
    flag(
        group,
        "--pp-size N",
        "pipeline stages (default: --model's): steps take what Megatron's 1F1B does in a "
        "simulation; without any, as long as their slowest micro-batch",
    )
    flag(group, "--vpp-size N", "model chunks a stage (VPP)")
    flag(group, "--ep-size N", "ranks over which experts are divided (default: --model's, or 1)")
    add_model_flag(group)
    flag(group, "--hardware NAME|FILE", "of --model (default: h100-sxm)")
    add_cost_file(group)


def add_cost_file(group: argparse._ArgumentGroup, tables: str = "") -> None:
    """``--cost``, for :func:`cost_of_file`; ``tables`` are others that may end."""
    flag(group, "--cost FILE", "measured tables, coefficients")
    group.add_argument(
        "--cost-extrapolate",
        "--wlb-cost-extrapolate",  # as errors about tables call it
        action="store_true",
        help=f"go beyond the end of measured tables{tables}",
    )


def max_tokens(args: argparse.Namespace) -> int:
    """S_max as asked for, or else two windows for each that a micro-batch stands for."""
    return _asked_tokens(args) or 2 * int(args.micro_batch_size * args.window)


def _asked_tokens(args: argparse.Namespace) -> int | None:
    """S_max as ``--max-windows`` says, or else ``--model``; None where neither does."""
    if args.max_windows is not None:
        return int(real_number("--max-windows", args.max_windows, 1, MOST_TOKENS) * args.window)
    return None if args.model is None else read_model(args.model).config.wlb.wlb_max_tokens


def most_tokens(args: argparse.Namespace, run: Run | None) -> int:
    """S_max in tokens; a note says what memory makes of it.

    As asked for; otherwise two windows for each that a micro-batch stands for, or what fits the
    memory of ``run``, where it is known, but at least one.
    """
    if run is None or _asked_tokens(args) is not None:
        return max_tokens(args)
    window, row = run.window, run.micro_batch_tokens
    least = "one window" if row == window else f"{run.micro_batch_size} windows"
    try:
        fitting = run.max_tokens()
    except ConfigError as error:
        remark(f"S_max is {least}: {error}")
        return row
    if fitting >= 2 * row:
        return 2 * row
    if fitting < row:
        remark(
            f"S_max is {least}, though only {fitting:,} tokens fit "
            f"{run.limit_gib:.1f} GiB if all micro-batches in flight are so long"
        )
        return row
    remark(
        f"S_max is {fitting:,} tokens ({fitting / window:.2f} windows), which fit "
        f"{run.limit_gib:.1f} GiB"
    )
    return fitting


def limits(args: argparse.Namespace) -> dict[str, int | None]:
    return {"max_age": args.max_age, "max_step_tokens": args.max_step_tokens}


def known_run(args: argparse.Namespace, number: int) -> Run | None:
    """The run of ``--model`` with N micro-batches, with what else the command line says of it; None
    where that is sizes alone, or does not say what shares the work.

    Raises :class:`ConfigError` for what cannot be.
    """
    layout = _layout(args)
    if layout is None or args.model is None or (model := read_model(args.model)).sizes is not None:
        return None
    config = from_flat(_with_machine(args, model).flat() | {"bf16": True})
    own = _own(args, config, layout)
    return Run(
        model_shape(config, padded_vocab_size(config, _vocab_size(args, config))),
        Execution(own, recompute(config), expert_imbalance=config.wlb.wlb_expert_imbalance),
        load_hardware(config.wlb.wlb_hardware),
        args.window,
        number,
        config.wlb.wlb_memory_gib,
        measured=None if config.wlb.wlb_cost == "analytic" else cost(args),
        extrapolate=args.cost_extrapolate,
        micro_batch_size=args.micro_batch_size,
    )


def _own(args: argparse.Namespace, config: Config, layout: Parallelism) -> Parallelism:
    """``layout`` with what ``--model`` says besides."""
    own = parallelism(config, layout.dp_size)
    return replace(
        own,
        pp_size=layout.pp_size,
        vpp_size=layout.vpp_size,
        stage_layers=layout.stage_layers,
        ep_size=args.ep_size or own.ep_size,
    )


def _layout(args: argparse.Namespace) -> Parallelism | None:
    names = "dp_size", "pp_size", "vpp_size", "stage_layers"
    sizes = {name: getattr(args, name, None) for name in names}
    given = {name: size for name, size in sizes.items() if size is not None}
    return Parallelism(**given) if given else None


def workload(
    args: argparse.Namespace, documents: LengthSource, num_micro_batches: int, run: Run | None
) -> Workload:
    """What the flags describe, for one N, on ``run`` where it is known. Raises :class:`WLBError`
    where it cannot be packed.
    """
    documents.check(window=args.window, long_documents=args.long_documents)
    if run is not None:
        made = run.workload(documents, seed=args.seed, long_documents=args.long_documents)
        return replace(made, length_multiple=args.length_multiple or made.length_multiple)
    layout = _layout(args)
    return Workload(
        source=documents,
        window=args.window,
        num_micro_batches=num_micro_batches,
        cost=cost(args),
        seed=args.seed,
        long_documents=args.long_documents,
        length_multiple=args.length_multiple or 1,
        layout=layout,
        micro_batch_size=args.micro_batch_size,
        experts=_experts(args, layout or Parallelism()),
    )


def _experts(args: argparse.Namespace, layout: Parallelism) -> ExpertGroups | None:
    """Replicas of ``layout`` that exchange tokens with experts, with the TP and CP of ``--model``.

    Raises :class:`ConfigError` for experts that cannot be divided so.
    """
    if args.model is None:
        if args.ep_size is not None:
            raise ConfigError("--ep-size divides the experts of --model; give that as well")
        return None
    model = read_model(args.model)
    own = _own(args, model.config, layout)
    if args.ep_size is not None and not model.shape.experts:
        own.check_experts(model.shape)
    if own.expert_replicas == 1 or not model.shape.experts:
        return None
    shape = padded_vocabulary(model.shape, own.tp_size)
    own.check_experts(shape)
    hardware = load_hardware(args.hardware or model.config.wlb.wlb_hardware)
    analytic = AnalyticModel(shape, Execution(own, recompute(model.config)), hardware)
    return ExpertGroups.of(analytic, None if args.cost is None else cost(args), args.window)


def cost(args: argparse.Namespace) -> Cost:
    """The cost that the flags name; LLaMA2-7B's if they name none.

    Raises :class:`ConfigError` for files that hold none, or a cost of another model.
    """
    if args.model is None:
        if args.hardware is not None:
            raise ConfigError("--hardware is the machine of --model FILE; give that as well")
        return REFERENCE_COST if args.cost is None else cost_of_file(args)
    model = read_model(args.model)
    if model.sizes is not None:
        shape = padded_vocabulary(model.sizes, 1)
        if args.cost is not None:
            return cost_of_file(args, shape)
        hardware = load_hardware(args.hardware or Config().wlb.wlb_hardware)
        return AnalyticModel(shape, Execution(), hardware).cost()
    config = _with_machine(args, model)
    vocab_size = _vocab_size(args, config)
    found = known_cost(config, padded_vocab_size(config, vocab_size))
    if found is None:
        raise ConfigError(
            f"--model {args.model} asks for a cost that is measured in training; leave wlb_cost "
            "out, or give --cost FILE"
        )
    return found


def _with_machine(args: argparse.Namespace, model: Model) -> Config:
    """The settings of ``--model`` with the machine and cost of the command line."""
    said = {
        "wlb_hardware": args.hardware,
        "wlb_cost": args.cost and str(args.cost),
        "wlb_cost_extrapolate": args.cost_extrapolate or None,
    }
    given = {name: value for name, value in said.items() if value is not None}
    return from_flat(model.config.flat() | given)


def _vocab_size(args: argparse.Namespace, config: Config) -> int:
    if config.data.vocab_size is not None:
        return config.data.vocab_size
    known = [Corpus.open(prefix).vocab_size for prefix in args.prefixes]
    return max((size for size in known if size), default=DEFAULT_VOCAB_SIZE)


def cost_of_file(
    args: argparse.Namespace, shape: ModelShape | None = None, layout: Parallelism | None = None
) -> Cost:
    """What ``--cost`` names, of this model and layout where they are known."""
    return read_cost(args.cost, "--cost", shape, layout, extrapolate=args.cost_extrapolate)

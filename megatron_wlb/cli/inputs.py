"""What commands that pack without training have in common: documents, batch, cost."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.model import MODELS, Model, add_model_flag, read_model
from megatron_wlb.cli.output import remark
from megatron_wlb.cost import (
    AnalyticModel,
    Cost,
    Execution,
    Hardware,
    ModelShape,
    Parallelism,
    load_hardware,
)
from megatron_wlb.cost.cost_files import read_cost
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.cost.model_file import load_model, padded_vocabulary
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.documents import LongDocuments
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.lengths import DISTRIBUTIONS
from megatron_wlb.data.mock import LENGTHS
from megatron_wlb.errors import ConfigError, refuse_all
from megatron_wlb.planning.from_config import (
    known_cost,
    padded_vocab_size,
    parallelism,
    recompute,
    run_of,
    without_growth,
)
from megatron_wlb.planning.packing.reference import REFERENCE_COST, REFERENCE_WINDOW
from megatron_wlb.planning.packing.settings import sliced
from megatron_wlb.planning.run import Run, Workload
from megatron_wlb.reading import (
    MOST_DEVICES,
    MOST_MICRO_BATCHES,
    MOST_TOKENS,
    real_number,
    text_of_flag,
    whole_number,
)
from megatron_wlb.settings.config import Config, flag_of, from_flat, table
from megatron_wlb.settings.megatron import ParallelConfig
from megatron_wlb.settings.split import PipelineSplit
from megatron_wlb.simulator.forecast import DEFAULT_VOCAB_SIZE

SIZES = {
    "tp_size": "tensor_model_parallel_size",
    "cp_size": "context_parallel_size",
    "pp_size": "pipeline_model_parallel_size",
    "vpp_size": "num_virtual_stages_per_pipeline_rank",
    "ep_size": "expert_model_parallel_size",
    "etp_size": "expert_tensor_parallel_size",
}
"""Flags of a layout, and the settings that they stand for."""
SPLIT = {
    "decoder_first_pipeline_num_layers": " N",
    "decoder_last_pipeline_num_layers": " N",
    "account_for_embedding_in_pipeline_split": "",
    "account_for_loss_in_pipeline_split": "",
    "pipeline_model_parallel_layout": " LAYOUT",
}
"""Flags of uneven stages, with what their values are called."""
ASSUMED = {
    "bf16": True,
    "optimizer": "adam",
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "decrease_batch_size_if_needed": False,
    "wlb_attention_kernel": "auto",
    "wlb_cp_overlap_groups": None,
    "wlb_cp_keep_gathered": False,
    "wlb_cp_reduce_in_fp32": False,
}
"""What commands predict of a run, whatever ``--model`` says."""
NUM_MICRO_BATCHES = 4
PIPELINE = "pp_size", "vpp_size", "dp_size"
_PLAIN = "VPP", "EP"
"""Sizes that are not worth a word where they are 1."""

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


def add_micro_batch_size(group: argparse._ArgumentGroup) -> None:
    about = "windows that a micro-batch stands for, as training's (default: --model's, or 1)"
    flag(group, "--micro-batch-size N", about)


def numbers_of_micro_batches(numbers: Sequence[int]) -> tuple[int, ...]:
    """Each N once. Raises :class:`ConfigError` for what is no number above 0."""
    for number in numbers:
        whole_number("--num-micro-batches", number, 1, MOST_MICRO_BATCHES)
    return tuple(dict.fromkeys(numbers))


def source(args: argparse.Namespace, window: int, config: Config | None = None) -> LengthSource:
    """The one that the flags name, or that of settings of ``--model`` that say ``--mock-data``.

    Raises :class:`ConfigError` for none or several.
    """
    given = [bool(args.prefixes), args.distribution is not None, args.lengths is not None]
    mock = None
    if config is not None and config.data.mock_data and not any(given):
        mock = config.wlb.wlb_mock_lengths or LENGTHS
    if sum(given) != 1 and mock is None:
        raise ConfigError(
            f"{'several sources of documents' if any(given) else 'no documents'}; give one of a "
            "corpus PREFIX, --distribution NAME and --lengths FILE"
        )
    whole_number("--window", window, 2, MOST_TOKENS)
    whole_number("--seed", args.seed, 0, 2**32 - 2)
    if mock is not None:
        return LengthSource.named(mock)
    if args.distribution is not None:
        return LengthSource.of_distribution(args.distribution)
    if args.lengths is not None:
        return LengthSource.of_file(args.lengths)
    return LengthSource.of_corpora(args.prefixes)


def add_packing_rules(group: argparse._ArgumentGroup) -> None:
    flag(group, "--max-age N", "as --wlb-max-age", 12)
    flag(group, "--max-step-tokens N", "as --wlb-max-step-tokens")
    add_long_documents(group)


def add_long_documents(group: argparse._ArgumentGroup) -> None:
    about = (
        "documents over the window, as --wlb-long-documents; slice is for slim, others split them "
        "then"
    )
    policies = get_args(LongDocuments)
    flag(group, "--long-documents", about, policies[0], choices=policies)


def add_division(group: argparse._ArgumentGroup, **about: str) -> None:
    """Flags of how a model is divided; ``about`` a size is said what is not usual."""
    usual = {
        "tp": "tensor-parallel ranks, with sequence parallelism",
        "cp": "context-parallel ranks",
        "pp": "pipeline stages",
        "vpp": "model chunks a pipeline rank (interleaved schedule)",
        "dp": "data-parallel replicas",
        "ep": "ranks over which experts are divided, of several replicas where one has too few",
        "etp": "ranks over which each expert is divided",
    }
    for size, text in usual.items():
        none = "1" if size != "etp" else "TP"
        said = about.get(size, f"{text} (default: --model's, or {none})")
        flag(group, f"--{size}-size N", said)
    about_settings = {f.name: str(f.metadata["help"]) for f in fields(ParallelConfig)}
    for name, value in SPLIT.items():
        flag(group, f"{flag_of(name)}{value}", f"{about_settings[name]} (as --model, if none)")


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
    about = "micro-batches are padded to a multiple: TP with sequence parallelism"
    flag(group, "--length-multiple N", f"{about} (default: --model's, or 1)")
    add_division(
        group,
        pp="pipeline stages (default: --model's): steps take what Megatron's 1F1B does in a "
        "simulation; without any, as long as their slowest micro-batch",
        dp="data-parallel ranks that share a step (default: --model's, or 1 with --pp-size)",
    )
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


@dataclass(frozen=True)
class Job:
    """What a command is to pack or to simulate: its flags, over what ``--model`` says."""

    args: argparse.Namespace
    """The flags as they were given."""
    model: Model
    config: Config
    """The settings of ``--model`` with those of the flags over them."""
    layout: Parallelism | None
    """How the model is divided; None where nothing tells what shares the work."""
    shape: ModelShape
    """The model's sizes, its vocabulary padded."""
    numbers: tuple[int, ...] = ()
    """N, each once: micro-batches of a step over all replicas."""

    @property
    def window(self) -> int:
        return self.config.data.seq_length

    @property
    def micro_batch_size(self) -> int:
        return self.config.training.micro_batch_size

    @property
    def limits(self) -> dict[str, int | None]:
        return {"max_age": self.args.max_age, "max_step_tokens": self.args.max_step_tokens}

    @property
    def machine(self) -> Hardware:
        return load_hardware(self.config.wlb.wlb_hardware)

    def run(self, number: int, cost: Cost | None = None) -> Run:
        """Describes the run of N micro-batches; ``cost`` replaces the analytic one.

        Raises :class:`ConfigError` for what cannot be.
        """
        assert self.layout is not None
        config = without_growth(self.config)
        number_of_windows = {"global_batch_size": number * self.micro_batch_size}
        config = from_flat(config.flat() | ASSUMED | number_of_windows)
        run = run_of(config, 0, self.layout.dp_size, cost=cost, shape=self.shape)
        return run.executed(kernels="fused")  # as on a GPU

    def known_run(self, number: int) -> Run | None:
        """Describes the run as :meth:`run` does; None without ``--model``, or where nothing tells
        what shares the work.
        """
        if self.layout is None or self.args.model is None:
            return None
        return self.run(number, None if self.config.wlb.wlb_cost == "analytic" else self.cost)

    @cached_property
    def cost(self) -> Cost:
        """The cost that the flags name; LLaMA2-7B's if they name none.

        Raises :class:`ConfigError` for files that hold none, or a cost of another model.
        """
        args = self.args
        if args.model is None:
            if args.hardware is not None:
                raise ConfigError("--hardware is the machine of --model FILE; give that as well")
            return REFERENCE_COST if args.cost is None else cost_of_file(args)
        if self.model.sizes is not None:
            if args.cost is not None:
                return cost_of_file(args, self.shape)
            execution = Execution(self.layout or parallelism(self.config))
            return AnalyticModel(self.shape, execution, self.machine).cost()
        found = known_cost(self.config, self.shape.vocab_size)
        if found is None:
            raise ConfigError(
                f"--model {args.model} asks for a cost that is measured in training; leave "
                "wlb_cost out, or give --cost FILE"
            )
        return found

    @property
    def pp_size(self) -> int:
        return 1 if self.layout is None else self.layout.pp_size

    def without_slices(self, what: str) -> None:
        """Notes that packings of slices are left out where there is no pipeline."""
        if self.pp_size == 1:
            names = ", ".join(sliced())
            remark(f"{names} is not {what}, as it gains in pipelines: give --pp-size of 2 or more")

    @property
    def sizes(self) -> dict[str, int | None]:
        """How the model is divided, by size; None where nothing tells. JSON-able."""
        p, known = self.layout or parallelism(self.config), self.args.model is not None
        own = {name: getattr(p, name) for name in ("tp_size", "cp_size") if known}
        shared = ("pp_size", "vpp_size", "dp_size") if self.layout else ()
        experts = ("ep_size",) if self.shape.experts else ()
        found = own | {name: getattr(p, name) for name in (*shared, *experts)}
        return {name: found.get(name) for name in ("tp_size", "cp_size", *PIPELINE, "ep_size")}

    @property
    def title(self) -> str:
        """What the cost is of, and how the model is divided."""
        args, machine = self.args, Path(self.config.wlb.wlb_hardware).stem
        cost = "LLaMA2-7B at 128K"
        if args.cost is not None:
            cost = Path(args.cost).name
        elif args.model is not None:
            cost = f"{Path(args.model).stem} on {machine}"
        named = {name.removesuffix("_size").upper(): n for name, n in self.sizes.items()}
        said = " × ".join(
            f"{name} {n}" for name, n in named.items() if n and (n > 1 or name not in _PLAIN)
        )
        return f"cost of {cost}, {said}" if said else f"cost of {cost}"

    def original_fits(self, run: Run | None) -> bool | None:
        """Whether `original` fits the memory of ``run``; None where that is not known."""
        run = run or self._own_devices
        return None if run is None else run.fits_windows

    @cached_property
    def _own_devices(self) -> Run | None:
        """A run of micro-batches that each have devices of their own, if TP or CP says how many."""
        p, number = parallelism(self.config), max(self.numbers)
        if self.args.model is None or p.tp_size * p.cp_size == 1:
            return None
        return replace(self, layout=replace(p, dp_size=number)).run(number)

    @property
    def _asked_tokens(self) -> int | None:
        """S_max as ``--max-windows`` says, or else ``--model``; None where neither does."""
        given = self.args.max_windows
        if given is not None:
            return int(real_number("--max-windows", given, 1, MOST_TOKENS) * self.window)
        return self.config.wlb.wlb_max_tokens

    def max_tokens(self, run: Run | None) -> int:
        """S_max in tokens; a note says what memory makes of it.

        As asked for; otherwise two windows for each that a micro-batch stands for, or what fits the
        memory of ``run``, where it is known, but at least one.
        """
        row, asked = self.micro_batch_size * self.window, self._asked_tokens
        run = run or self._own_devices
        if run is None or asked is not None:
            return asked or 2 * row
        least = "one window" if row == self.window else f"{self.micro_batch_size} windows"
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
            f"S_max is {fitting:,} tokens ({fitting / self.window:.2f} windows), which fit "
            f"{run.limit_gib:.1f} GiB"
        )
        return fitting

    def workload(self, documents: LengthSource, number: int, run: Run | None) -> Workload:
        """What the flags describe, for one N, on ``run`` where it is known.

        Raises :class:`WLBError` where it cannot be packed.
        """
        args = self.args
        documents.check(window=self.window, long_documents=args.long_documents)
        if run is not None:
            made = run.workload(documents, seed=args.seed, long_documents=args.long_documents)
            return replace(made, length_multiple=args.length_multiple or made.length_multiple)
        return Workload(
            source=documents,
            window=self.window,
            num_micro_batches=number,
            cost=self.cost,
            seed=args.seed,
            long_documents=args.long_documents,
            length_multiple=args.length_multiple or 1,
            layout=self.layout,
            micro_batch_size=self.micro_batch_size,
            experts=self._experts,
            alike=self._alike,
            merges=self.args.model is None or self.config.merges,
        )

    @property
    def _alike(self) -> int:
        """How many replicas meet in each pass, as far as ``--model`` tells."""
        experts = self._experts
        if self.args.model is not None and self.config.replicas_meet:
            return self.layout.dp_size if self.layout else 1
        return experts.num_replicas if experts else 1

    @property
    def _experts(self) -> ExpertGroups | None:
        """Replicas that exchange tokens with experts, with the TP and CP of ``--model``.

        Raises :class:`ConfigError` for experts that cannot be divided so.
        """
        if self.args.model is None:
            if self.args.ep_size is not None:
                raise ConfigError("--ep-size divides the experts of --model; give that as well")
            return None
        own = self.layout or parallelism(self.config)
        if self.args.ep_size is not None and not self.shape.experts:
            own.check_experts(self.shape)
        if own.expert_replicas == 1 or not self.shape.experts:
            return None
        own.check_experts(self.shape)
        analytic = AnalyticModel(self.shape, Execution(own, recompute(self.config)), self.machine)
        return ExpertGroups.of(analytic, self.args.cost and self.cost, self.window)


def asked(args: argparse.Namespace, model: Model) -> Config:
    """The settings of ``--model`` with the flags of window, machine and cost over them.

    Raises :class:`ConfigError` for values that cannot be.
    """
    for name, known in table().items():  # --delay-price is --wlb-delay-price
        own = name.removeprefix("wlb_")
        if own != name:
            refuse_all(known.beyond(flag_of(own), getattr(args, own, None)))
    size = getattr(args, "micro_batch_size", None)
    if size is not None:
        whole_number("--micro-batch-size", size, 1, MOST_MICRO_BATCHES)
    window = model.window or REFERENCE_WINDOW if args.window is None else args.window
    over = {
        "seq_length": window,
        "micro_batch_size": size or model.micro_batch_size or 1,
        "wlb_cost": args.cost and str(args.cost),
        "wlb_cost_extrapolate": args.cost_extrapolate or None,
        "wlb_hardware": args.hardware,
        "wlb_memory_gib": getattr(args, "memory_gib", None),
        "wlb_host_gib": getattr(args, "host_gib", None),
        "wlb_expert_imbalance": getattr(args, "expert_imbalance", None),
    }
    return _with(model.config, over)


def divided(args: argparse.Namespace, config: Config, *, as_model: bool, keep_vpp: bool) -> Config:
    """``config`` with the flags of sizes and stages over it.

    With ``as_model`` the stages of ``--model`` stay unless flags give others. With ``keep_vpp`` its
    VPP stays in another pipeline.
    """
    given = {name: getattr(args, name, None) for name in SIZES}
    for name, size in given.items():
        if size is not None:
            whole_number(flag_of(name), size, 1, MOST_DEVICES)
    values = {} if given["tp_size"] is None else {"sequence_parallel": given["tp_size"] > 1}
    p = config.parallel
    own: dict[str, Any] = {f.name: getattr(args, f.name, f.default) for f in fields(PipelineSplit)}
    same = as_model and given["pp_size"] in (None, p.pipeline_model_parallel_size)
    values = config.flat() | values
    if PipelineSplit(**own).given or not (same and given["vpp_size"] in (None, p.vpp_size)):
        values |= own
    if not (same or keep_vpp):
        values["num_virtual_stages_per_pipeline_rank"] = None
    values |= {SIZES[name]: size for name, size in given.items() if size is not None}
    config = from_flat(values)
    if given["vpp_size"] is not None:  # a layout of other stages is an error
        p = config.parallel
        p.split.uneven(config.model.num_layers, p.pipeline_model_parallel_size, given["vpp_size"])
    return config


def _with(config: Config, over: Mapping[str, Any]) -> Config:
    return from_flat(config.flat() | {name: x for name, x in over.items() if x is not None})


def replicas(args: argparse.Namespace, model: Model, config: Config) -> int | None:
    """Data-parallel replicas, by ``--dp-size`` or the devices of ``--model``."""
    if args.dp_size is not None:
        return whole_number("--dp-size", args.dp_size, 1, MOST_DEVICES)
    p = config.parallel
    sizes = p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size
    return model.dp_size(math.prod(sizes))


def read_job(args: argparse.Namespace) -> Job:
    """What the flags of a command that packs say.

    Without a pipeline or devices ``--model`` does not tell what shares the work. Raises
    :class:`ConfigError` for a file that is none, and values that cannot be.
    """
    if args.model is None and (args.tp_size or args.cp_size):
        name = "--tp-size" if args.tp_size else "--cp-size"
        raise ConfigError(f"{name} divides the model of --model; give that as well")
    model = Model(Config()) if args.model is None else read_model(args.model)
    config = asked(args, model)
    own = config.parallel.pipeline_model_parallel_size
    config = divided(args, config, as_model=own > 1, keep_vpp=False)
    pp_size, vpp_size, dp_size = args.pp_size, args.vpp_size, replicas(args, model, config)
    if own > 1 and pp_size is None:
        pp_size = own
    layout = None
    if (pp_size, vpp_size, dp_size) != (None, None, None):
        layout = parallelism(config, dp_size or 1)
    if args.model is None:
        shape = load_model("7b")  # the reference cost's
    elif model.sizes is not None:
        shape = padded_vocabulary(model.sizes, config.parallel.tensor_model_parallel_size)
    else:
        vocab_size = padded_vocab_size(config, _vocab_size(args, config))
        shape = replace(model.shape, vocab_size=vocab_size)
    numbers = args.num_micro_batches
    if numbers is None:
        found = model.num_micro_batches(config.training.micro_batch_size)
        numbers = [found or NUM_MICRO_BATCHES]
    return Job(args, model, config, layout, shape, numbers_of_micro_batches(numbers))


def _vocab_size(args: argparse.Namespace, config: Config) -> int:
    if config.data.vocab_size is not None:
        return config.data.vocab_size
    known = [Corpus.open(prefix).vocab_size for prefix in args.prefixes]
    return max((size for size in known if size), default=DEFAULT_VOCAB_SIZE)


def cost_of_file(
    args: argparse.Namespace, shape: ModelShape | None = None, layout: Parallelism | None = None
) -> Cost:
    """The cost that ``--cost`` names, compared with model and layout where they are known."""
    return read_cost(args.cost, "--cost", shape, layout, extrapolate=args.cost_extrapolate)

"""What commands that try packings have in common: documents, model, layout, batch, steps."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.model import MODELS, Model, add_model_flag, read_model
from megatron_wlb.cli.output import counting_bar, remark
from megatron_wlb.cost import Cost, Recompute
from megatron_wlb.cost.cost_files import read_cost
from megatron_wlb.cost.model_file import padded_vocabulary
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.documents import LongDocuments
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.lengths import DISTRIBUTIONS, REFERENCE_WINDOW
from megatron_wlb.data.mock import LENGTHS
from megatron_wlb.errors import ConfigError, CorpusError, refuse_all
from megatron_wlb.plan.sharding.select import Mode
from megatron_wlb.planning.from_config import padded_vocab_size, parallelism, without_growth
from megatron_wlb.planning.packing import PACKINGS, PackingSettings, kind_of
from megatron_wlb.planning.packing.base import MOST_STEPS
from megatron_wlb.planning.run import MEMORY_SHARE, Run, title
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
from megatron_wlb.settings.packings import CHOSEN
from megatron_wlb.settings.split import PipelineSplit
from megatron_wlb.simulator.baseline import FULL, Baseline, baseline, fitting
from megatron_wlb.simulator.forecast import DEFAULT_VOCAB_SIZE, on_gpus
from megatron_wlb.simulator.trial import STEPS, WARM_UP_STEPS, Outcome, Sharding, Steps, trials
from megatron_wlb.study.advice import MAX_DELAY_STEPS

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
ASSUMED = ("bf16", "use_distributed_optimizer", "overlap_grad_reduce")
"""What commands predict of a run where ``--model`` does not say, unless it is a recipe."""
OWN = ("seed", "wlb_hardware", "wlb_memory_gib", "wlb_host_gib", "wlb_expert_imbalance")
"""Settings that commands have flags of: ``--hardware`` is ``--wlb-hardware``."""
LAYOUT = ("tp_size", "cp_size", "pp_size", "vpp_size", "dp_size", "ep_size")
NUM_MICRO_BATCHES = 4
"""N at least, where nothing says it."""
REFERENCE = {"tensor_model_parallel_size": 8, "context_parallel_size": 2, "sequence_parallel": True}
"""The layout of 7B where no model is named: the paper's Table 2, at a window of 128K."""
RECOMPUTE = {"none": Recompute(), "selective": Recompute("selective"), "full": FULL}
"""Core attention, or every layer for itself."""
MOST_DOCUMENTS = 20_000
"""The most documents that a command packs of very few; a distribution has no end of them."""
MOST_REPEATS = 50
"""How often a packing sees each stored document at most: more say nothing new."""

SOURCES = f"""\
documents, one of:
  PREFIX …             a corpus in Megatron's .bin/.idx; only the .idx is read, in random order
  --distribution NAME  synthetic: {", ".join(DISTRIBUTIONS)}
  --lengths FILE       one length a line, or an .npy array
"""
MACHINES = f"""\
{MODELS}\
machine:
  --hardware NAME|FILE h100-sxm, h200, a100, a800, cpu, or a YAML file as in configs/hardware
  --cost FILE          measured instead of modelled: what megatron_wlb.measure_cost wrote
"""


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
    flag(group, "--seed N", "of the order (default: --model's, or 1234)")


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
    if args.seed is not None:
        whole_number("--seed", args.seed, 0, 2**32 - 2)
    if mock is not None:
        return LengthSource.named(mock)
    if args.distribution is not None:
        return LengthSource.of_distribution(args.distribution)
    if args.lengths is not None:
        return LengthSource.of_file(args.lengths)
    return LengthSource.of_corpora(args.prefixes)


def add_model(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    group = parser.add_argument_group("model and machine")
    add_model_flag(group, required=required)
    flag(group, "--hardware NAME|FILE", "the machine (default: --model's, or h100-sxm)")
    share = f"{MEMORY_SHARE:.0%}% of what context and communicators leave"
    about = f"what tensors may take on a device (default: --model's, or {share})"
    flag(group, "--memory-gib GIB", about)
    about = "the host's memory for each device, where activations of slices may wait"
    flag(group, "--host-gib GIB", f"{about} (default: --model's, or 0)")
    flag(group, "--cost FILE", "measured tables, coefficients")
    group.add_argument(
        "--cost-extrapolate",
        "--wlb-cost-extrapolate",  # as errors about tables call it
        action="store_true",
        help="go beyond the end of measured tables, also of the hardware's attention",
    )


def add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout and batch")
    own = {
        "tp": "tensor-parallel ranks, with sequence parallelism",
        "cp": "context-parallel ranks",
        "pp": "pipeline stages",
        "vpp": "model chunks a pipeline rank (interleaved schedule)",
        "dp": "data-parallel replicas",
        "ep": "ranks over which experts are divided, of several replicas where one has too few",
        "etp": "ranks over which each expert is divided",
    }
    others = {"etp": "TP", "dp": "1, without a pipeline one for each micro-batch"}
    for size, text in own.items():
        said = f"{text} (default: --model's, or {others.get(size, '1')})"
        flag(group, f"--{size}-size N", said)
    about_settings = {f.name: str(f.metadata["help"]) for f in fields(ParallelConfig)}
    for name, value in SPLIT.items():
        flag(group, f"{flag_of(name)}{value}", f"{about_settings[name]} (as --model, if none)")
    about = "of a step over all replicas: --global-batch-size ÷ --micro-batch-size"
    about += f" (default: --model's, or PP × DP, at least {NUM_MICRO_BATCHES})"
    flag(group, "--num-micro-batches N", about, of=int)
    about = "windows that a micro-batch stands for, as training's (default: --model's, or 1)"
    flag(group, "--micro-batch-size N", about)
    flag(group, "--recompute", "activations (default: --model's, or none)", choices=RECOMPUTE)
    add_expert_imbalance(group)
    about = "reduce gradients after the last backward instead of beside it"
    flag(group, "--no-overlap-grad-reduce", about)


def add_expert_imbalance(group: argparse._ArgumentGroup) -> None:
    about = "memory of a rank whose experts get so many times the mean rank's tokens"
    flag(group, "--expert-imbalance X", f"{about} (default: --model's, or 1)")


def add_packing_rules(group: argparse._ArgumentGroup) -> None:
    about = "S_max in windows (default: --model's, 2 × --micro-batch-size, or what fits)"
    flag(group, "--max-windows X", about)
    about = "micro-batches are padded to a multiple (default: as the layout asks)"
    flag(group, "--length-multiple N", about)
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


def add_packings(group: argparse._ArgumentGroup) -> None:
    flag(group, "--packing a,b,…", "what is tried (default: all but fixed-solver)")


def add_steps(group: argparse._ArgumentGroup) -> None:
    about = f"of each that count, after {WARM_UP_STEPS} that fill queues (default: {STEPS})"
    flag(group, "--steps N", about)


def add_max_delay(group: argparse._ArgumentGroup) -> None:
    about = "most that a token may be delayed in the mean by what is recommended, as in the paper"
    flag(group, "--max-delay STEPS", about, MAX_DELAY_STEPS)


@dataclass(frozen=True)
class Job:
    """What a command is to try: its flags, over what ``--model`` says."""

    args: argparse.Namespace
    """The flags as they were given."""
    model: Model
    config: Config
    """The settings of ``--model`` with those of the flags over them."""
    numbers: tuple[int, ...]
    """N, each once: micro-batches of a step over all replicas."""
    documents: LengthSource

    @property
    def window(self) -> int:
        return self.config.data.seq_length

    @property
    def hardware(self) -> str:
        return self.config.wlb.wlb_hardware

    @property
    def sharding(self) -> Mode:
        return self.config.wlb.wlb_cp_sharding

    def run(self, number: int) -> Run:
        """Describes the run of N micro-batches. Raises :class:`ConfigError` for what cannot be."""
        own: dict[str, Any] = {name: True for name in ASSUMED if self.model.recipe is None}
        own["global_batch_size"] = number * self.config.training.micro_batch_size
        own["decrease_batch_size_if_needed"] = False
        config = from_flat(without_growth(self.config).flat() | own)
        layout = parallelism(config, self._replicas(number))
        vocab_size = padded_vocab_size(config, self._vocab_size)
        if self.model.sizes is not None:
            shape = padded_vocabulary(self.model.sizes, layout.tp_size)
        else:
            shape = replace(self.model.shape, vocab_size=vocab_size)
        cost = self.config.wlb.wlb_cost
        if cost == "measured":
            raise ConfigError(
                f"--model {self.args.model} asks for a cost that is measured in training; leave "
                "wlb_cost out, or give --cost FILE"
            )
        measured: Cost | None = None
        if cost != "analytic":
            extrapolate = self.config.wlb.wlb_cost_extrapolate
            known = (shape, layout) if self.args.model else (None, None)
            measured = read_cost(cost, "--cost", *known, extrapolate=extrapolate)
        made = on_gpus(config, vocab_size, layout.dp_size, cost=measured, shape=shape)
        if self.args.no_overlap_grad_reduce:
            made = made.executed(overlap_grad_reduce=False)
        return made

    @property
    def _vocab_size(self) -> int:
        if self.config.data.vocab_size is not None:
            return self.config.data.vocab_size
        known = [Corpus.open(prefix).vocab_size for prefix in self.args.prefixes]
        return max((size for size in known if size), default=DEFAULT_VOCAB_SIZE)

    def _replicas(self, number: int) -> int:
        """Data-parallel replicas: as said, else one with a pipeline, and without one as many as
        micro-batches.
        """
        said = replicas(self.args, self.model, self.config)
        one = self.config.parallel.pipeline_model_parallel_size > 1
        return said or (1 if one else number)

    def settings(self, names: Sequence[str], run: Run, **own: Any) -> list[PackingSettings]:
        """Packings by what they are called, after `original`, which all are compared with; ``own``
        has settings of a packing by its name.
        """
        limits = {"max_age": self.args.max_age, "max_step_tokens": self.args.max_step_tokens}
        found = []
        for text in dict.fromkeys(["original", *names]):
            name = text.partition("+")[0].partition(":")[0]
            max_tokens = run.s_max(name, self.asked_tokens)
            given = limits | own.get(name.replace("-", "_"), {})
            found.append(PackingSettings.parse(text, self.window, max_tokens, **given))
        return found

    @property
    def named(self) -> list[str]:
        """The packings that are asked for, or those that are tried by default."""
        if self.args.packing:
            return list(self.args.packing)
        shaped = ["hold+shape"] if self.config.parallel.pipeline_model_parallel_size > 1 else []
        return [name + form for name in PACKINGS for form in kind_of(name).tried] + shaped

    @property
    def asked_tokens(self) -> int | None:
        """S_max as ``--max-windows`` says, or else ``--model``; None where neither does."""
        given = self.args.max_windows
        if given is not None:
            return int(real_number("--max-windows", given, 1, MOST_TOKENS) * self.window)
        return self.config.wlb.wlb_max_tokens

    def max_tokens(self, run: Run) -> int:
        """S_max in tokens; a note says what memory makes of it."""
        found, row = run.s_max(CHOSEN, self.asked_tokens), run.micro_batch_tokens
        if self.asked_tokens is None and found != 2 * row:
            fits = "which fit" if run.fits_windows else "though even so many do not fit"
            windows = f"{found:,} tokens ({found / self.window:.2f} windows)"
            remark(f"S_max is {windows}, {fits} {run.limit_gib:.1f} GiB")
        return found

    def steps(self, step_tokens: int) -> Steps:
        """The documents, and how many steps of them are tried: as ``--steps`` says, else
        :data:`STEPS`, but fewer where a few short documents would only be packed again and again.

        Notes say so, and what becomes of the documents. Raises :class:`CorpusError` where not one
        step is left.
        """
        args, documents, window = self.args, self.documents, self.window
        documents.check(window=window, long_documents=args.long_documents)
        warm_up, steps = WARM_UP_STEPS, STEPS
        if args.steps is not None:
            steps = whole_number("--steps", args.steps, 1, MOST_STEPS)
        elif documents.stored is not None:
            pieces = int((-(-documents.stored // window)).sum())
            tokens = max(1, int(documents.stored.sum()))
            documents_a_step = -(-step_tokens * pieces // tokens)
            fitting = (MOST_DOCUMENTS + MOST_REPEATS * pieces) // documents_a_step
            if fitting < warm_up + steps:
                few = (
                    f"a step of {step_tokens:,} tokens takes {documents_a_step:,} documents of "
                    f"{tokens / pieces:.4g} tokens, and there are {documents.num_documents:,.0f}"
                )
                if fitting < 1:
                    raise CorpusError(
                        f"{documents.title}: {few}; lower --window, give more documents, or insist "
                        "with --steps"
                    )
                warm_up = min(warm_up, fitting // 2)
                remark(f"{few}: {fitting - warm_up} steps instead of {steps} (--steps)")
                steps = fitting - warm_up
        tokens = (warm_up + steps) * step_tokens
        for text in documents.remarks(tokens, window=window, long_documents=args.long_documents):
            remark(text)
        first = self.config.training.seed
        seeds = tuple(first + number for number in range(getattr(args, "num_seeds", 1)))
        multiple = getattr(args, "length_multiple", None)
        if multiple is not None:
            whole_number("--length-multiple", multiple, 1, MOST_TOKENS)
        return Steps(
            documents, steps, warm_up, seeds, args.long_documents, length_multiple=multiple
        )

    def compared(
        self,
        cases: Sequence[tuple[Run, Sequence[PackingSettings]]],
        steps: Steps,
        shardings: Sequence[Sharding],
        task: str,
    ) -> list[tuple[Outcome, Baseline]]:
        """Tries each packing of each run with each sharding. Gains are over `original` with the
        last one, whose row has the recomputation that it needs. What cannot work is found first.
        """
        for run, settings in cases:
            steps.check(run, settings)
        found: list[tuple[Outcome, Baseline]] = []
        num = sum(len(settings) + bool(fitting(run).more_overlap) for run, settings in cases)
        with counting_bar(task, num * len(steps)) as tell:
            steps = replace(steps, tell=tell)
            for run, settings in cases:
                base = baseline(run, steps, shardings[-1], self.hardware)
                for setting in settings:
                    if setting.is_plain:
                        quiet, own = replace(steps, tell=lambda: None), base.original.run
                        others = shardings[:-1]
                        outcomes = trials(own, setting, quiet, others) if others else []
                        outcomes.append(base.original)
                    else:
                        outcomes = trials(run, setting, steps, shardings)
                    found += [(outcome, base) for outcome in outcomes]
        return found

    def layout(self, run: Run) -> dict[str, int]:
        """How the model is divided, by size."""
        return {name: getattr(run.parallelism, name) for name in LAYOUT}

    def title(self, run: Run) -> str:
        """Model, machine, and how the model is divided."""
        cost = "" if self.config.wlb.wlb_cost == "analytic" else f" by {self.args.cost}"
        name = Path(self.args.model or "7b").stem
        windows = f" of {run.micro_batch_size} windows" if run.micro_batch_size > 1 else ""
        return (
            f"{name}{cost} on {machine_title(run.num_devices, self.hardware)}, "
            f"{title(run.parallelism)}, window {run.window:,}, N {run.num_micro_batches}{windows}"
        )


def machine_title(num_devices: int, hardware: str) -> str:
    """Devices by the machine's name, or its file where that is no name of a machine."""
    path = Path(hardware)
    return (
        f"{num_devices} × {path.stem if path.stem != 'hardware' else path.absolute().parent.name}"
    )


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
    over = {name: getattr(args, name.removeprefix("wlb_"), None) for name in OWN}
    over |= {
        "seq_length": window,
        "micro_batch_size": size or model.micro_batch_size or 1,
        "wlb_cost": args.cost and str(args.cost),
        "wlb_cost_extrapolate": args.cost_extrapolate or None,
    }
    given = {name: value for name, value in over.items() if value is not None}
    return from_flat(model.config.flat() | given)


def divided(args: argparse.Namespace, config: Config) -> Config:
    """``config`` with the flags of sizes and stages over it; its stages stay unless flags give
    others.
    """
    given = {name: getattr(args, name, None) for name in SIZES}
    for name, size in given.items():
        if size is not None:
            whole_number(flag_of(name), size, 1, MOST_DEVICES)
    values, p = config.flat(), config.parallel
    if given["tp_size"] is not None:
        values["sequence_parallel"] = given["tp_size"] > 1
    own: dict[str, Any] = {f.name: getattr(args, f.name, f.default) for f in fields(PipelineSplit)}
    same = given["pp_size"] in (None, p.pipeline_model_parallel_size)
    if PipelineSplit(**own).given or not (same and given["vpp_size"] in (None, p.vpp_size)):
        values |= own
    values |= {SIZES[name]: size for name, size in given.items() if size is not None}
    config = from_flat(values)
    if given["vpp_size"] is not None:  # a layout of other stages is an error
        p = config.parallel
        p.split.uneven(config.model.num_layers, p.pipeline_model_parallel_size, given["vpp_size"])
    return config


def replicas(args: argparse.Namespace, model: Model, config: Config) -> int | None:
    """Data-parallel replicas, by ``--dp-size`` or the devices of ``--model``."""
    if args.dp_size is not None:
        return whole_number("--dp-size", args.dp_size, 1, MOST_DEVICES)
    p = config.parallel
    sizes = p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size
    return model.dp_size(math.prod(sizes))


def read_job(args: argparse.Namespace) -> Job:
    """What the flags of a command say that tries packings.

    Raises :class:`ConfigError` for a file that is none, and values that cannot be.
    """
    model = read_model(args.model or "7b")
    config = asked(args, model)
    if args.model is None:
        config = from_flat(config.flat() | REFERENCE)
    config = divided(args, config)
    values = config.flat()
    if args.recompute:
        again = asdict(RECOMPUTE[args.recompute])
        values |= {f"recompute_{name}": value for name, value in again.items()}
    config = from_flat(values)
    numbers = args.num_micro_batches
    if numbers is None:
        found = model.num_micro_batches(config.training.micro_batch_size)
        if found is None:
            pp_size = config.parallel.pipeline_model_parallel_size
            each = pp_size * (replicas(args, model, config) or 1)
            found = -(-NUM_MICRO_BATCHES // each) * each
        numbers = [found]
    documents = source(args, config.data.seq_length, config)
    return Job(args, model, config, numbers_of_micro_batches(numbers), documents)

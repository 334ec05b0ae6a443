"""What commands that try packings have in common: documents, model, layout, batch, steps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.model import MODELS, Model, add_model_flag, given, read_model, settings
from megatron_wlb.cli.output import counting_bar, remark
from megatron_wlb.cost import Recompute
from megatron_wlb.cost.cost_files import read_cost
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.lengths import DISTRIBUTIONS
from megatron_wlb.data.mock import LENGTHS
from megatron_wlb.errors import ConfigError, CorpusError
from megatron_wlb.plan.sharding.select import Mode
from megatron_wlb.planning.from_config import padded_vocab_size, without_growth
from megatron_wlb.planning.models import DEFAULT_VOCAB_SIZE
from megatron_wlb.planning.packing import PACKINGS, PackingSettings, kind_of, reads
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
from megatron_wlb.settings.config import Config, from_flat
from megatron_wlb.settings.packings import CHOSEN
from megatron_wlb.settings.split import PipelineSplit
from megatron_wlb.simulator.baseline import FULL, Baseline, baseline, fitting
from megatron_wlb.simulator.forecast import on_gpus
from megatron_wlb.simulator.trial import STEPS, WARM_UP_STEPS, Outcome, Sharding, Steps, trials
from megatron_wlb.study.advice import MAX_DELAY_STEPS

SIZES = (
    "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank", "expert_model_parallel_size",
)  # fmt: skip
"""All sizes of a layout that are searched."""
SPLIT = {f.name: f.default for f in fields(PipelineSplit)}
"""Settings of uneven stages, as they are where stages are even."""
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
  --hardware NAME|FILE h100-sxm-measured, h100-sxm (as runs before flash-attn 3), h200, a100,
                       a800, cpu, or a YAML file as in configs/hardware
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
    settings(group, "seq_length", "seed")


def numbers_of_micro_batches(numbers: Sequence[int]) -> tuple[int, ...]:
    """Each N once. Raises :class:`ConfigError` for what is no number above 0."""
    for number in numbers:
        whole_number("--num-micro-batches", number, 1, MOST_MICRO_BATCHES)
    return tuple(dict.fromkeys(numbers))


def source(args: argparse.Namespace, config: Config | None = None) -> LengthSource:
    """The one that the flags name, or that of settings of ``--model`` that say ``--mock-data``.

    Raises :class:`ConfigError` for none or several.
    """
    named = [bool(args.prefixes), args.distribution is not None, args.lengths is not None]
    mock = None
    if config is not None and config.data.mock_data and not any(named):
        mock = config.wlb.wlb_mock_lengths or LENGTHS
    if sum(named) != 1 and mock is None:
        raise ConfigError(
            f"{'several sources of documents' if any(named) else 'no documents'}; give one of a "
            "corpus PREFIX, --distribution NAME and --lengths FILE"
        )
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
    share = f"{MEMORY_SHARE:.0%}% of what context and communicators leave"
    about = f"what tensors may take on a device, in GiB (default: --model's, or {share})"
    settings(group, "wlb_hardware")
    settings(group, "wlb_memory_gib", about=about)
    settings(group, "wlb_host_gib", "wlb_cost", "wlb_cost_extrapolate")


def add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout and batch")
    settings(group, *SIZES, "expert_tensor_parallel_size")
    about = "data-parallel replicas (default: --model's, or 1, without a pipeline one for each "
    flag(group, "--dp-size N", f"{about}micro-batch)")
    settings(group, *SPLIT)
    about = "of a step over all replicas: --global-batch-size ÷ --micro-batch-size"
    about += f" (default: --model's, or PP × DP, at least {NUM_MICRO_BATCHES})"
    flag(group, "--num-micro-batches N", about, of=int)
    settings(group, "micro_batch_size")
    settings(group, "global_batch_size", about="instead of N: windows of a step")
    flag(group, "--recompute", "activations (default: --model's, or none)", choices=RECOMPUTE)
    settings(group, "wlb_expert_imbalance")
    group.add_argument(
        "--no-overlap-grad-reduce",
        action="store_const",
        const=False,
        default=argparse.SUPPRESS,
        dest="overlap_grad_reduce",
        help="reduce gradients after the last backward instead of beside it",
    )


def add_packing_rules(group: argparse._ArgumentGroup) -> None:
    about = "S_max in windows (default: --model's, 2 × --micro-batch-size, or what fits)"
    flag(group, "--max-windows X", about)
    about = "micro-batches are padded to a multiple (default: as the layout asks)"
    flag(group, "--length-multiple N", about)
    settings(group, "wlb_max_age", "wlb_max_step_tokens", "wlb_long_documents")


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
    """What ``--model`` names, with the settings of flags over its own."""
    numbers: tuple[int, ...]
    """N, each once: micro-batches of a step over all replicas."""
    documents: LengthSource

    @property
    def config(self) -> Config:
        return self.model.config

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
        batch = number * self.config.training.micro_batch_size
        own = {"global_batch_size": batch, "decrease_batch_size_if_needed": False}
        config = from_flat(without_growth(self.config).flat() | own)
        vocab_size = padded_vocab_size(config, self._vocab_size)
        run = on_gpus(config, vocab_size, self._replicas(number))
        cost = self.config.wlb.wlb_cost
        if cost == "measured":
            says = "--cost" if "wlb_cost" in given(self.args) else f"--model {self.args.model}"
            raise ConfigError(
                f"{says} asks for a cost that is measured in training; leave it out, or give "
                "--cost FILE"
            )
        if cost == "analytic":
            return run
        known = (run.shape, run.parallelism) if self.args.model else (None, None)
        return replace(run, measured=read_cost(cost, "--cost", *known, extrapolate=run.extrapolate))

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
        said = replicas(self.args, self.model)
        one = self.config.parallel.pipeline_model_parallel_size > 1
        return said or (1 if one else number)

    def settings(self, names: Sequence[str], run: Run) -> list[PackingSettings]:
        """Packings by what they are called, after `original`, which all are compared with."""
        # Their short names say these.
        plain = replace(self.config.wlb, wlb_shape="off", wlb_micro_batches="fixed")
        found = []
        for text in dict.fromkeys(["original", *names]):
            name = text.partition("+")[0].partition(":")[0]
            max_tokens = run.s_max(name, self.asked_tokens)
            own = replace(plain, wlb_packing=name)
            told = asdict(PackingSettings.of_config(own, max_tokens)).items()
            read = {field: x for field, x in told if field != "max_tokens" and reads(name, field)}
            found.append(PackingSettings.parse(text, self.window, max_tokens, **read))
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
        long_documents = self.config.wlb.wlb_long_documents
        documents.check(window=window, long_documents=long_documents)
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
        for text in documents.remarks(tokens, window=window, long_documents=long_documents):
            remark(text)
        first = self.config.training.seed
        seeds = tuple(first + number for number in range(getattr(args, "num_seeds", 1)))
        multiple = getattr(args, "length_multiple", None)
        if multiple is not None:
            whole_number("--length-multiple", multiple, 1, MOST_TOKENS)
        return Steps(documents, steps, warm_up, seeds, long_documents, length_multiple=multiple)

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
        for run, packings in cases:
            steps.check(run, packings)
        found: list[tuple[Outcome, Baseline]] = []
        num = sum(len(packings) + bool(fitting(run).more_overlap) for run, packings in cases)
        with counting_bar(task, num * len(steps)) as tell:
            steps = replace(steps, tell=tell)
            for run, packings in cases:
                base = baseline(run, steps, shardings[-1], self.hardware)
                for setting in packings:
                    if setting.is_plain:
                        quiet, own = replace(steps, tell=lambda: None), base.original.run
                        others = shardings[:-1]
                        outcomes = trials(own, setting, quiet, others) if others else []
                        outcomes.append(base.original)
                    else:
                        outcomes = trials(run, setting, steps, shardings)
                    found += [(outcome, base) for outcome in outcomes]
        return found

    def title(self, run: Run) -> str:
        """Model, machine, and how the model is divided."""
        cost = self.config.wlb.wlb_cost
        cost = "" if cost == "analytic" else f" by {cost}"
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


def asked(args: argparse.Namespace) -> Model:
    """What ``--model`` names, with the settings of flags over its own. Stages stay as they are
    unless flags give others.

    Raises :class:`ConfigError` for a file that is none, and values that cannot be.
    """
    model, found = read_model(args.model or "7b"), given(args)
    p, reference = model.config.parallel, {} if args.model else REFERENCE
    if "tensor_model_parallel_size" in found:
        found["sequence_parallel"] = found["tensor_model_parallel_size"] > 1
    if "global_batch_size" in found:
        found["step_batch_size_schedule"] = None
    if args.recompute:
        again = asdict(RECOMPUTE[args.recompute])
        found |= {f"recompute_{name}": value for name, value in again.items()}
    pp_size = found.get("pipeline_model_parallel_size", p.pipeline_model_parallel_size)
    vpp_size = found.get("num_virtual_stages_per_pipeline_rank")
    same = pp_size == p.pipeline_model_parallel_size and vpp_size in (None, p.vpp_size)
    split = SPLIT if found.keys() & SPLIT or not same else {}
    if split and p.split.pattern is not None:  # which says what the layers are, too
        split = {**split, "hybrid_layer_pattern": p.split.pattern.divided()}
    config = from_flat(model.config.flat() | reference | split | found)
    if vpp_size is not None:  # a layout of other stages is an error
        config.parallel.split.uneven(config.model.num_layers, pp_size, vpp_size)
    return replace(model, config=config, written=(*model.written, *found))


def replicas(args: argparse.Namespace, model: Model) -> int | None:
    """Data-parallel replicas, by ``--dp-size`` or the devices of ``--model``."""
    if args.dp_size is not None:
        return whole_number("--dp-size", args.dp_size, 1, MOST_DEVICES)
    return model.dp_size


def read_job(args: argparse.Namespace) -> Job:
    """What the flags of a command say that tries packings.

    Raises :class:`ConfigError` for a file that is none, and values that cannot be.
    """
    model = asked(args)
    numbers = args.num_micro_batches
    if numbers and "global_batch_size" in given(args):
        raise ConfigError(
            f"--num-micro-batches is {numbers[0]}, and --global-batch-size says N too; give one"
        )
    if numbers is None:
        found = model.num_micro_batches
        if found is None:
            pp_size = model.config.parallel.pipeline_model_parallel_size
            each = pp_size * (replicas(args, model) or 1)
            found = -(-NUM_MICRO_BATCHES // each) * each
        numbers = [found]
    return Job(args, model, numbers_of_micro_batches(numbers), source(args, model.config))

"""``wlb compare``: which of two runs was faster, and how sure that is."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_wlb.cli.flags import flag
from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import path_of_flag, read_text, whole_number

_EPILOG = """\
A and B are files of --wlb-metrics, or what Megatron-LM printed: the log of a run without this
project, with --log-interval 1. Give the logs of two runs over the same corpora on the same GPUs,
such as stock Megatron and --wlb-packing hold, and leave out the first steps, which compile and
allocate. Steps that a restart ran again count once.

Speed is work a second over all steps together, as packings let documents wait: a step of one run is
not the same step of the other. Work is model FLOPs where both files say them, as --wlb-metrics of
every packing does; else it is tokens. Plain packing cuts documents, so a token of it is less work:
tokens a second say less than is gained. Megatron's time of a step has its logging in it, that of
--wlb-metrics does not: some milliseconds. The interval holds 95 of 100 runs such as these: blocks
of neighbouring steps are drawn again and again. If 1 lies in it, nothing is proven; run longer.

examples:
  wlb compare stock.log balanced.jsonl --window 131072
  wlb compare a.jsonl b.jsonl --skip 20 --json
"""
_STEP = re.compile(
    r"iteration +(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?global batch size: +(\d+)"
)
_OURS = re.compile(r"(?:^|\s)wlb (\S+) \|")
_LOSS = re.compile(r"lm loss: ([\d.E+-]+)")
BLOCKS, DRAWS = 20, 2000
"""Blocks of neighbouring steps, and how often as many are drawn."""


@dataclass(frozen=True)
class Measured:
    """The steps of a run, ``[steps]`` each."""

    seconds: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    tflop: npt.NDArray[np.float64]
    """10¹² model FLOPs of a device; NaN where the file does not say."""
    losses: npt.NDArray[np.float64]
    """NaN where a step has none."""


@dataclass(frozen=True)
class Compared:
    """Run B over run A."""

    of: str
    """What is compared a second: model FLOPs (10¹², of a device) or tokens."""
    per_s: tuple[float, float]
    speedup: float
    low: float
    high: float
    """Ends of the interval of 95 %."""
    steps: tuple[int, int]
    losses: tuple[float, float]
    """Means over the last tenth of the steps; NaN where there are none."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    for name in ("a", "b"):
        about = f"run {name.upper()}: a file of --wlb-metrics, or what Megatron-LM printed"
        parser.add_argument(name, type=path_of_flag, metavar=name.upper(), help=about)
    flag(parser, "--window N", "tokens of a window; needed for what Megatron-LM printed")
    flag(parser, "--skip N", "the first steps, which are left out", 10)
    flag(parser, "--seed N", "of the draws", 1234)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    for name, least in (("skip", 0), ("seed", 0), ("window", 1)):
        if (value := getattr(args, name)) is not None:
            whole_number(f"--{name}", value, least)
    a, b = (read(path, args.window, args.skip) for path in (args.a, args.b))
    found = compare(a, b, args.seed)
    if args.json:
        losses = [None if np.isnan(loss) else loss for loss in found.losses]
        print(json.dumps(asdict(found) | {"losses": losses}))
        return 0
    for name, speed, steps, loss in zip("AB", found.per_s, found.steps, found.losses, strict=True):
        said = "" if np.isnan(loss) else f", loss {loss:.4f} over the last tenth"
        print(f"{name}: {speed:,.4g} {found.of} a second in {steps:,} steps{said}")
    sure = "faster" if found.low > 1 else "slower" if found.high < 1 else "not proven"
    print(f"B over A: {found.speedup:.3f} × (95 %: {found.low:.3f} to {found.high:.3f}), {sure}")
    return 0


def read(path: Path, window: int | None, skip: int = 0) -> Measured:
    """The steps of a file, without the first ``skip``.

    Raises :class:`ConfigError` for a file that has too few, or none.
    """
    text = read_text(path)
    steps: dict[int, tuple[float, ...]] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            steps |= _of_metrics(path, line)
        elif match := _OURS.search(line):
            raise ConfigError(
                f"{path} is the log of a run with --wlb-packing {match[1]}; give its file of "
                "--wlb-metrics, which has the tokens of each step"
            )
        elif match := _STEP.search(line):
            if window is None:
                raise ConfigError(f"{path} is what Megatron-LM printed; give --window, its tokens")
            number, ms, batch = match.groups()
            loss = float(said[1]) if (said := _LOSS.search(line)) else np.nan
            steps[int(number)] = float(ms) / 1e3, float(int(batch) * window), np.nan, loss
    numbers = sorted(steps)[skip:]
    if len(numbers) < 2 * BLOCKS:
        raise ConfigError(
            f"{path} has {len(steps)} steps, {len(numbers)} of them after --skip {skip}; give a "
            f"run of at least {skip + 2 * BLOCKS}, with --wlb-metrics or --log-interval 1"
        )
    run = Measured(*np.array([steps[n] for n in numbers]).T)
    if not (np.isfinite(run.seconds) & (run.seconds > 0) & (run.tokens > 0)).all():
        raise ConfigError(f"{path} has steps of no time or no tokens; give the file of a whole run")
    return run


def _of_metrics(path: Path, line: str) -> dict[int, tuple[float, ...]]:
    try:
        found = json.loads(line)
        if "step_ms" not in found:  # a line of an evaluation
            return {}
        seconds, rate, loss = found["step_ms"] / 1e3, found.get("tflops_per_device"), found["loss"]
        tflop, loss = (np.nan if x is None else float(x) for x in (rate, loss))
        return {int(found["iteration"]): (seconds, float(found["tokens"]), tflop * seconds, loss)}
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path}: a line is damaged ({error}): {line[:60]}") from None


def compare(a: Measured, b: Measured, seed: int) -> Compared:
    """Run ``b`` over ``a``, by a bootstrap of blocks of neighbouring steps."""
    generator = np.random.default_rng(seed)
    knows = all(np.isfinite(run.tflop).all() for run in (a, b))
    amounts = [run.tflop if knows else run.tokens for run in (a, b)]
    drawn = [_drawn(*one, generator) for one in zip(amounts, (a.seconds, b.seconds), strict=True)]
    per_s = amounts[0].sum() / a.seconds.sum(), amounts[1].sum() / b.seconds.sum()
    low, high = np.quantile(drawn[1] / drawn[0], [0.025, 0.975])
    last = [run.losses[-max(1, len(run.losses) // 10) :] for run in (a, b)]
    losses = [float(np.nanmean(own)) if np.isfinite(own).any() else np.nan for own in last]
    return Compared(
        "TFLOP a device" if knows else "tokens",
        (float(per_s[0]), float(per_s[1])),
        float(per_s[1] / per_s[0]),
        float(low),
        float(high),
        (len(a.seconds), len(b.seconds)),
        (losses[0], losses[1]),
    )


def _drawn(
    amounts: npt.NDArray[np.float64],
    seconds: npt.NDArray[np.float64],
    generator: np.random.Generator,
) -> npt.NDArray[np.float64]:
    """What draws of blocks did a second, ``[DRAWS]``."""
    sums = (
        np.array([block.sum() for block in np.array_split(own, BLOCKS)])
        for own in (amounts, seconds)
    )
    chosen = generator.integers(0, BLOCKS, (DRAWS, BLOCKS))
    done, taken = (own[chosen].sum(axis=1) for own in sums)
    drawn: npt.NDArray[np.float64] = done / taken
    return drawn

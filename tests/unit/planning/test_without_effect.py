"""Settings that change nothing with the chosen packing or layout are one warning each."""

from __future__ import annotations

import dataclasses
import re

import pytest

from megatron_wlb.planning import guards
from megatron_wlb.planning.packing import PACKINGS, reads
from megatron_wlb.planning.packing.settings import PackingSettings, _configured
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import WlbConfig, flag_of

PP2 = "--pipeline-model-parallel-size 2"

TOLD = [
    # Flags, processes, and what the warnings say.
    ("--wlb-units 8", 1, ["--wlb-units 8 has no effect: it counts only with --wlb-packing slim"]),
    (
        "--wlb-fixed-batches 4 --wlb-solver-limit 3", 1,
        ["--wlb-fixed-batches 4 has no effect: it counts only with --wlb-packing fixed-greedy or "
         "fixed-solver", "--wlb-solver-limit 3.0 has no effect: it counts only with"],
    ),
    (
        "--wlb-packing hold --wlb-queue-thresholds 100 200", 1,
        ["--wlb-queue-thresholds 100 200 has no effect: it counts only with --wlb-packing wlb"],
    ),
    ("--wlb-packing wlb --wlb-delay-price 0.2", 1, ["--wlb-delay-price 0.2 has no effect: it"]),
    ("--wlb-packing original --wlb-max-tokens 16384", 1, ["--wlb-max-tokens 16384 has no effect"]),
    (f"{PP2} --wlb-packing original --wlb-micro-batches auto --wlb-max-tokens 16384", 2, []),
    (
        "--wlb-shape on --wlb-verify-shapes", 1,
        ["--wlb-shape on has no effect: it counts only with --pipeline-model-parallel-size of at "
         "least 2", "--wlb-verify-shapes has no effect: it counts only with --pipeline"],
    ),
    ("--wlb-micro-batches auto", 1, ["--wlb-micro-batches auto has no effect: it counts only"]),
    (f"{PP2} --wlb-shape on --wlb-micro-batches auto --wlb-verify-shapes", 2, []),
    ("--wlb-cp-sharding per-document", 1, ["--wlb-cp-sharding per-document has no effect: it"]),
    ("--wlb-cp-sharding per-document --context-parallel-size 2", 2, []),
    (
        f"{PP2} --wlb-packing slim --wlb-dp-merge off", 2,
        ["--wlb-dp-merge off has no effect: it counts only with several data-parallel ranks"],
    ),
    (f"{PP2} --wlb-packing slim --wlb-dp-merge off", 4, []),
    ("--wlb-dp-merge off", 1, ["--wlb-dp-merge off has no effect: it counts only with --wlb-pack"]),
    ("--wlb-expert-imbalance 1.5", 1, ["--wlb-expert-imbalance 1.5 has no effect: it counts only"]),
    ("--wlb-cost-extrapolate", 1, ["--wlb-cost-extrapolate has no effect: it counts only with"]),
    (f"{PP2} --wlb-units 8 --wlb-packing slim", 2, []),
    ("--wlb-packing slim", 4, ["--wlb-packing slim without a pipeline gains nothing over hold; "]),
    ("--wlb-packing slim --wlb-long-documents slice", 1, []),
    ("--wlb-packing slim --wlb-memory-gib 20", 1, []),
    (
        f"{PP2} --wlb-packing slim --wlb-slice-cache divided", 2,
        ["--wlb-slice-cache divided has no effect: it counts only with --context-parallel-size of"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "world_size", "warnings"), TOLD)
def test_setting_without_effect_is_one_warning(
    flags: str, world_size: int, warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    guards.check(parse(flags.split()), world_size)
    assert len(caplog.messages) == len(warnings)
    for message, start in zip(caplog.messages, warnings, strict=True):
        assert message.startswith(start)


def test_help_says_which_packings_read_a_setting() -> None:
    """One table decides; what `--help` shows must say the same of every one of our flags."""
    said = {}
    fields = [field.name for field in dataclasses.fields(PackingSettings)][1:]
    names = {_configured(name): name for name in fields}
    for field in dataclasses.fields(WlbConfig):
        packings = re.match(
            r"((?:`[a-z-]+`(?:, )?)+)(?: with a pipeline)?: ", field.metadata["help"]
        )
        if packings and field.name in names:
            said[field.name] = set(re.findall(r"`([a-z-]+)`", packings[1]))
    # S_max and ages are of all that balance; their help says what they are.
    assert set(said) >= {_configured(n) for n in fields} - {
        "wlb_max_tokens", "wlb_max_age", "wlb_max_step_tokens", "wlb_queue_thresholds",
    }  # fmt: skip
    for setting, packings in said.items():
        read = {packing for packing in PACKINGS if reads(packing, names[setting])}
        assert read == packings, flag_of(setting)

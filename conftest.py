"""Tiers: a test's folder says what it needs, and the summary counts what each tier did.

Tests of studies stand beside them. Tests of the launcher are a tier wherever they stand.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path

import pytest
from helpers.gloo import GlooPool
from helpers.texts import write_texts
from hypothesis import settings

FOLDERS = {
    "unit": "tests/unit/",
    "distributed": "tests/distributed/",
    "integration": "tests/integration/",
    "gpu": "tests/gpu/",
    "evidence": "scripts/evidence/",
}
TIERS = ("unit", "distributed", "integration", "launcher", "gpu", "evidence")
CHECKOUT = os.environ.get("MEGATRON_LM_PATH")
OUTCOMES = {
    "passed": "passed",
    "failed": "failed",
    "error": "failed",
    "skipped": "skipped",
    "xfailed": "skipped",
}


# The same examples each time, however busy the machine is.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")
_POOL = pytest.StashKey[GlooPool]()


def _demand(word: str) -> tuple[str, int]:
    tier, _, number = word.partition(":")
    if tier not in TIERS or not number.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{word} is no TIER:NUMBER; the tiers are {', '.join(TIERS)}"
        )
    return tier, int(number)


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "fail if fewer tests of the tier run, or one is skipped that needs no checkout"
    parser.addoption("--must-run", type=_demand, metavar="TIER:NUMBER", help=said)
    said = "fail where what the ranks of a case ask could hang under NCCL's rules"
    parser.addoption("--nccl-rules", action="store_true", help=said)


def _folder(nodeid: str) -> str | None:
    """The tier of the folder that the test is in."""
    return next((tier for tier, folder in FOLDERS.items() if nodeid.startswith(folder)), None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "unit: runs in the process of pytest")
    if CHECKOUT and not Path(CHECKOUT, "pretrain_gpt.py").is_file():
        raise pytest.UsageError(
            f"MEGATRON_LM_PATH {CHECKOUT} has no pretrain_gpt.py; give a checkout of Megatron-LM"
        )


def _builds_models() -> bool:
    """Whether Megatron's loop builds a GPT for the package's own script: from 0.19 on."""
    from megatron_wlb.runtime.compat.source import MegatronSource

    target = "megatron.training.argument_utils:gpt_config_from_args"
    return MegatronSource.installed().signature(target) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test with its folder; skips what needs a checkout or a GPU where there is none."""
    for item in items:
        if tier := _folder(item.nodeid):
            item.add_marker(tier)
        if config.getoption("--nccl-rules") and item.get_closest_marker("gloo_only"):
            item.add_marker(pytest.mark.skip(reason="what it asks is for gloo alone"))
        if not CHECKOUT and item.get_closest_marker("checkout"):
            item.add_marker(pytest.mark.skip(reason="MEGATRON_LM_PATH names no checkout"))
        if item.get_closest_marker("own_script") and not _builds_models():
            item.add_marker(pytest.mark.skip(reason="megatron-core is older than 0.19"))
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def gloo(pytestconfig: pytest.Config) -> Iterator[GlooPool]:
    """Worlds of gloo ranks: ``gloo.run(4, function, *args)``."""
    with GlooPool() as pool:
        pytestconfig.stash[_POOL] = pool
        if pytestconfig.getoption("--nccl-rules"):
            from helpers.nccl.record import hold_to_rules  # imports torch

            hold_to_rules(pool)
        yield pool


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents of 5 to 4,000 bytes, heavy-tailed, 100,000 in all; the same everywhere."""
    folder = tmp_path_factory.mktemp("corpus")
    return write_texts(folder / "texts", mean=4.9, spread=1.3, most=4000, seed=7)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the ranks with their tier: idle ones take a third of a core, looking for messages."""
    pool = item.config.stash.get(_POOL, None)
    if (
        pool is not None
        and nextitem is not None
        and _folder(item.nodeid) != _folder(nextitem.nodeid)
    ):
        pool.close()


def _keywords(report: pytest.TestReport | pytest.CollectReport) -> Container[str]:
    keywords: Container[str] = getattr(report, "keywords", ())
    return keywords


def _tier(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    return "launcher" if "launcher" in _keywords(report) else _folder(report.nodeid)


def _demanded(config: pytest.Config) -> tuple[str, bool]:
    """What ``--must-run`` asks and what ran, in words, and whether that is enough."""
    demand: tuple[str, int] | None = config.getoption("--must-run")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if demand is None or reporter is None:  # a worker of pytest-xdist has none
        return "", True
    tier, least = demand

    def count(*kinds: str, without: tuple[str, ...] = ()) -> int:
        reports = (report for kind in kinds for report in reporter.stats.get(kind, ()))
        return sum(
            _tier(r) == tier and not any(name in _keywords(r) for name in without) for r in reports
        )

    ran, skipped = count("passed", "failed"), count("skipped", without=("checkout", "own_script"))
    said = f"{ran} {tier} tests ran (at least {least} must), {skipped} were skipped that need "
    return f"{said}no checkout (none may be)", ran >= least and not skipped


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _demanded(session.config)[1]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Iterator[None]:
    """Per tier, behind all else: what passed, failed and was skipped, and why it was skipped."""
    yield
    counts = {tier: Counter[str]() for tier in TIERS}
    reasons = {tier: Counter[str]() for tier in TIERS}
    for category, outcome in OUTCOMES.items():
        for report in terminalreporter.stats.get(category, ()):
            tier = _tier(report)
            if tier is None:
                continue
            counts[tier][outcome] += 1
            if outcome == "skipped":
                xfail = getattr(report, "wasxfail", None)
                reason = report.longrepr[2] if xfail is None else f"known to fail: {xfail}"
                reasons[tier][reason.removeprefix("Skipped: ")] += 1

    terminalreporter.section("tiers")
    for tier in TIERS:
        said = (
            f"{counts[tier][outcome]:5d} {outcome}" for outcome in ("passed", "failed", "skipped")
        )
        terminalreporter.line(f"{tier:12s}" + "  ".join(said))
        for reason, number in reasons[tier].most_common():
            terminalreporter.line(f"{'':12s}{number:5d} skipped: {reason}")
    said, enough = _demanded(config)
    if said:
        terminalreporter.line(said if enough else f"ERROR: {said}", green=enough, red=not enough)

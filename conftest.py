"""Tiers: a test's folder says what it needs, and the summary counts what each tier did.

Tests of studies stand beside them. Tests of the launcher, which need a checkout of Megatron-LM, are
a tier of their own wherever they stand.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--must-run", choices=TIERS, help="fail if no test of this tier runs")
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test with its folder; skips what needs a checkout or a GPU where there is none."""
    for item in items:
        if tier := _folder(item.nodeid):
            item.add_marker(tier)
        if config.getoption("--nccl-rules") and item.get_closest_marker("gloo_only"):
            item.add_marker(pytest.mark.skip(reason="what it asks is for gloo alone"))
        if not CHECKOUT and item.get_closest_marker("checkout"):
            item.add_marker(pytest.mark.skip(reason="MEGATRON_LM_PATH names no checkout"))
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


def _tier(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    if "launcher" in getattr(report, "keywords", ()):
        return "launcher"
    return _folder(report.nodeid)


def _missing(config: pytest.Config) -> str:
    """The tier of ``--must-run``, if nothing of it ran."""
    tier: str = config.getoption("--must-run")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not tier or reporter is None:  # a worker of pytest-xdist has none
        return ""
    ran = (report for kind in ("passed", "failed") for report in reporter.stats.get(kind, ()))
    return "" if any(_tier(report) == tier for report in ran) else tier


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _missing(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Per tier: what passed, failed and was skipped, and why it was skipped."""
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
    if tier := _missing(config):
        terminalreporter.line(f"ERROR: no test of the tier {tier} ran", red=True)

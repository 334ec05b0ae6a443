"""Tiers: a test's folder says what it needs, and the summary counts what each tier did."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.gloo import GlooPool

from megatron_wlb.data.corpus import build_corpus

TESTS = Path(__file__).parent
TIERS = ("unit", "distributed", "integration", "gpu", "evidence")
OUTCOMES = {
    "passed": "passed",
    "failed": "failed",
    "error": "failed",
    "skipped": "skipped",
    "xfailed": "skipped",
}


_POOL = pytest.StashKey[GlooPool]()


def _tier(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "unit: runs in the process of pytest")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each test with its tier; skips the ``gpu`` tier where there is no GPU."""
    for item in items:
        item.add_marker(_tier(item))
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
        yield pool


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents of 5 to 4,000 bytes, heavy-tailed, 100,000 in all; the same everywhere."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = np.random.RandomState(7)
    with (folder / "texts.jsonl").open("w") as stream:
        for length in np.clip(generator.lognormal(4.9, 1.3, 300), 5, 4000).astype(int):
            words = generator.choice(["ab", "cde", "fgh ", "the ", "sun ", "x. "], length)
            stream.write(json.dumps({"text": "".join(words)[:length]}) + "\n")
    build_corpus([folder / "texts.jsonl"], folder / "texts")
    return folder / "texts"


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the ranks with their tier: idle ones take a third of a core, looking for messages."""
    pool = item.config.stash.get(_POOL, None)
    if pool is not None and nextitem is not None and _tier(item) != _tier(nextitem):
        pool.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Per tier: what passed, failed and was skipped, and why it was skipped."""
    counts = {tier: Counter[str]() for tier in TIERS}
    reasons = {tier: Counter[str]() for tier in TIERS}
    for category, outcome in OUTCOMES.items():
        for report in terminalreporter.stats.get(category, ()):
            tier = next((tier for tier in TIERS if f"tests/{tier}/" in report.nodeid), None)
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

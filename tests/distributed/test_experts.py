"""Routers of other kinds, and what is counted while passes are timed.

That experts over ranks compute what one process does is in ``test_oracle.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import WORKLOAD, Layout
from helpers.ranks import build_runner
from helpers.within import experts_of

from megatron_wlb.errors import CompatibilityError

EP2 = Layout("moe-seq", 3, dp=2, ep=2)


def build_with_another_router(config: Any) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_wlb.runtime.gpt.moe import DocumentMoELayer, route_by_document

    runner = build_runner(config, WORKLOAD)
    (gpt,) = runner.model.gpts
    for layer in gpt.decoder.layers:
        if isinstance(layer.mlp, DocumentMoELayer):
            layer.mlp.__class__ = DocumentMoELayer.__base__
            layer.mlp.router.__class__ = type("OwnRouter", (TopKRouter,), {})
    route_by_document(gpt)


def test_a_router_of_another_kind_is_refused(gloo: GlooPool) -> None:
    with pytest.raises(CompatibilityError, match="has a OwnRouter in place of Megatron's TopKRou"):
        gloo.run(1, build_with_another_router, Layout("moe-aux", 1).config)


def counted_while_measuring(config: Any) -> float:
    """What routers count while passes are timed: in biases, losses and their log."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    from megatron_wlb.runtime.measuring.measure import run_passes

    runner = build_runner(config, WORKLOAD)
    tracker = get_moe_metrics_tracker().metrics
    tracker.clear()
    assert min(run_passes(runner.model, [5, 11], WORKLOAD.vocab_size)) > 0
    logged = sum(float(one.values.abs().sum()) for one in tracker.values())
    tracker.clear()
    routers = [moe.router for moe in experts_of(runner)]
    assert routers
    return logged + sum(float(router.local_tokens_per_expert.sum()) for router in routers)


def test_timed_passes_count_no_token(gloo: GlooPool) -> None:
    assert gloo.run(2, counted_while_measuring, EP2.config) == [0.0, 0.0]

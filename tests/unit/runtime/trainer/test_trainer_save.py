"""A trainer's checkpoint comes after what it stands for is on disk."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_wlb.runtime.trainer import loop
from megatron_wlb.runtime.trainer.loop import Trainer
from megatron_wlb.settings.config import Config


def test_ledger_is_on_disk_before_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def save(*_: Any) -> Path:
        done.append("checkpoint")
        return Path("iter_0000003")

    monkeypatch.setattr(loop.checkpoint, "save", save)
    trainer: Any = Trainer.__new__(Trainer)
    trainer.config, trainer.iteration, trainer.kernel = Config(), 3, "torch"
    trainer.ledger = SimpleNamespace(sync=lambda: done.append("ledger"))
    trainer.plans = SimpleNamespace(state_dict=dict)
    trainer.corpora = SimpleNamespace(samples=())
    trainer.model = SimpleNamespace(whole_weights=contextlib.nullcontext)
    trainer.cost = SimpleNamespace(as_dict=dict)
    trainer.runner = SimpleNamespace(compare_reads=lambda: done.append("reads"))
    trainer.run = trainer.optimizer = trainer.scheduler = None
    trainer.save()
    assert done == ["reads", "ledger", "checkpoint"]

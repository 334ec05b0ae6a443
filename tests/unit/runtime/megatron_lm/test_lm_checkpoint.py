"""What surrounds Megatron's own save."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock


def test_checkpoint_comes_behind_the_figures_of_its_steps() -> None:
    """A run that goes on from it would never write them."""
    from megatron_wlb.runtime.megatron_lm import checkpoint

    done: list[str] = []
    session: Any = SimpleNamespace(
        args=SimpleNamespace(save="ck", ckpt_format="torch"),
        config=SimpleNamespace(wlb=SimpleNamespace(wlb_no_checksums=True)),
        model=SimpleNamespace(groups=SimpleNamespace(dp_cp=None)),
        state=dict,
        catch_up=lambda: done.append("figures"),
    )
    with (
        mock.patch.object(checkpoint, "rng_state", dict),
        mock.patch.object(checkpoint, "of_all_ranks", lambda rng, _: [rng]),
    ):
        checkpoint.Hooks(session).save_checkpoint(lambda _: done.append("checkpoint"), 2)
    assert done == ["figures", "checkpoint"]

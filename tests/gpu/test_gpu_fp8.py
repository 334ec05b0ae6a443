"""FP8 on one GPU: products take the rows that plans give them, and steps train as in bf16.

This file is also the program that the tests run, one process a time:
``torchrun … test_gpu_fp8.py RESULT RECIPE ROWS [trainer's flags]``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu_smoke import corpus, torchrun  # noqa: F401  # a fixture

from megatron_wlb.cost.fp8 import ROWS, row_multiple

RECIPES = ["delayed", "tensorwise", "blockwise", "mxfp8"]
NUM_STEPS = 6
FLAGS = (
    "--wlb-device cuda --bf16 --transformer-impl transformer_engine --hidden-size 128 "
    "--num-layers 2 --seq-length 512 --global-batch-size 4 --lr 0.001 --wlb-packing hold"
)


def scaling(recipe: str) -> Any:
    """TransformerEngine's description of a recipe; skips where it or the GPU has none."""
    pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as Manager

    available, reason = Manager.is_fp8_available()
    if available and recipe == "mxfp8":
        available, reason = Manager.is_mxfp8_available()
    if available and recipe == "blockwise":
        available, reason = Manager.is_fp8_block_scaling_available()
    if not available:
        pytest.skip(f"{recipe}: {reason}")
    names = {
        "delayed": "DelayedScaling",
        "tensorwise": "Float8CurrentScaling",
        "blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
    }
    return getattr(recipes, names[recipe])()


@pytest.mark.parametrize("recipe", RECIPES)
def test_gpu_products_take_each_multiple_of_their_rows(recipe: str) -> None:
    described = scaling(recipe)
    import transformer_engine.pytorch as te

    torch.manual_seed(5)
    layer = te.Linear(256, 384, params_dtype=torch.bfloat16)
    for multiples in (1, 3, 7):
        num_tokens = multiples * row_multiple(recipe, spread=False)
        x = torch.randn(num_tokens, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
        grad = torch.randn(num_tokens, 384, device="cuda", dtype=torch.bfloat16)
        found = []
        for enabled in (False, True):
            x.grad = layer.weight.grad = None
            for _ in range(2):  # delayed scaling has its scales from the pass before
                x.grad = layer.weight.grad = None
                with te.fp8_autocast(enabled=enabled, fp8_recipe=described):
                    out = layer(x)
                out.backward(grad)
            assert x.grad is not None and layer.weight.grad is not None
            found.append([t.detach().float() for t in (out, x.grad, layer.weight.grad)])
        for exact, rounded in zip(*found, strict=True):
            error = float((rounded - exact).norm() / exact.norm())
            # Three bits of mantissa: 4 % a number in the mean, of both factors. Not 0: it is FP8.
            assert 1e-4 < error < 0.1, (recipe, num_tokens, error)


def test_gpu_products_refuse_what_is_no_row() -> None:
    described = scaling("delayed")
    import transformer_engine.pytorch as te

    layer = te.Linear(256, 384, params_dtype=torch.bfloat16)
    for num_tokens in (8 + 1, 4):
        x = torch.randn(num_tokens, 256, device="cuda", dtype=torch.bfloat16)
        with te.fp8_autocast(enabled=True, fp8_recipe=described), pytest.raises(AssertionError):
            layer(x)


def run(result: Path, recipe: str, rows: str, argv: Sequence[str]) -> None:
    """Trains some steps, in FP8 by ``recipe`` or, if that is bf16, in none; writes the losses.

    Lengths are those of the recipe ``rows``.
    """
    from megatron_wlb.runtime.trainer import distributed
    from megatron_wlb.settings.command_line import parse

    config = parse(argv)
    device = distributed.choose_device(config.wlb.wlb_device)
    distributed.initialize(config, device)
    from megatron_wlb.runtime.gpt import build
    from megatron_wlb.runtime.trainer.trainer import Trainer

    make = build.transformer_config

    def in_fp8(settings: Any) -> Any:
        core = make(settings)
        core.fp8, core.fp8_recipe = "hybrid", recipe
        return core

    if recipe != "bf16":
        build.transformer_config = in_fp8
    training = replace(config.training, fp8_format="hybrid", fp8_recipe=rows)
    trainer = Trainer(replace(config, training=training), device)
    losses, lengths, padding = [], [], 0
    for _ in range(NUM_STEPS):
        plan = trainer.planner.next_plan()
        assert plan is not None
        lengths += [m.padded_length for m in plan]
        padding += plan.padding_tokens
        losses.append(trainer.step(plan)[0].mean)
    if torch.distributed.get_rank() == 0:
        result.write_text(json.dumps([losses, lengths, padding]))
    distributed.shutdown()


def train(
    folder: Path, prefix: Path, recipe: str, rows: str, *flags: str
) -> tuple[list[float], list[int], int]:
    """Losses, lengths of micro-batches and tokens of padding of a run in a process of its own."""
    result = folder / f"{recipe} {rows}"
    argv = [str(result), recipe, rows, *FLAGS.split(), "--data-path", str(prefix), *flags]
    torchrun(__file__, folder, *argv)
    losses, lengths, padding = json.loads(result.read_text())
    return losses, lengths, padding


@pytest.mark.parametrize(
    ("recipe", "packing"),
    [("delayed", "hold"), ("tensorwise", "slim"), ("blockwise", "slim"), ("mxfp8", "hold")],
)
def test_gpu_trains_in_fp8_as_in_bf16(
    tmp_path: Path,
    corpus: Path,  # noqa: F811
    recipe: str,
    packing: str,
) -> None:
    scaling(recipe)
    flags = ["--wlb-packing", packing]
    exact, lengths, padding = train(tmp_path, corpus, "bf16", recipe, *flags)
    losses, same, _ = train(tmp_path, corpus, recipe, recipe, *flags)
    assert same == lengths and padding and len(set(lengths)) > 3
    assert all(length % ROWS[recipe].whole == 0 for length in lengths)
    assert exact[-1] < exact[0] - 0.3
    # Weights of the last step count: a cache of the first one's would give another loss.
    assert losses != exact and losses == pytest.approx(exact, abs=0.1)


def test_gpu_padding_changes_no_loss_in_fp8(tmp_path: Path, corpus: Path) -> None:  # noqa: F811
    scaling("tensorwise")
    short, _, less = train(tmp_path, corpus, "tensorwise", "tensorwise")
    long, _, more = train(tmp_path, corpus, "tensorwise", "custom")
    assert more > 2 * less
    # Padding may have the largest number, which moves the scale of a tensor: other roundings.
    assert long == pytest.approx(short, abs=0.02)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])

"""FP8 on one GPU: products take the rows that plans give them, and steps train as in bf16.

This file is also a program: the launcher, whose FP8 needs lengths of another recipe,
``torchrun … test_gpu_fp8.py RECIPE ROWS [flags]``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pretrain import FUSED, torchrun
from test_gpu_smoke import FLAGS as SMOKE
from test_gpu_smoke import corpus  # noqa: F401  # a fixture

from megatron_wlb.cost import fp8
from megatron_wlb.cost.fp8 import ROWS, row_multiple

RECIPES = ["delayed", "tensorwise", "blockwise", "mxfp8"]
FLAGS = f"{SMOKE} {FUSED} --bf16 --num-layers 2 --hidden-size 128 --lr 0.001"


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


def train(
    folder: Path, prefix: Path, recipe: str, packing: str, rows: str | None = None
) -> list[dict[str, float]]:
    """The steps of a launched run, in FP8 by ``recipe`` or, if that is bf16, in none.

    Lengths are those of the recipe ``rows``.
    """
    name = f"{recipe}-{rows}"
    words = f"{FLAGS} --data-path {prefix} --wlb-packing {packing} --wlb-metrics {name}"
    words += "" if recipe == "bf16" else f" --fp8-format hybrid --fp8-recipe {recipe}"
    torchrun(folder, [__file__, recipe, rows or recipe, *words.split()])
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def losses(steps: list[dict[str, float]]) -> list[float]:
    return [step["loss"] for step in steps]


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
    exact = train(tmp_path, corpus, "bf16", packing)
    found = train(tmp_path, corpus, recipe, packing)
    lengths = [step["tokens"] + step["padding"] for step in found]
    assert any(step["padding"] for step in found) and len(set(lengths)) > 3
    assert all(length % ROWS[recipe].whole == 0 for length in lengths)
    assert losses(exact)[-1] < losses(exact)[0] - 0.3
    # Weights of the last step count: a cache of the first one's would give another loss.
    assert losses(found) != losses(exact) and losses(found) == pytest.approx(losses(exact), abs=0.1)


def test_gpu_padding_changes_no_loss_in_fp8(tmp_path: Path, corpus: Path) -> None:  # noqa: F811
    scaling("tensorwise")
    short = train(tmp_path, corpus, "tensorwise", "hold")
    long = train(tmp_path, corpus, "tensorwise", "hold", "custom")
    assert sum(s["padding"] for s in long) > 2 * sum(s["padding"] for s in short)
    # Padding may have the largest number, which moves the scale of a tensor: other roundings.
    assert losses(long) == pytest.approx(losses(short), abs=0.02)


def main(recipe: str, rows: str, flags: list[str]) -> int:
    from megatron_wlb import launch

    fp8.ROWS = dict(fp8.ROWS) | ({} if recipe == "bf16" else {recipe: fp8.ROWS[rows]})
    return launch.main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))

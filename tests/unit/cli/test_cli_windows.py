"""Commands that predict know sliding windows, from settings, recipes and files of sizes."""

from __future__ import annotations

from pathlib import Path

MODEL = "num_layers: 8\nhidden_size: 1024\nnum_attention_heads: 8\nbf16: true\n"
RECIPE = """\
ENV_VARS:
  GPUS_PER_NODE: 4
MODEL_ARGS:
  --num-layers: 8
  --hidden-size: 1024
  --num-attention-heads: 8
  --seq-length: 32768
  --max-position-embeddings: 32768
  --micro-batch-size: 1
  --eval-interval: 1000
  --train-iters: 10
  --lr: 1.0e-4
  --global-batch-size: 8
  --position-embedding-type: rope
  --context-parallel-size: 2
  --bf16: true
  --data-path: corpus
  --wlb-packing: hold
"""


def files(text: str, *windows: str) -> list[Path]:
    paths = [Path(f"{number}.yaml") for number in range(len(windows))]
    for path, window in zip(paths, windows, strict=True):
        path.write_text(text + window)
    return paths


def test_dry_run_of_a_recipe_with_windows_is_faster(wlb, dry_runs) -> None:
    every = "  --window-size: (511,0)\n"
    some = f"{every}  --window-attn-skip-freq: ([1]*3+[0])*2\n"
    paths = files(RECIPE, "", some, every)
    steps_ms = [wlb.json("recipe run", path, "--dry-run")["step_ms"] for path in paths]
    assert steps_ms[0] > 1.02 * steps_ms[1] > 1.02 * steps_ms[2]
    error = wlb.refusal("recipe run", paths[1], "--dry-run -- --window-size 511,3")
    assert "--window-size is 511,3; give W,0" in error


def test_simulated_step_with_windows_is_faster(wlb) -> None:
    windows = "window_size: 511,0\nwindow_attn_skip_freq: 4\n", "window_size: 511,0\n"
    words = (
        "simulate --distribution reference --window 32768 --cp-size 2 --num-micro-batches 4 "
        "--steps 2 --num-seeds 1 --packing hold --sharding adaptive --model"
    )
    rows = [wlb.json(words, path)["rows"] for path in files(MODEL, "", *windows)]
    speeds = [own[-1]["tokens_per_s"] for own in rows]
    assert sorted(speeds) == speeds and speeds[-1] > 1.03 * speeds[0]


def test_packing_of_a_model_with_windows_is_balanced_by_them(wlb) -> None:
    """Fixed windows of tokens are more even, as work is nearly that of tokens."""
    words = (
        "pack --distribution reference --window 32768 --packing original --num-micro-batches 4 "
        "--steps 20 --model"
    )
    plain, windowed = (
        wlb.json(words, path)["rows"][0]["imbalance_mean"]
        for path in files(MODEL, "", "window_size: 511,0\n")
    )
    assert windowed - 1 < 0.5 * (plain - 1)

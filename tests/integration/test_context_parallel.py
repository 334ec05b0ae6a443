"""The trainer trains the same under context parallelism, and says what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.layouts import some_of
from trainer_runs import (
    TINY,
    Flags,
    Run,
    assert_refused,
    finish,
    losses,
    read_metrics,
    start,
    torchrun,
)

from megatron_wlb.errors import CompatibilityError, ConfigError

CP2: Flags = {"context_parallel_size": 2}
SHARDING = {"original": "per-sequence", "wlb": "per-document", "hold": "adaptive"}


def train(
    folder: Path, num_processes: int, flags: Flags, starter: Callable[..., Run] = start
) -> tuple[list[float], list[int], str]:
    """Losses and tokens of the steps, and what was printed."""
    metrics = folder / f"metrics-{len(list(folder.iterdir()))}"
    finished = finish(starter(folder, num_processes, flags | {"wlb_metrics": metrics}))
    tokens = [line["tokens"] for line in read_metrics(metrics) if "tokens" in line]
    return list(losses(metrics).values()), tokens, finished.output


@pytest.mark.parametrize("packing", some_of(SHARDING))
def test_context_parallel_run_has_the_losses_of_one_process(
    packing: str, tmp_path: Path, corpus: Path
) -> None:
    """To rounding, over steps of training; `hold` under torchrun."""
    flags = TINY | {"data_path": corpus, "wlb_packing": packing, "lr": 1e-2, "train_iters": 6}
    # A cost that does not know of CP: plans are the same.
    (tmp_path / "cost.json").write_text(
        '{"forward_linear_us": 1.0, "forward_quadratic_us": 0.004, '
        '"backward_linear_us": 2.0, "backward_quadratic_us": 0.01}'
    )
    flags |= {"wlb_cost": "cost.json"}
    expected, tokens, _ = train(tmp_path, 1, flags)
    context = CP2 | {"wlb_cp_sharding": SHARDING[packing], "wlb_verify_shapes": True}
    found, context_tokens, output = train(
        tmp_path, 2, flags | context, torchrun if packing == "hold" else start
    )
    assert context_tokens == tokens
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0] - 0.3
    assert (
        output.count("attention kernel: torch-cpu (cpu, float32, 2 query and 2 key/value heads")
        == 1
    )


def test_context_parallel_run_measures_its_cost_and_evaluates(tmp_path: Path, corpus: Path) -> None:
    flags = TINY | CP2 | {"data_path": corpus, "split": "70,30", "eval_interval": 2}
    flags |= {"wlb_cost": "measured", "pipeline_model_parallel_size": 2}
    flags |= {"recompute_granularity": "selective", "bf16": True}
    flags |= {"seq_length": 2048}  # Times must grow with it on a machine that is busy, too.
    found, _, output = train(tmp_path, 4, flags)
    assert len(found) == 4 and all(0 < loss < 10 for loss in found)
    assert "measured cost" in output and "validation after iteration 4" in output
    # Documents for validation are planned once, not at each evaluation.
    assert output.count("CP shardings are chosen") == 2


@pytest.mark.parametrize(
    ("flags", "error", "fragments"),
    [
        (
            {"wlb_attention_kernel": "flash-attn-2"},
            CompatibilityError,
            ["--wlb-attention-kernel flash-attn-2 cannot run", "it needs a GPU", "leave it at"],
        ),
        (
            {"wlb_cp_overlap_groups": 3},
            ConfigError,
            ["--wlb-cp-overlap-groups is 3", "the 2 key/value heads", "use a divisor"],
        ),
        (
            {"transformer_impl": "transformer_engine"},
            CompatibilityError,
            ["--transformer-impl is transformer_engine", "cannot be imported", "install"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_attention_cannot_do_is_refused(
    flags: Flags, error: type, fragments: list[str], tmp_path: Path, corpus: Path
) -> None:
    finished = start(tmp_path, 2, TINY | CP2 | flags | {"data_path": corpus}).wait()
    assert_refused(finished, error.exit_code, *fragments)

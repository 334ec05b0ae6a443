"""What a rank holds of a model, and the comparison with the oracle: that it misses nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers.oracle import OracleRun, OracleStep
from helpers.shards import Held, RankRun, differences

WHOLE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.full(2, 5.0, np.float32)}
TINY = OracleRun(WHOLE, (OracleStep(2.0, WHOLE),), WHOLE)


def perfect_ranks() -> list[RankRun]:
    """Two ranks: columns 0 and 1-2 of ``a``, and all of ``b`` on both."""
    runs = []
    for columns in (slice(0, 1), slice(1, 3)):
        indices = np.arange(6).reshape(2, 3)[:, columns]
        held = (Held("a", indices), Held("b", np.arange(2)))
        arrays = (WHOLE["a"][:, columns].copy(), WHOLE["b"].copy())
        flat = tuple(array.reshape(-1).copy() for array in arrays)
        ranges = ((0, indices.size), (0, 2))
        runs.append(RankRun(held, (2.0,), (2.0,), (flat,), ranges, arrays))
    return runs


def test_differences_finds_none_in_equal_runs() -> None:
    assert differences(TINY, perfect_ranks()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": (2.00001,)}, "step 0: loss on rank 1: 2.00001000, not 2.00000000"),
        ({"losses": (float("nan"),)}, "step 0: loss on rank 1: nan"),
        ({"evaluated": (1.9,)}, "step 0: evaluated loss on rank 1: 1.9"),
        (
            {"gradients": ((np.float32([1, 2, 4, 5.001]), WHOLE["b"]),)},
            "step 0: gradient of a on rank 1: 1 of 4 elements differ, by up to 1.00e-03",
        ),
        (
            {"gradients": ((np.float32([1, 2, 4, np.nan]), WHOLE["b"]),)},
            "step 0: gradient of a on rank 1: 1 of 4 elements differ",
        ),
        (
            {
                "gradients": ((np.float32([2, 4]), WHOLE["b"]),),
                "gradient_ranges": ((1, 3), (0, 2)),
            },
            "step 0: gradient of a: 2 of 6 elements on no rank",
        ),
        (
            {"held": (Held("c", np.arange(4)), Held("b", np.arange(2)))},
            "step 0: gradient of c on rank 1: the oracle has no such parameter",
        ),
        ({"final": (np.float32([[1, 2], [4, 6]]), WHOLE["b"])}, "final a on rank 1: 1 of 4"),
    ],
)
def test_differences_names_what_differs(changes: dict[str, object], message: str) -> None:
    first, second = perfect_ranks()
    found = differences(TINY, [first, dataclasses.replace(second, **changes)])  # type: ignore[arg-type]
    assert any(line.startswith(message) for line in found), found


def test_differences_names_parameters_that_no_rank_holds() -> None:
    found = differences(TINY, perfect_ranks()[:1])
    assert found == [
        "step 0: gradient of a: 4 of 6 elements on no rank",
        "final a: 4 of 6 elements on no rank",
    ]

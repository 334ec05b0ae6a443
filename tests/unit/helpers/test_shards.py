"""What a rank holds of a model, and the comparison with the oracle: that it misses nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers.oracle import OracleRun, OracleStep
from helpers.shards import Held, RankRun, differences, shard, whole_name
from helpers.workload import make_workload, scatter

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


# Which part a rank holds.


@pytest.mark.parametrize(
    ("name", "tied", "expected"),
    [
        ("decoder.layers.0.mlp.linear_fc1.bias", True, "decoder.layers.6.mlp.linear_fc1.bias"),
        ("decoder.layers.11.a.layers.0.b", True, "decoder.layers.17.a.layers.0.b"),
        ("decoder.final_layernorm.weight", True, "decoder.final_layernorm.weight"),
        ("output_layer.weight", True, "embedding.word_embeddings.weight"),
        ("output_layer.weight", False, "output_layer.weight"),
    ],
)
def test_whole_name_counts_layers_over_chunks(name: str, tied: bool, expected: str) -> None:
    assert whole_name(name, 6, tied) == expected


def test_shard_divides_one_dimension_and_gated_halves() -> None:
    whole = np.arange(24).reshape(8, 3)
    assert shard(whole, "x.linear_qkv.weight", 0, 1, 2, True).tolist() == whole[4:].tolist()
    assert shard(whole, "x.linear_proj.weight", 1, 2, 3, True).tolist() == whole[:, 2:].tolist()
    assert shard(whole, "x.linear_fc1.weight", 0, 1, 2, False).tolist() == whole[4:].tolist()
    gate_and_up = whole[[2, 3, 6, 7]].tolist()  # gate is rows 0-3, up is rows 4-7
    assert shard(whole, "x.linear_fc1.weight", 0, 1, 2, True).tolist() == gate_and_up
    assert shard(whole, "x.layernorm.weight", None, 1, 2, True) is whole


# What is trained.


def test_examples_have_labels_up_to_the_end_of_the_stored_document() -> None:
    workload = make_workload([[4, (2, 1, 3)], [1]], vocab_size=50)
    first, second = (stored.tolist() for stored in workload.corpus.stored[:2])
    assert (len(first), len(second)) == (4, 6)
    examples = [(tokens.tolist(), labels.tolist()) for tokens, labels in workload.examples(0)]
    assert examples == [
        (first, [*first[1:], -1]),
        (second[:2], second[1:3]),
        (second[2:3], second[3:4]),
        (second[3:], [*second[4:], -1]),
    ]
    ((tokens, labels),) = workload.examples(1)
    assert (len(tokens), labels.tolist()) == (1, [-1])


def test_scatter_keeps_documents_and_is_the_same_each_time() -> None:
    workload = make_workload([list(range(1, 30))], vocab_size=50)
    plan = scatter(0, workload.steps[0], dp_size=2, num_micro_batches=3, multiple=4)
    assert plan == scatter(0, workload.steps[0], dp_size=2, num_micro_batches=3, multiple=4)
    assert sorted(d.number for d in plan.documents) == list(range(29))
    assert [len(rank) for rank in plan.micro_batches] == [3, 3]
    assert [m.length == 0 for m in plan] == [False, False, False, False, True, False]
    assert all(m.padded_length % 4 == 0 and m.padded_length >= max(m.length, 4) for m in plan)
    assert len({len(m.spans) for m in plan}) > 1

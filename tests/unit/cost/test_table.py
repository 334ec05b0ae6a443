import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost import ModelShape, ProfiledCost, read_cost_file
from megatron_wlb.cost.table import Curve, Row, model_identity
from megatron_wlb.errors import ConfigError

SHAPE = ModelShape(64, 256, 4, 4, 2, 16, 512, False)
LENGTHS = (64, 256, 1024, 4096)


def tables(
    lengths: tuple[int, ...] = LENGTHS, *, constant_us: float = 0.0, extrapolate: bool = False
) -> ProfiledCost:
    """Attention grows with the square, the rest with the length; backward is dearer."""
    return ProfiledCost(
        model_identity(SHAPE),
        tp_size=2,
        cp_size=1,
        attention=tuple(Row(d, 1e-4 * d * d, 2.5e-4 * d * d) for d in lengths),
        linear=tuple(Row(d, 0.1 * d + constant_us, 0.2 * d + constant_us) for d in lengths),
        machine="a table",
        extrapolate=extrapolate,
    )


def test_lengths_between_follow_the_law_between() -> None:
    work = tables().work([700, 90])
    assert work.forward_attention_us == pytest.approx(1e-4 * (700**2 + 90**2))
    assert work.forward_linear_us == pytest.approx(0.1 * 790)
    # Below the first row it is proportional.
    assert tables().work([16]).forward_attention_us == pytest.approx(1e-4 * 64**2 / 4)


def test_linear_work_is_of_the_micro_batch_and_attention_of_documents() -> None:
    cost = tables()
    whole, parts = cost.work([1000]), cost.work([600, 400])
    assert parts.forward_linear_us == whole.forward_linear_us
    assert parts.forward_attention_us == pytest.approx(0.52 * whole.forward_attention_us)
    assert cost.total_us(iter([600, 400])) == parts.total_us
    assert cost.total_us([]) == 0


def test_document_cost_leaves_out_what_each_micro_batch_takes() -> None:
    cost = tables(constant_us=50)
    for length in (3, 64, 700, 4096):
        exact = 3.5e-4 * length**2 + 0.3 * length
        assert cost.document_us(length) == pytest.approx(exact, rel=1e-6 if length >= 64 else 0.1)
    assert cost.total_us([4096]) == pytest.approx(cost.document_us(4096) + 100)
    one_row = tables((64,))
    assert one_row.document_us(32) == pytest.approx(3.5e-4 * 64**2 / 2 + 0.3 * 32)


def test_table_refuses_to_go_beyond_its_end() -> None:
    cost = tables()
    with pytest.raises(ConfigError, match="attention forward ends at 4096 tokens, but 4097"):
        cost.document_us(4097)
    with pytest.raises(ConfigError, match="linear forward ends at 4096 tokens, but 4100 were"):
        cost.total_us([4000, 100])


def test_table_goes_beyond_its_end_when_told_to() -> None:
    cost = tables(extrapolate=True)
    work = cost.work([8192])
    assert work.forward_attention_us == pytest.approx(1e-4 * 8192**2)
    assert work.backward_linear_us == pytest.approx(0.2 * 8192)
    one_row = tables((64,), extrapolate=True)
    assert one_row.work([128]).forward_linear_us == pytest.approx(0.1 * 128)


@settings(max_examples=100)
@given(
    points=st.lists(
        st.tuples(st.integers(1, 5000), st.floats(0.1, 1e6)), min_size=1, unique_by=lambda p: p[0]
    )
)
def test_curve_never_falls(points: list[tuple[int, float]]) -> None:
    try:
        curve = Curve.through("x", points)
    except ConfigError as error:
        assert "but fewer take" in str(error)
        return
    longest = max(tokens for tokens, _ in points)
    times_us = [curve(d) for d in range(1, longest + 1, max(1, longest // 200))]
    assert all(0 < a <= b * (1 + 1e-12) for a, b in pairwise(times_us))
    for tokens, us in points:
        assert us * (1 - 1e-9) <= curve(tokens) <= us / 0.9


def test_noise_is_levelled_and_more_is_refused() -> None:
    curve = Curve.through("x", [(1, 10.0), (2, 9.5), (4, 20.0)])
    assert [curve(1), curve(2), curve(4)] == pytest.approx([10, 10, 20])
    with pytest.raises(ConfigError, match=r"2 tokens take 8\.5 µs, but fewer take 10; measure"):
        Curve.through("x", [(1, 10.0), (2, 8.5), (4, 20.0)])


@pytest.mark.parametrize(
    ("points", "complaint"),
    [
        ([], "no rows"),
        ([(0, 1.0)], "tokens is 0; give at least 1"),
        ([(1, 0.0)], "µs for 1 tokens is 0.0; give at least"),
        ([(1, float("nan"))], "µs for 1 tokens is nan"),
        ([(2, 1.0), (2, 2.0)], "2 tokens appear twice"),
    ],
)
def test_curve_refuses_what_is_no_measurement(
    points: list[tuple[int, float]], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Curve.through("x", points)


def test_check_accepts_the_measured_model_and_refuses_others() -> None:
    cost = tables()
    cost.check(SHAPE, tp_size=2, cp_size=1)
    other = ModelShape(64, 256, 6, 4, 2, 16, 512, False)
    with pytest.raises(ConfigError, match="for a model with num_layers 4, but this one has 6"):
        cost.check(other, 2, 1)
    with pytest.raises(ConfigError, match="with TP 2 and CP 1, but this run has TP 1 and CP 1"):
        cost.check(SHAPE, 1, 1)


def test_tables_survive_json() -> None:
    cost = tables(constant_us=3)
    again = ProfiledCost.from_dict(json.loads(json.dumps(cost.as_dict())))
    assert again == cost
    assert again.total_us([70, 900]) == cost.total_us([70, 900])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"atention": []}, "unknown entry atention; use attention"),
        ({"attention": None}, "cost table: attention is missing"),
        ({"attention": []}, "attention forward: no rows"),
        ({"attention": [[1, 2]]}, "attention has \\[1, 2\\]; give"),
        ({"linear": [{"tokens": 1, "forward_us": "slow", "backward_us": 1}]}, "slow"),
        ({"linear": 3}, "linear is 3; give a list"),
    ],
)
def test_bad_tables_are_refused(change: dict, complaint: str) -> None:
    values = {k: v for k, v in (tables().as_dict() | change).items() if v is not None}
    with pytest.raises(ConfigError, match=complaint):
        ProfiledCost.from_dict(values)


def test_files_are_json_or_yaml(tmp_path) -> None:
    (tmp_path / "a.json").write_text('{"linear": [[1, 2, 3]]}')
    (tmp_path / "a.yaml").write_text("linear: [[1, 2, 3]]")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bad.yaml").write_text("a: [")
    assert read_cost_file(tmp_path / "a.json") == read_cost_file(tmp_path / "a.yaml")
    for name in ("list.json", "bad.yaml", "none.json"):
        with pytest.raises(ConfigError, match=name):
            read_cost_file(tmp_path / name)

import json
import math

import pytest

from megatron_wlb.cost import DocumentCost, ProfiledCost, cost_from_dict
from megatron_wlb.cost.table import Row
from megatron_wlb.errors import ConfigError

COST = DocumentCost(2.0, 0.5, 3.0, 1.25, micro_batch_us=7.0)


def test_document_cost_is_linear_plus_quadratic_in_each_pass() -> None:
    assert COST.forward_us(4) == 2 * 4 + 0.5 * 16
    assert COST.backward_us(4) == 3 * 4 + 1.25 * 16
    assert COST.document_us(4) == COST.forward_us(4) + COST.backward_us(4)


def test_total_adds_what_every_micro_batch_takes_once() -> None:
    assert COST.total_us([4, 1]) == 7 + COST.document_us(4) + COST.document_us(1)
    assert COST.total_us([]) == 7
    assert COST.total_us(iter([4])) == 7 + COST.document_us(4)


def test_stored_cost_comes_back_as_what_it_was() -> None:
    rows = (Row(8, 1.0, 2.0), Row(64, 9.0, 17.0))
    tables = ProfiledCost({"hidden_size": 3}, 1, 1, rows, rows[:1])
    for cost in (COST, tables):
        assert cost_from_dict(json.loads(json.dumps(cost.as_dict()))) == cost


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"forward_linear_us": -1.0}, "forward_linear_us is -1.0; give at least 0"),
        ({"backward_quadratic_us": math.nan}, "backward_quadratic_us is nan"),
        ({"micro_batch_us": math.inf}, "micro_batch_us is inf"),
        ({"forward_linear_us": "2"}, "forward_linear_us is '2'; give a number"),
        ({"forward_linear": 2.0}, "unknown entry forward_linear; use forward_linear_us"),
        ({"backward_linear_us": None}, "backward_linear_us is missing"),
        (dict.fromkeys(COST.as_dict(), 0.0), "all coefficients are 0"),
    ],
)
def test_document_cost_refuses_bad_coefficients(change: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        values = COST.as_dict() | change
        DocumentCost.from_dict({name: us for name, us in values.items() if us is not None})

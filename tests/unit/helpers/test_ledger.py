import numpy as np
import pytest
from helpers.ledger import Ledger
from helpers.strategies import documents


def test_ledger_refuses_pieces_that_overlap_though_their_sum_is_right():
    (document,) = documents([9])
    head, _ = document.cut(4, 1)
    overlapping, _ = document.cut(3, 1)[1].cut(2, 1)
    _, tail = document.cut(6, 1)
    ledger = Ledger(np.array([9]))
    ledger.run([head, overlapping])
    with pytest.raises(AssertionError, match="does not begin at 4"):
        ledger.run([tail])

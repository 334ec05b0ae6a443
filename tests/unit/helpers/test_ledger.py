import numpy as np
import pytest
from helpers.ledger import Ledger
from helpers.strategies import documents


def test_ledger_counts_what_has_not_run():
    first, second, third = documents([7, 5, 9])
    ledger = Ledger(np.array([7, 5, 9]))
    head, tail = third.cut(4, 1)
    ledger.run([tail, second])
    assert (ledger.num_documents, ledger.num_tokens, ledger.lost_tokens) == (2, 10, 11)
    ledger.run([head, first])
    assert (ledger.num_documents, ledger.num_tokens, ledger.lost_tokens) == (4, 21, 0)


def test_ledger_refuses_tokens_that_run_twice():
    first, second = documents([7, 5])
    ledger = Ledger(np.array([7, 5]))
    ledger.run([first])
    with pytest.raises(AssertionError, match="runs tokens twice"):
        ledger.run([second, first])


def test_ledger_refuses_pieces_that_overlap_though_their_sum_is_right():
    (document,) = documents([9])
    head, _ = document.cut(4, 1)
    overlapping, _ = document.cut(3, 1)[1].cut(2, 1)
    _, tail = document.cut(6, 1)
    ledger = Ledger(np.array([9]))
    ledger.run([head, overlapping])
    with pytest.raises(AssertionError, match="does not begin at 4"):
        ledger.run([tail])

"""Which targets a loss of the user's own is given, and what it may not return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_wlb.errors import ConfigError, TrainingError
from megatron_wlb.plan import Document, MicroBatchPlan, RowRun, SharedUse, Sharing, Span
from megatron_wlb.runtime.stepping.losses import OwnLoss, load_loss

# A slice of tokens 3 to 6 of a piece that begins at 10, a whole document, and padding.
CUT = Document(0, 7, 10, 8, True, 0, 0, 0, ((14, 15, 1), (16, 17, 0.5), (17, 18, 2)))
WHOLE = Document(0, 4, 0, 3, True, 0, 1, 0)
PLAN = MicroBatchPlan(0, (Span(CUT, 3, 7), Span(WHOLE, 0, 3)), 10, 1.0)
WEIGHTS = np.array([1, 0, 0.5, 2, 1, 1, 0, 0, 0, 0], dtype=np.float32)
PLACES = [(7, 14), None, (7, 16), (7, 17), (4, 1), (4, 2)]


def seen(local: Any = slice(None)) -> tuple[OwnLoss, list[Any]]:
    """The loss of the ``local`` tokens, and the targets that its function was given."""
    given: list[Any] = []

    def note(log_probs: Any, targets: Any) -> Any:
        given.append((log_probs, targets))
        return -log_probs

    labels = np.arange(100, 110)[local]
    return OwnLoss.of(note, PLAN, local, labels), given


@pytest.mark.parametrize("local", [slice(None), np.array([0, 1, 8, 9]), np.array([2, 3, 4, 5])])
def test_function_sees_the_targets_of_the_rank_with_their_places(local: Any) -> None:
    own, given = seen(local)
    rows = [n for n in np.arange(10)[local].tolist() if WEIGHTS[n]]
    losses = torch.arange(10.0)[torch.from_numpy(np.arange(10)[local])][None]
    assert own.sum(losses).item() == sum(WEIGHTS[n] * n for n in rows)
    ((log_probs, targets),) = given
    assert log_probs.tolist() == [-n for n in rows]
    places = zip(targets.samples.tolist(), targets.positions.tolist(), strict=True)
    assert list(places) == [PLACES[n] for n in rows]
    assert targets.tokens.tolist() == [100 + n for n in rows]
    assert [targets.documents[n].number for n in targets.owners] == targets.samples.tolist()


def test_shared_token_is_a_target_of_each_sample() -> None:
    """With the weight and the label of each; under context parallelism where it is local."""
    first = Document(0, 0, 0, 6, True, 0, 0, 0, ((1, 6, 1),))
    second = Document(0, 1, 3, 2, True, 0, 1, 0, ((2, 3, 0.5), (4, 5, 2)))
    use = SharedUse(second, RowRun(0, 3), 0)
    sharing = Sharing(((), (RowRun(0, 3),)), (use,))
    plan = MicroBatchPlan(0, (Span(first, 0, 6), Span(second, 0, 2)), 9, 1.0, sharing=sharing)
    assert plan.num_targets == 5 + 2.5 and plan.places == (0, 3)
    for local, known in (
        (slice(None), [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 4), (1, 2)]),
        (np.array([1, 4, 7]), [(0, 2), (0, 5), (1, 2)]),
    ):
        own = OwnLoss.of(lambda log_probs, _: -log_probs, plan, local, np.arange(9)[local])
        of = own.targets
        assert list(zip(of.samples.tolist(), of.positions.tolist(), strict=True)) == known
        assert len(set(of.owners.tolist())) == len(of.documents) == 2
        weights = {(0, n): 1.0 for n in range(6)} | {(1, 4): 2.0, (1, 2): 0.5}
        assert of.weights.tolist() == [weights[each] for each in known]


def test_function_is_not_called_without_targets() -> None:
    own, given = seen(np.array([1, 6, 7, 8]))
    losses = torch.ones(1, 4, requires_grad=True)
    total = own.sum(losses)
    total.backward()
    assert total.item() == 0 and not given and losses.grad.abs().sum() == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda log_probs, _: log_probs.mean(), "returned () for 5 targets"),
        (lambda log_probs, _: None, "returned NoneType"),
        (lambda log_probs, _: log_probs.detach(), "without a gradient"),
    ],
)
def test_function_that_returns_no_losses_is_an_error(wrong: Any, words: str) -> None:
    own = OwnLoss.of(wrong, PLAN, slice(None), np.arange(10))
    with pytest.raises(TrainingError) as error:
        own.sum(torch.ones(1, 10, requires_grad=True))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none.py", None, "is not a Python file"),
        ("mine.txt", "", "is not a Python file"),
        ("mine.py", "1 / 0", "cannot be imported (ZeroDivisionError"),
        ("mine.py", "def other(): pass", "has no function `loss`"),
        ("mine.py", "loss = 3", "has no function `loss`"),
    ],
)
def test_file_without_a_loss_is_an_error(
    name: str, text: str | None, words: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        load_loss(str(tmp_path / name))
    assert words in str(error.value)

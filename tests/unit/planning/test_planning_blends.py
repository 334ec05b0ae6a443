"""Which corpora a run's splits draw from, and in which shares."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megatron_wlb.data.blend import Blend
from megatron_wlb.data.build_corpus import build_corpus
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.errors import CorpusError
from megatron_wlb.plan import Document
from megatron_wlb.planning.from_config import make_evaluation_planner, make_planner
from megatron_wlb.planning.packing.reference import REFERENCE_COST
from megatron_wlb.planning.planner import Planner
from megatron_wlb.settings.config import Config, from_flat


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three corpora of some documents each; the second is small."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.RandomState(2)
    prefixes = []
    for name, number in (("a", 40), ("b", 10), ("c", 20)):
        files = folder / name
        files.mkdir()
        for index in range(number):
            (files / f"{index}.txt").write_text("x" * int(generator.randint(1, 60)))
        build_corpus([files], folder / f"{name}-corpus")
        prefixes.append(str(folder / f"{name}-corpus"))
    return prefixes


def config(data_path: list[str], **flags: object) -> Config:
    values = {"data_path": tuple(data_path), "seq_length": 64, "global_batch_size": 4}
    values["wlb_packing"] = "hold"
    return from_flat(values | {"split": "70,20,10"} | flags)


def drawn(planner: Planner, num_steps: int) -> list[Document]:
    plans = [planner.next_plan() for _ in range(num_steps)]
    return [document for plan in plans if plan for document in plan.documents]


def share(documents: list[Document]) -> dict[int, float]:
    tokens: Counter[int] = Counter()
    for document in documents:
        tokens[document.corpus] += document.length
    return {corpus: number / sum(tokens.values()) for corpus, number in tokens.items()}


def test_weights_of_the_data_path_are_shares_of_the_tokens(texts: list[str]) -> None:
    settings = config(["0.5", texts[0], "0.3", texts[1], "0.2", texts[2]])
    corpora = Corpora.open(settings)
    assert corpora.vocab_size == 256
    found = share(drawn(make_planner(settings, corpora, REFERENCE_COST, 1), 60))
    assert found == pytest.approx({0: 0.5, 1: 0.3, 2: 0.2}, abs=0.01)
    # Those for validation are in the same shares, of their own documents.
    planner = make_evaluation_planner(settings, corpora, REFERENCE_COST, 1)
    evaluated = drawn(planner, 20)
    assert share(evaluated) == pytest.approx({0: 0.5, 1: 0.3, 2: 0.2}, abs=0.03)
    for document in evaluated:
        start, stop = corpora.ranges["valid"][document.corpus]
        assert start <= document.number < stop


def test_each_split_may_have_a_blend_of_its_own(texts: list[str]) -> None:
    settings = config([])
    blends = {
        "train": Blend((texts[0], texts[1]), (3.0, 1.0)),
        "valid": Blend((texts[2],)),
        "test": None,
    }
    corpora = Corpora.of_blends(blends, None)
    assert [corpora.num_documents(split) for split in ("train", "valid", "test")] == [50, 20, 0]
    trained = share(drawn(make_planner(settings, corpora, REFERENCE_COST, 1), 40))
    assert trained == pytest.approx({0: 0.75, 1: 0.25}, abs=0.02)
    planner = make_evaluation_planner(settings, corpora, REFERENCE_COST, 1)
    assert share(drawn(planner, 4)) == {2: 1.0}
    with pytest.raises(CorpusError, match="no documents"):
        make_evaluation_planner(settings, corpora, REFERENCE_COST, 1, "test")

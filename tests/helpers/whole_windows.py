"""A corpus of documents that fill a window each, for Megatron alone and for us.

Corpora are two, because each side shuffles documents in its own way: they stand where a side's
shuffling finds the next one. So both sides train the same windows in the same order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_wlb.data.corpus import megatron_indexed_dataset
from megatron_wlb.data.documents import DocumentStream

NUM_DOCUMENTS = 16


def two_corpora(folder: Path, window: int, *, seed: int, end: int) -> dict[str, Path]:
    """Prefixes by side, ``alone`` and ``ours``, for runs with that ``--seed``.

    ``end`` is the token that ends a document; the others are below it.
    """
    random = np.random.RandomState(seed)
    texts = np.random.RandomState(7).randint(0, end, (NUM_DOCUMENTS, window))
    texts[:, -1] = end
    documents, samples = np.arange(NUM_DOCUMENTS), np.arange(NUM_DOCUMENTS - 1)
    random.shuffle(documents)
    random.shuffle(samples)
    stream = DocumentStream(
        [np.full(NUM_DOCUMENTS, window)], window=window, step_tokens=texts.size, seed=seed
    )
    places = {
        "alone": [*documents[samples], documents[-1]],
        "ours": [document.number for document in stream.next_step()],
    }
    for name, order in places.items():
        assert sorted(order) == list(range(NUM_DOCUMENTS))
        builder = megatron_indexed_dataset().IndexedDatasetBuilder(f"{folder / name}.bin")
        for turn in np.argsort(order):
            builder.add_document(texts[turn], [window])
        builder.finalize(f"{folder / name}.idx")
    return {name: folder / name for name in places}

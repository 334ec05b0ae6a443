from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.index import write_index

LENGTHS = [7, 3, 900, 3, 40, 64, 0, 500, 1024]
STATS = "corpus stats"


@pytest.fixture(autouse=True)
def corpus(wlb) -> None:
    write_index("corpus", LENGTHS)


def test_json_has_the_statistics_of_the_index(wlb) -> None:
    found = wlb.json(STATS, "corpus --window 512")
    assert (found["source"], found["documents"], found["empty_documents"]) == ("corpus", 8, 1)
    assert (found["tokens"], found["longest"], found["window"]) == (sum(LENGTHS), 1024, 512)
    assert found["percentiles"]["p50"] == 52
    assert [row["documents"] for row in found["at_least"]] == [4, 3, 3, 2]
    assert sum(bin["documents"] for bin in found["histogram"]) == 8


def test_table_shows_the_histogram_and_says_where_the_work_is(wlb) -> None:
    said = wlb(STATS, "corpus --window 512")
    bars = {row[1]: (row[3], row[4], row[6]) for row in said.cells if len(row) > 8}
    assert bars["2"] == ("2", "█" * 24, "0.2%") and bars["64"][:2] == ("1", "█" * 12)
    assert bars["1,024"][2] == "100.0%"
    assert "2 are longer than the window and would be split in training" in said.out
    assert "whichever micro-batch gets one is the slowest" in said.out


def test_files_and_distributions_are_sources_as_well(wlb) -> None:
    np.save("lengths.npy", np.array([length for length in LENGTHS if length]))
    assert wlb.json(STATS, "--lengths lengths.npy")["tokens"] == sum(LENGTHS)
    words = f"{STATS} --distribution slimpack --windows 30 --window 4096"
    found = wlb.json(words)
    assert (found["tokens"], found["longest"]) == (30 * 4096, 4096)
    assert wlb.json(words, "--seed 9")["documents"] != found["documents"]


def test_plot_counts_every_document(wlb, monkeypatch) -> None:
    from megatron_wlb.study import plot

    figures = []
    save = plot.save

    def keep(figure, path) -> None:
        save(figure, path)
        figures.append(figure)

    monkeypatch.setattr(plot, "save", keep)
    wlb(STATS, "corpus --window 512 --plot lengths.png")
    assert Path("lengths.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    above, below = figures[0].axes
    assert sum(bar.get_height() for bar in above.patches[:-1]) == 8  # the last one is the shade
    assert above.get_title(loc="left") == "8 documents, 2,541 tokens"
    shares = {line.get_label(): line.get_ydata()[0] for line in below.get_lines()[:3]}
    assert shares == {
        "documents": 2 / 8, "tokens": pytest.approx(6 / 2541), "attention work": pytest.approx(
            18 / sum(length // 512 * 512**2 + (length % 512) ** 2 for length in LENGTHS)
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("", 2, "no documents; give one of"),
        ("nowhere", 3, "no such corpus file: nowhere.idx"),
        ("empty", 3, "empty.idx has no documents"),
        ("--distribution magy", 2, "unknown distribution magy; did you mean magi?"),
        ("corpus --window 0", 2, "--window is 0"),
        ("--distribution magi --windows 0", 2, "--windows is 0"),
        ("corpus --plot x.gif", 2, "--plot x.gif is not a picture; name it .png or .svg"),
        ("corpus --plot /proc/none/x.png", 2, "cannot write --plot /proc/none/x.png"),
    ],
)
def test_bad_input_is_one_line(words: str, status: int, message: str, wlb) -> None:
    write_index("empty", [0, 0, 0])
    assert message in wlb.refusal(STATS, words, status=status)

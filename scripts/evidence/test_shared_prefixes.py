"""Rollouts of files: what is a sample, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shared_prefixes import rollouts

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.balance.trees import SharedPrefixes


def test_turns_are_samples_that_begin_alike(tmp_path: Path) -> None:
    system = {"role": "system", "content": "x" * 4000}
    answers = [
        [{"role": "assistant", "content": letter * 800} for letter in own] for own in ["ab", "cd"]
    ]
    path = tmp_path / "two.json"
    path.write_text(json.dumps([{"messages": [system, *own]} for own in answers]))
    (_, (whole, ids)), (title, (turns, of_turns)) = rollouts([path])
    assert title == "two, a sample a turn: 4" and (len(whole), len(turns)) == (2, 4)
    assert whole == [len(one) for one in ids] and max(turns) == max(whole)
    own = sum(turns) - sum(SharedPrefixes.found(of_turns).common)
    assert sum(turns) / own > 2 > sum(whole) / own  # turns run their histories again


@pytest.mark.parametrize(
    ("text", "said"),
    [("[]", "no message of an assistant"), ('[{"x": 1}]', "messages"), ("{", "JSONDecodeError")],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.json.*{said}.*give a JSON list"):
        list(rollouts([path]))

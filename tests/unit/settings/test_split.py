"""Layers of each chunk by Megatron's flags, against Megatron's own count of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from typing import Any

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.settings.split import PipelineSplit, split_of, title

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = (
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
)  # fmt: skip
LAYOUT = "pipeline_model_parallel_layout"
LAYOUTS = (
    "Et|tL", "Et*2|t*3L", "E|t|t|L", "Ett|tt|tt|L", "E|tt||L", "|Et|tL|", "Et,(t|)*2L",
    "E(tt|)*3,L", "(E|t)*1|t*2L", "Et*2|(tt|)*3t|t,L", "Et|t*3|(t|)*2L", "E|(|)*2tttt|L",
    "tEL", "EtLt", "Et", "EtL|tL", "Et|t|tL", "", "|", "ELt*6", "Et*6L", "Et|t*11L", "E(t|tL",
)  # fmt: skip


def by_megatron(
    flags: dict[str, Any], num_layers: int, pp_size: int, vpp_size: int | None
) -> tuple[int, ...]:
    """What each chunk has in Megatron. Raises what Megatron does."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {
        FIRST: "num_layers_in_first_pipeline_stage", LAST: "num_layers_in_last_pipeline_stage"
    }  # fmt: skip
    config = TransformerConfig(
        num_layers=num_layers, hidden_size=8, num_attention_heads=2, cuda_graph_modules=[],
        pipeline_model_parallel_size=pp_size, virtual_pipeline_model_parallel_size=vpp_size,
        pipeline_dtype="float32", **{names.get(name, name): flags[name] for name in flags},
    )  # fmt: skip
    vpp_size = config.virtual_pipeline_model_parallel_size
    counts = []
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp_size)
    for chunk, rank in product(range(vpp_size or 1), range(pp_size)):
        parallel_state.set_pipeline_model_parallel_rank(rank)
        counts.append(get_num_layers_to_build(config, chunk if vpp_size else None, rank))
    return tuple(counts)


@pytest.fixture
def no_state() -> Iterator[None]:
    from megatron.core import parallel_state

    yield
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    parallel_state.set_pipeline_model_parallel_rank(None)


def cases() -> Iterator[tuple[dict[str, Any], int, int, int | None]]:
    both = {EMBEDDING: True, LOSS: True}
    ways: list[dict[str, Any]] = [{}, {EMBEDDING: True}, {LOSS: True}, both]
    some = (None, 0, 1, 2, 4, 5)
    ways += [{FIRST: a, LAST: b} for a, b in product(some, some) if (a, b) != (None, None)]
    ways += [{FIRST: 2, LOSS: True}, {LAST: 2, LAYOUT: "Et|tL"}, {EMBEDDING: True, LAYOUT: "EtL"}]
    for flags, num_layers, pp_size, vpp_size in product(
        ways, (1, 2, 4, 6, 8, 10, 12, 14), (1, 2, 3, 4), (None, 2, 3)
    ):
        if vpp_size is None or pp_size > 1:
            yield flags, num_layers, pp_size, vpp_size
    for layout, num_layers, pp_size, vpp_size in product(
        LAYOUTS, (1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4), (None, 2, 4)
    ):
        if vpp_size is None or pp_size > 1:
            yield {LAYOUT: layout}, num_layers, pp_size, vpp_size


def ours(
    flags: dict[str, Any], num_layers: int, pp_size: int, vpp_size: int | None
) -> tuple[int, ...] | None:
    split = PipelineSplit(**flags)
    try:
        return split.layers(num_layers, pp_size, vpp_size or split.vpp_size(pp_size) or 1)
    except ConfigError as error:
        assert "\n" not in str(error)
        assert "; " in str(error), "no remedy"
        return None


@pytest.mark.usefixtures("no_state")
@pytest.mark.filterwarnings("ignore:Could not determine rank:UserWarning")
def test_layers_of_each_chunk_are_megatrons() -> None:
    runs = refused = 0
    for case in cases():
        found = ours(*case)
        try:
            expected = by_megatron(*case)
        except (AssertionError, ValueError, IndexError):
            assert found is None, case
            refused += 1
            continue
        ends = {case[0].get(FIRST), case[0].get(LAST)}
        if case[2] == 1 and (len(expected) > 1 or None not in ends):
            # Virtual stages without a pipeline, which Megatron-LM's arguments refuse, or a first
            # and a last stage of one.
            assert found is None, case
        elif sum(expected) == case[1] and min(expected) >= 0:
            assert found == expected, case
        else:
            # Fewer layers than it was told, or less than none: Megatron does not look.
            assert found is None, (case, expected)
        runs += 1
    assert runs > 300
    assert refused > 300


@pytest.mark.usefixtures("no_state")
@pytest.mark.filterwarnings("ignore:Could not determine rank:UserWarning")
def test_flags_of_stages_make_these_stages_in_megatron() -> None:
    for vpp_size, stages in (
        (1, (8, 8, 8, 8)), (1, (7, 9, 9, 7)), (1, (7, 9)), (1, (9, 9, 9, 5)), (1, (4, 9, 9, 9)),
        (1, (8, 9, 8, 7)), (1, (0, 3, 3, 2)), (1, (3, 3, 3, 0)), (2, (1, 2, 2, 1)),
        (2, (2, 2, 2, 1)), (3, (1, 0, 4, 3, 2, 0)), (1, (6, 2, 6)), (1, (5,)), (1, (12, 0)),
    ):  # fmt: skip
        split = asdict(split_of(stages, vpp_size))
        names = {name: value for name, value in split.items() if value}
        pp_size = len(stages) // vpp_size
        # A layout has VPP in it; Megatron-LM takes only one of the two.
        vpp = None if vpp_size == 1 or LAYOUT in names else vpp_size
        assert by_megatron(names, sum(stages), pp_size, vpp) == stages
        assert ours(names, sum(stages), pp_size, vpp) == stages
    assert split_of((9, 9, 9, 5), 1).ends == (None, 5)
    assert split_of((1, 4, 4, 3), 1).ends == (1, 3)
    layout = "Et*3|t*4|t*4|ttL"
    assert split_of((3, 4, 4, 2), 2) == PipelineSplit(pipeline_model_parallel_layout=layout)
    assert title((9, 9, 9, 5)) == "9*3|5"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({FIRST: 3}, "first-pipeline-num-layers 3 of --num-layers 8 leave 5 layers for 3 other"),
        ({LAST: 0}, "--decoder-last-pipeline-num-layers 0: such a stage needs at least 1 layer"),
        ({EMBEDDING: True}, "is 8 and 1 for the ends .* use a multiple of 4 less 1"),
        ({LAYOUT: "Et*4|t*4L"}, "has 2 stages, which do not divide over PP 4"),
        ({LAYOUT: "E|t*3|t*3|L"}, "has 6 layers, but --num-layers is 8; give as many"),
        ({LAYOUT: "Et|t*6|tm|L"}, "has m before the last stage: .* put all m with L"),
        ({LAYOUT: "Et|t*6|m|tL"}, "has other than one E, layers t, layers m if any, and one L"),
        ({LAYOUT: "Ex|t|t|L"}, "'x': no layer is called so; use E"),
        ({LAYOUT: "E|(t*900000000|)*9|L"}, "longer than 100000 signs when multiplied out"),
        ({LAYOUT: "E|(t*9999|)*9999|L"}, "longer than 100000 signs when multiplied out"),
        ({LAYOUT: "Et|t*6|t|L", FIRST: 2}, "each in their own way; give one of the three"),
    ],
)  # fmt: skip
def test_flags_that_divide_nothing_are_one_line(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PipelineSplit(**flags).layers(8, 4)

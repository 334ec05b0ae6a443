from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_wlb.cost import ModelShape, Parallelism
from megatron_wlb.cost.model_file import load_model, model_names, padded_vocabulary
from megatron_wlb.errors import ConfigError

SIZES = {
    "hidden_size": 96, "ffn_hidden_size": 160, "num_layers": 6, "num_attention_heads": 6,
    "num_query_groups": 3, "kv_channels": 16, "vocab_size": 500, "gated": True,
}  # fmt: skip


def write(path: Path, **changes: object) -> str:
    sizes = {name: value for name, value in (SIZES | changes).items() if value is not None}
    file = path / "model.yaml"
    file.write_text(yaml.safe_dump(sizes))
    return str(file)


def num_parameters(shape: ModelShape) -> float:
    return (shape.linear_parameters + shape.head_linear_parameters) / 1e9


def test_models_of_the_paper_have_the_sizes_of_their_names() -> None:
    found = {name: round(num_parameters(load_model(name)), 2) for name in model_names()}
    assert found == {"550m": 0.55, "7b": 6.74, "30b": 30.14, "70b": 70.32}


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"), [("550m", 2, 4), ("7b", 8, 4), ("30b", 8, 4), ("70b", 16, 4)]
)
@pytest.mark.parametrize("vpp_size", [1, 2, 4])
def test_models_of_the_paper_divide_over_its_layouts(
    name: str, tp_size: int, pp_size: int, vpp_size: int
) -> None:
    shape = padded_vocabulary(load_model(name), tp_size)
    layout = Parallelism(tp_size=tp_size, pp_size=pp_size, vpp_size=vpp_size)
    assert shape.num_layers % (layout.pp_size * layout.vpp_size) == 0
    assert shape.num_attention_heads % tp_size == shape.ffn_hidden_size % tp_size == 0
    assert shape.vocab_size % (128 * tp_size) == 0


def test_file_gives_the_shape_it_says(tmp_path: Path) -> None:
    path = write(tmp_path, rotary_percent=0.5, description="a model")
    assert load_model(path) == ModelShape(**SIZES, rotary_percent=0.5)  # type: ignore[arg-type]


def test_vocabulary_is_padded_as_megatron_does(tmp_path: Path) -> None:
    shape = load_model(write(tmp_path))
    assert [padded_vocabulary(shape, tp).vocab_size for tp in (1, 3, 4)] == [512, 768, 512]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_layers": None}, "num_layers is missing"),
        ({"hiden_size": 3}, "unknown size hiden_size; use hidden_size"),
        ({"num_layers": 2.5}, "num_layers is 2.5; give a whole number"),
        ({"num_layers": True}, "num_layers is True; give a whole number"),
        ({"gated": 1}, "gated is 1; give true or false"),
        ({"kv_channels": 0}, "kv_channels is 0; give at least 1"),
        ({"num_query_groups": 4}, "6 attention heads do not divide into 4"),
    ],
)
def test_impossible_file_is_an_error_of_one_line(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        load_model(write(tmp_path, **changes))
    assert "\n" not in str(error.value)


def test_unknown_model_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown model 7bb; did you mean 7b\? There are 550m, 7b, 30b, 70b, or"
    ):
        load_model("7bb")
    with pytest.raises(ConfigError, match=r"No such file"):
        load_model(str(tmp_path / "none.yaml"))

from pathlib import Path

import pytest
import yaml
from helpers.machines import H100

from megatron_wlb.cost import load_hardware
from megatron_wlb.cost.hardware import hardware_names
from megatron_wlb.errors import ConfigError

FOLDER = Path(__file__).parents[3] / "configs" / "hardware"


def write(tmp_path: Path, **changes: object) -> str:
    """The H100's file with changed figures; None leaves one out."""
    content = yaml.safe_load((FOLDER / "h100-sxm.yaml").read_text())
    for name, figure in changes.items():
        if figure is None:
            del content[name]
        else:
            content[name] = figure
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_names_are_those_of_the_files() -> None:
    assert hardware_names() == ["a100", "a800", "cpu", "h100-sxm", "h100-sxm-measured", "h200"]
    assert hardware_names() == sorted(path.stem for path in FOLDER.iterdir())


@pytest.mark.parametrize("name", hardware_names())
def test_file_says_where_each_figure_is_from(name: str) -> None:
    hardware = load_hardware(name)
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert content["description"]
    for figure, value in content.items():
        if figure not in ("description", "attention"):
            assert getattr(hardware, figure) == value["value"]
            kinds = "data sheet:", "measured", "assumed", "counted", "fitted"
            assert value["source"].startswith(kinds) or name == "cpu", figure


def test_file_that_changed_is_read_anew(tmp_path: Path) -> None:
    for memory_gib in (70, 71, 70):
        path = write(tmp_path, memory_gib={"value": memory_gib, "source": "assumed"})
        assert load_hardware(path).memory_gib == memory_gib
    (tmp_path / "mine.yaml").unlink()
    with pytest.raises(ConfigError, match="No such file"):
        load_hardware(path)


def test_rates_are_shares_of_peaks() -> None:
    hardware = H100
    assert hardware.linear_tflops == pytest.approx(600, rel=0.005)
    assert hardware.attention_tflops == pytest.approx(400, rel=0.005)
    assert hardware.memory_us(3e6) == pytest.approx(1, rel=0.005)  # 3 TB/s
    assert hardware.transfer_us(350e3, num_devices=8) == pytest.approx(1, rel=0.005)
    # Beyond the node: a ninth of the bandwidth.
    beyond = hardware.transfer_us(350e3, num_devices=9)
    assert beyond == pytest.approx(9 * hardware.transfer_us(350e3, num_devices=8))
    # Of a group that fills two nodes all 8 adapters of each carry it: 400 GB/s instead of 450.
    whole = hardware.transfer_us(350e3, num_devices=16, num_ranks=16)
    assert whole == pytest.approx(450 / 400, rel=0.005)
    assert hardware.transfer_us(350e3, 16, 2) == beyond


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "h100-xm",
            r"unknown hardware h100-xm; did you mean h100-sxm\? There are a100, .* a YAML file",
        ),
        ("h20O", "unknown hardware h20O; did you mean h200"),
        ("abacus", "use one of a100, a800, cpu, h100-sxm, h100-sxm-measured, h200, or"),
        ("nowhere/to/be/found.yaml", "No such file"),
    ],
)
def test_unknown_machine_names_the_nearest(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_hardware(name)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"peak_tflop": {"value": 1, "source": "x"}}, "unknown figure peak_tflop; use peak_tflops"),
        ({"peak_tflops": 989}, r"peak_tflops is 989; give \{value, source\}"),
        ({"peak_tflops": {"value": 989}}, r"give \{value, source\}"),
        ({"peak_tflops": {"value": "fast", "source": "x"}}, "peak_tflops is 'fast'; give a number"),
        ({"peak_tflops": {"value": 0, "source": "x"}}, "mine.yaml: peak_tflops is 0"),
        ({"memory_gb_s": {"value": float("nan"), "source": "x"}}, "memory_gb_s is nan"),
        ({"linear_share": {"value": 1.2, "source": "x"}}, "linear_share is 1.2; .* at most 1"),
        ({"tp_overlap": {"value": -0.1, "source": "x"}}, "tp_overlap is -0.1"),
        ({"devices_per_node": {"value": 7.5, "source": "x"}}, "is 7.5; give a whole number"),
        ({"tp_overlap": None}, "tp_overlap is missing"),
        ({"attention": 3}, r"attention \(`wlb profile` writes it\) is 3; give a list"),
        ({"attention": [{"kernel": "sdpa"}]}, "attention profile: machine, [a-z_, ]* are missing"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_hardware(write(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "just words", "a: [", "- 1"])
def test_file_without_figures_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"hardware .*mine\.yaml"):
        load_hardware(str(path))

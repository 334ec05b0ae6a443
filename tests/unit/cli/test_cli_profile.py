from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from megatron.core.ssm import gated_delta_net, mamba_mixer

from megatron_wlb.cost import load_hardware
from megatron_wlb.cost.attention_latency import AnalyticAttention, AttentionProfile
from megatron_wlb.cost.hardware import read_hardware
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.emulation.scan_kernels import install_scans
from megatron_wlb.runtime.measuring.hardware_file import hardware_content, long_document_tflops
from megatron_wlb.runtime.measuring.rates import Rates
from megatron_wlb.runtime.measuring.scan_rates import scan_tflops

RATES = Rates("cpu", "float32", 1, 0.2, 0.15, 0.1, 40.0, 30.0)


def profile(num_heads=4, us=20000.0):
    row = (us / 2, us)
    return AttentionProfile(
        "sdpa", "here", "float32", num_heads, num_heads, 64, 1, 1, (1, 1024),
        (row, (us,)), (row, (2 * us,)), row, (us, 2 * us),
    )  # fmt: skip


@pytest.fixture
def quick(monkeypatch):
    """Measuring itself is tested elsewhere."""
    import megatron_wlb.runtime.measuring.rates as rates

    monkeypatch.setattr(rates, "measure_rates", lambda device: RATES)


PROFILE = "profile --device cpu --small --longest 16 --repeats 1"


def test_profile_writes_a_hardware_file_that_planning_reads(wlb, quick):
    said = wlb.json(PROFILE, "--out new/machine.yaml --heads 2/1x16 2/2x16")
    hardware = load_hardware("new/machine.yaml")
    assert [(p.num_heads, p.num_groups, p.kernel) for p in hardware.attention] == [
        (2, 1, "torch-cpu"),
        (2, 2, "torch-cpu"),
    ]
    assert hardware.peak_tflops == said["peak_tflops"]["value"] == 0.2
    assert hardware.linear_share == 0.75
    assert hardware.network_gb_s == load_hardware("cpu").network_gb_s
    assert sorted(path.name for path in Path("new").iterdir()) == [
        "machine-2-1x16.png", "machine-2-2x16.png", "machine.yaml",
    ]  # fmt: skip


def test_a_gpus_kernels_are_figures_of_their_own():
    """A CPU has none, and keeps what its base says."""
    base = read_hardware("h100-sxm")[1]
    gpu = replace(RATES, device="a GPU", kernel_us=2.5, launch_us=7.0, host_gb_s=48.0)
    made = [
        hardware_content(base, "h100-sxm", rates, [profile()], "here", "cuda")
        for rates in (RATES, gpu)
    ]
    assert made[0]["launch_us"] == base["launch_us"]
    figures = ("kernel_us", "launch_us", "host_link_gb_s")
    assert [made[1][name]["value"] for name in figures] == [2.5, 7.0, 48.0]
    assert made[1]["launch_us"]["source"].startswith("measured: ")


def test_recurrences_are_measured_by_the_kernels_that_megatron_calls(monkeypatch):
    """Twice the tokens are twice the FLOPs; without kernels the base's share stays."""
    seconds = iter([1.0, 1.0, 2.0, 2.0])

    def clock(run):
        run()
        return next(seconds)

    monkeypatch.setattr(gated_delta_net, "chunk_gated_delta_rule", None)
    monkeypatch.setattr(mamba_mixer, "mamba_chunk_scan_combined", None)
    assert scan_tflops(torch.randn, clock, 32) == {}
    patches = PatchSet()
    install_scans(patches)
    try:
        rates = [scan_tflops(torch.randn, clock, size) for size in (32, 64)]
    finally:
        patches.restore()
    assert rates[0] == rates[1]
    assert rates[0]["gated delta net"] == 3 * 2 * 4 * (32 * 128 * 128) * 32 / 1e12
    assert rates[0]["Mamba-2 layer"] == 3 * 7 * (64 * 64 * 128) * 32 / 1e12
    base = read_hardware("cpu")[1]
    made = hardware_content(
        base, "cpu", replace(RATES, scan_tflops={"a": 0.05, "b": 0.02}), [profile()], "here", "cpu"
    )
    assert made["scan_share"]["value"] == 0.1
    assert "0.02 TF/s of a b" in made["scan_share"]["source"]
    assert "scan_share" not in content()


def test_profile_keeps_the_tables_of_its_base(wlb, quick):
    words = f"{PROFILE} --no-plot --out machine.yaml"
    assert "attention_share" in wlb(words, "--heads 2/1x16").out
    wlb(words, "--base machine.yaml --force --heads 4/1x16")
    assert [p.num_heads for p in load_hardware("machine.yaml").attention] == [2, 4]
    assert [path.name for path in Path().iterdir()] == ["machine.yaml"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--out machine.json", "is not a YAML file"),
        ("--out there.yaml", "exists; choose another name, or --force"),
        ("--out a.yaml --heads 32x128", "--heads 32x128 is not query heads"),
        ("--out a.yaml --heads 3/2x64", "--heads 3/2x64"),
        ("--out a.yaml --base tpu", "unknown hardware tpu"),
        ("--out a.yaml --kernel flash-attn-3", "flash-attn-3 cannot run"),
        ("--out a.yaml --longest 0", "--longest is 0; give at least 16"),
        ("--out a.yaml --longest 2", "--longest is 2; give at least 16"),
        ("--out a.yaml --repeats 0", "--repeats is 0; give at least 1"),
        ("--out a.yaml --device cuda", "torch sees no GPU"),
    ],
)
def test_profile_refuses_before_it_measures(words, complaint, wlb):
    Path("there.yaml").write_text("")
    status = 7 if "flash-attn-3" in words else 2
    assert complaint in wlb.refusal(PROFILE, words, status=status)
    assert [path.name for path in Path().iterdir()] == ["there.yaml"]


def content(device="cpu", base="cpu", **more):
    path, known = read_hardware(base)
    return hardware_content({**known, **more}, path.name, RATES, [profile()], "here", device)


def test_measured_shares_are_of_the_peak():
    figures = content("cuda", "h200")
    assert figures["peak_tflops"]["value"] == 989.4  # the data sheet's
    assert figures["linear_share"]["value"] == pytest.approx(0.15 / 989.4, rel=1e-3)
    tflops = 3.5 * 4 * 4 * 64 * 1024 * 1025 / 2 / 60000 / 1e6
    assert long_document_tflops(profile()) == pytest.approx(tflops)
    assert content()["attention_share"]["value"] == pytest.approx(tflops / 0.2, rel=1e-3)


def test_every_figure_says_where_it_is_from():
    figures = yaml.safe_load(yaml.safe_dump(content()))
    measured = {n for n, f in figures.items() if "measured:" in str(f) and isinstance(f, dict)}
    assert measured == {
        "peak_tflops", "memory_gb_s", "linear_share", "attention_share", "memory_share",
    }  # fmt: skip
    assert figures["tp_overlap"] == read_hardware("cpu")[1]["tp_overlap"]


def test_a_new_table_replaces_one_of_the_same_heads():
    old = [profile(us=5.0).as_dict(), profile(num_heads=2).as_dict()]
    tables = content(attention=old)["attention"]
    assert [(t["num_heads"], t["whole_forward_us"][1]) for t in tables] == [
        (2, 20000.0),
        (4, 20000.0),
    ]


def test_analytic_attention_is_no_measured_table():
    assert load_hardware("h100-sxm").attention == ()
    assert AnalyticAttention(4, 64, 1.0).call_us == (0.0, 0.0)


def test_profile_keeps_a_base_without_latency(wlb, quick):
    figures = yaml.safe_load(read_hardware("cpu")[0].read_text())
    del figures["latency_us"]
    Path("base.yaml").write_text(yaml.safe_dump(figures))
    wlb(PROFILE, "--out machine.yaml --base base.yaml --heads 2/2x16 --no-plot")
    assert "latency_us" not in yaml.safe_load(Path("machine.yaml").read_text())
    assert load_hardware("machine.yaml").latency_us == 10.0

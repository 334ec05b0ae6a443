"""Measuring attention and rates on a GPU gives a hardware file that planning reads."""

import json

import torch

from megatron_wlb.cli.main import main
from megatron_wlb.cost import load_hardware


def test_profile_of_a_gpu_is_a_hardware_file(tmp_path, capsys):
    out = tmp_path / "gpu.yaml"
    flags = f"profile --small --longest 2048 --repeats 2 --heads 8/2x64 --base h100-sxm --out {out}"
    assert main([*flags.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plots"]
    hardware = load_hardware(str(out))
    # A launch by Python takes longer than a kernel without work; both are microseconds.
    assert 0.3 < hardware.kernel_us < hardware.launch_us < 200
    assert hardware.host_link_gb_s is not None and 1 < hardware.host_link_gb_s < 500
    (profile,) = hardware.attention
    assert (profile.dtype, profile.num_heads, profile.num_groups) == ("bfloat16", 8, 2)
    assert torch.cuda.get_device_name() in profile.machine
    # 2048² pairs take longer than one, and reach more of the peak.
    assert profile.whole_forward_us[-1] > profile.whole_forward_us[0]
    assert profile.tflops(1024, 2048) > profile.tflops(1, 2048)

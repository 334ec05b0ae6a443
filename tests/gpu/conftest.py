"""What GPU tests need in the environment before torch asks for it."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else deterministic products raise
# NVIDIA's images turn TF32 on; losses of fp32 are compared with the CPU's.
os.environ |= {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "NVIDIA_TF32_OVERRIDE": "0"}

"""The process of one part: ``python -m _gpu_report.child PART OUT full|tiny``."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

# torch's attention of the reference would have cuDNN build a graph for each length.
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")

import torch

from _gpu_report.parts import PARTS
from _gpu_report.results import CPU, Results
from megatron_wlb.runtime.measuring.rates import machine_name


def main() -> int:
    name, out, form = sys.argv[1:]
    device = "cuda" if form == "full" and torch.cuda.is_available() else CPU
    results = Results(Path(out), name, tiny=form == "tiny", machine=machine_name(device))
    try:
        PARTS[name].measure(results)
    except Exception as error:
        traceback.print_exc()
        results.end("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return 1
    results.end("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())

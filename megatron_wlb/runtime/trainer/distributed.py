"""Processes, devices and Megatron's process groups: set up once, torn down once."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING

import torch

from megatron_wlb.data.corpora import Corpora
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning import guards
from megatron_wlb.runtime import emulation
from megatron_wlb.runtime.emulation import cpu
from megatron_wlb.runtime.ranks import agreement
from megatron_wlb.settings.config import Config

if TYPE_CHECKING:
    from megatron_wlb.runtime.trainer.trainer import Trainer


def start(config: Config, corpora: Corpora | None = None) -> Trainer:
    """A :class:`.Trainer` on the device that the settings ask for, in the world that torchrun
    started; raises as :func:`choose_device` and :func:`initialize` do.
    """
    device = choose_device(config.wlb.wlb_device)
    initialize(config, device)
    from megatron_wlb.runtime.trainer.trainer import Trainer  # Megatron, on that device

    return Trainer(config, device, corpora)


def choose_device(requested: str) -> str:
    """``cuda`` or ``cpu`` for this process; turns the CPU emulation on for ``cpu``.

    Must run before Megatron is imported. ``auto`` is ``cuda`` wherever there is a GPU. Raises
    :class:`ConfigError` where a GPU was asked for and there is none, or none for this process.
    """
    device = emulation.device_for(requested)
    if device == "cpu":
        cpu.install()
    else:
        local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise ConfigError(
                f"process {local_rank} of this machine, counted from 0, has no GPU: there are "
                f"{num_gpus}, one for each; start {num_gpus} processes here (torchrun "
                "--nproc-per-node), or use --wlb-device cpu"
            )
        torch.cuda.set_device(local_rank)
    return device


def initialize(config: Config, device: str) -> None:
    """Joins the world that torchrun started and builds Megatron's groups in it.

    Raises :class:`ConfigError` where the world and the settings do not fit, or torchrun is missing;
    :class:`PlanError` where ranks are told different things.
    """
    if "RANK" not in os.environ:
        raise ConfigError("RANK is not set; start this with torchrun --nproc-per-node N …")
    agreement.compare_at_start(config.flat(), config.parallel.distributed_timeout_minutes)
    guards.check_alone(config)
    world_size = int(os.environ["WORLD_SIZE"])
    guards.check(config, world_size)
    guards.check_micro_batches(config, world_size)
    backend = config.parallel.distributed_backend or ("nccl" if device == "cuda" else "gloo")
    if backend == "nccl" and device == "cpu":
        raise ConfigError("--distributed-backend is nccl, which needs GPUs; use gloo on CPUs")
    if config.training.deterministic_mode:
        _be_deterministic(backend)
    torch.distributed.init_process_group(
        backend,
        timeout=datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes),
    )
    initialize_groups(config)


def _be_deterministic(backend: str) -> None:
    """Makes torch choose what gives the same bits each time, or raise.

    Raises :class:`ConfigError` where NCCL may choose another algorithm each time.
    """
    if backend == "nccl":
        guards.check_algorithms(os.environ)
    # What cuBLAS asks for; it is read when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def initialize_groups(config: Config) -> None:
    """Megatron's process groups and random-number streams for a world that exists already."""
    from megatron.core import parallel_state

    p = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tensor_model_parallel_size,
        pipeline_model_parallel_size=p.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=p.vpp_size if p.vpp_size > 1 else None,
        context_parallel_size=p.context_parallel_size,
        expert_model_parallel_size=p.expert_model_parallel_size,
        expert_tensor_parallel_size=p.expert_tensor_parallel_size,
    )
    seed(config)


def seed(config: Config) -> None:
    """Starts the random-number streams anew, as at the beginning of a run."""
    from megatron.core import parallel_state, tensor_parallel

    # Each pipeline stage has another stream, as in Megatron-LM; TP ranks differ by the tracker.
    value = config.training.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(value)
    tensor_parallel.model_parallel_cuda_manual_seed(value, force_reset_rng=True)


def destroy_groups() -> None:
    """Undoes :func:`initialize_groups`; the world stays."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def shutdown() -> None:
    """Leaves the world, if there is one."""
    if torch.distributed.is_initialized():
        destroy_groups()
        torch.distributed.destroy_process_group()

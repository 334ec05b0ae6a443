"""One tensor-parallel rank's share of a stage, on one device: what it takes, and what models say.

The share is a GPT of Megatron's modules, as for training: full hidden size, but ``1/TP`` of the
heads, of the FFN and of the vocabulary, in a stage that embeds and has the loss. Nothing is sent.
So the collectives of TP, CP, PP and DP are left out with their buffers, and sequence parallelism
too: norms and residual additions work on all tokens.

Times are those of both passes of a micro-batch: on a GPU by events, medians of the repeats; on a
CPU by :class:`~megatron_wlb.runtime.device_clock.Clock`, the least of them.
Groups of operations are timed where they run. In TransformerEngine's layers the norm before a
product is part of the product's module.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from _quickstart.live_bytes import LiveBytes

from megatron_wlb.cost import Execution, ModelShape, load_hardware
from megatron_wlb.cost.analytic import BACKWARD_ATTENTION, BACKWARD_LINEAR
from megatron_wlb.cost.attention_latency import AttentionProfile
from megatron_wlb.cost.hardware import FIGURES, Hardware, read_hardware
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.models import load_settings, shape_of
from megatron_wlb.planning.run import Run
from megatron_wlb.runtime.device_clock import Clock
from megatron_wlb.runtime.measuring.attention_rates import measure_attention
from megatron_wlb.runtime.measuring.hardware_file import base_of, hardware_content
from megatron_wlb.runtime.measuring.rates import machine_name, measure_rates
from megatron_wlb.settings.config import Config, from_flat

if TYPE_CHECKING:
    from megatron_wlb.runtime.gpt.build import Model

MODULES = {
    "linear_qkv": "linear",
    "linear_proj": "linear",
    "linear_fc1": "linear",
    "linear_fc2": "linear",
    "core_attention": "attention",
    "output_layer": "vocabulary",
}
"""Megatron's names of modules, and the group that each is of."""
GROUPS = ("linear", "attention", "elementwise", "vocabulary", "total")
"""``elementwise`` is what the total has beside the others: norms, RoPE, activations, the embedding;
``vocabulary`` the LM head and the loss."""


@dataclass(frozen=True, slots=True)
class ShareRow:
    """A group of operations in a micro-batch, both passes, in all layers."""

    what: str
    """One of :data:`GROUPS`."""
    tokens: int
    documents: int
    measured_us: float
    modelled_us: float
    """By the device's rates and attention, measured as ``wlb profile`` does."""
    assumed_us: float
    """By the hardware file that comes with the project."""
    measured_bytes: int | None = None
    """The most that the micro-batch added while it ran; of the total alone."""
    modelled_bytes: int | None = None

    def as_dict(self) -> dict[str, str | int | float | None]:
        """For JSON."""
        return dataclasses.asdict(self)


def measure_share(
    model: Config | str,
    *,
    tp_size: int,
    num_layers: int,
    lengths: Sequence[Sequence[int]],
    device: str,
    repeats: int,
    seed: int,
    hardware: str | None = None,
) -> list[ShareRow]:
    """Builds a share, runs micro-batches of documents of such ``lengths``, and asks the models.

    Args:
        model: its settings, or the name or file of them.
        tp_size: of whose ranks one is built.
        num_layers: of the stage.
        lengths: of the documents of each micro-batch.
        device: ``cuda`` (bf16) or ``cpu`` (fp32).
        repeats: runs of each micro-batch, and of each point of attention's table.
        seed: of weights and of random numbers.
        hardware: name or file of the machine, if not the one that the device's name says.

    Raises :class:`ConfigError` for sizes that TP does not divide, no documents, fewer than one
    repeat, or a world of more than one process.
    """
    micro_batches = [tuple(own) for own in lengths]
    if min((min(own, default=0) for own in micro_batches), default=0) < 1 or repeats < 1:
        raise ConfigError(
            f"micro-batches of {[list(own) for own in micro_batches]} tokens, {repeats} repeats; "
            "give documents of at least 1 token to each, and at least 1 repeat"
        )
    whole = load_settings(model) if isinstance(model, str) else model
    share = share_of(whole, tp_size, num_layers)
    shape = shape_of(share)
    longest = max(map(max, micro_batches))
    with _world(device):
        assumed, measured, kernel = _machines(shape, device, hardware, longest, repeats, seed)
        window = max(map(sum, micro_batches))
        config = _config(share, window, device, kernel)
        torch.manual_seed(seed)
        with _built(config, shape.vocab_size) as built:
            rows = []
            for own in micro_batches:
                run = Run(
                    shape,
                    Execution(
                        bf16=config.training.bf16,
                        distributed_optimizer=False,
                        kernels="fused" if device == "cuda" else "torch",
                        attention_kernel=kernel,
                    ),
                    measured,
                    window,
                    1,
                    extrapolate=True,
                )
                given = dataclasses.replace(run, hardware=assumed)
                times = _measured_us(built, own, shape.vocab_size, repeats, device)
                held = _measured_bytes(built, own, shape.vocab_size, device)
                memory = run.memory.executed(document_tokens=sum(own) / len(own))
                predicted = round(memory.activation_peak_bytes(0, [sum(own)]))
                modelled_us, assumed_us = modelled(run, own), modelled(given, own)
                for what in GROUPS:
                    us = times[what], modelled_us[what], assumed_us[what]
                    num_bytes = (held, predicted) if what == "total" else (None, None)
                    rows.append(ShareRow(what, sum(own), len(own), *us, *num_bytes))
    return rows


def share_of(config: Config, tp_size: int, num_layers: int) -> Config:
    """A model whose layers are a TP rank's share of another's.

    Raises :class:`ConfigError` for sizes that TP does not divide, and unlike layers.
    """
    shape = shape_of(config)
    if shape.layers:
        raise ConfigError("the model's layers are unlike; give one of equal layers")
    padded = padded_vocabulary(shape, tp_size)
    names = "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size"
    sizes = {name: getattr(padded, name) for name in names}
    for name, size in sizes.items():
        if tp_size < 1 or size % tp_size:
            raise ConfigError(f"{name} is {size}, which TP {tp_size} does not divide; use less TP")
    shares = {name: size // tp_size for name, size in sizes.items()}
    given = {"num_layers": num_layers, "kv_channels": shape.kv_channels, **shares}
    return from_flat(config.flat() | given | {"group_query_attention": True})


def modelled(run: Run, lengths: Sequence[int]) -> dict[str, float]:
    """µs of both passes of a micro-batch by group, of one device without collectives."""
    model, num_layers, num_tokens = run.model, run.shape.num_layers, sum(lengths)
    layer, linear = model.layer(), (1 + BACKWARD_LINEAR) * num_tokens
    scale = run.attention_scale(lengths, run.chooser("per-sequence")(lengths))
    pairs = (1 + BACKWARD_ATTENTION) * sum(n * n for n in lengths)
    times = {
        "linear": num_layers * layer.matrix_us * linear,
        "attention": num_layers * layer.attention_us * pairs * scale,
        "elementwise": (
            num_layers * layer.elementwise_us + model.embedding().elementwise_us
        ) * linear,
        "vocabulary": model.head().linear_us * linear,
    }  # fmt: skip
    return {**times, "total": sum(times.values())}


@contextmanager
def _world(device: str) -> Iterator[None]:
    """A world of this process alone, unless there is one; of the CPU's emulation on the CPU."""
    from megatron_wlb.runtime.trainer import distributed

    distributed.choose_device(device)
    dist = torch.distributed
    ours = not dist.is_initialized()
    if ours:
        backend = "nccl" if device == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        if dist.get_world_size() > 1:
            raise ConfigError(
                f"a share is measured in a world of {dist.get_world_size()} processes; start one"
            )
        yield
    finally:
        if ours:
            dist.destroy_process_group()


@contextmanager
def _built(config: Config, vocab_size: int) -> Iterator[Model]:
    from megatron_wlb.runtime.gpt.build import build_model
    from megatron_wlb.runtime.trainer import distributed

    distributed.initialize_groups(config)
    try:
        model = build_model(config, vocab_size)
        model.chunks[0].train()
        yield model
    finally:
        distributed.destroy_groups()


def _machines(
    shape: ModelShape, device: str, name: str | None, longest: int, repeats: int, seed: int
) -> tuple[Hardware, Hardware, str]:
    """The machine as its file says and as it is measured now, and the name of its kernel."""
    from megatron_wlb.runtime.gpt.attention.kernels import Demand, choose_kernel

    name = name or base_of(device, torch.cuda.get_device_name() if device == "cuda" else "")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = shape.num_attention_heads, shape.num_query_groups, shape.kv_channels
    demand, machine = Demand(torch.device(device), dtype, *heads), machine_name(device)
    kernel = choose_kernel("auto", demand).name
    profile = measure_attention(
        demand, kernel, longest=max(2, longest), repeats=repeats, machine=machine, seed=seed
    )
    path, base = read_hardware(name)
    base = {key: value for key, value in base.items() if key != "attention"}
    content = hardware_content(base, path.name, measure_rates(device), [profile], machine, device)
    tables = tuple(map(AttentionProfile.from_dict, content["attention"]))
    figures = {figure: content[figure]["value"] for figure in FIGURES if figure in content}
    return load_hardware(name), Hardware(**figures, attention=tables), kernel


def _config(share: Config, window: int, device: str, kernel: str) -> Config:
    from megatron.core.models.gpt import gpt_layer_specs

    settings = share.flat() | {
        "seq_length": window,
        "max_position_embeddings": max(window, share.model.max_position_embeddings or 0),
        "global_batch_size": 1,
        "bf16": device == "cuda",
        "wlb_attention_kernel": kernel,
        "transformer_impl": (
            "transformer_engine" if device == "cuda" and gpt_layer_specs.HAVE_TE else "local"
        ),
    }
    return from_flat(settings)


class _Watch:
    """Notes when groups of operations begin and end, in both passes."""

    def __init__(self, device: str) -> None:
        clock = Clock(torch.device(device))
        self.now, self._between_us = clock.now, clock.between_us
        self._spans: list[tuple[str, Any, Any]] = []

    def end(self, group: str, start: Any) -> None:
        self._spans.append((group, start, self.now()))

    def take_us(self) -> dict[str, float]:
        """µs by group since the last call."""
        times = dict.fromkeys(GROUPS, 0.0)
        for group, start, stop in self._spans:
            times[group] += self._between_us(start, stop)
        self._spans = []
        return times


def _watched(watch: _Watch, group: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with both its passes timed; its backward begins with its first output's
    gradient and ends with the last of its inputs' gradients.
    """

    def timed(*args: Any, **kwargs: Any) -> Any:
        began: list[Any] = []
        inputs = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
        missing = [len(inputs)]

        def end_backward(_: torch.Tensor) -> None:
            missing[0] -= 1
            if not missing[0]:
                watch.end(group, began.pop())

        for tensor in inputs:
            tensor.register_hook(end_backward)  # type: ignore[no-untyped-call]
        start = watch.now()
        result = forward(*args, **kwargs)
        watch.end(group, start)
        first = result[0] if isinstance(result, tuple) else result
        first.register_hook(lambda _: began.append(watch.now()))
        return result

    return timed


@contextmanager
def _watching(model: Model, watch: _Watch) -> Iterator[None]:
    """Times the groups of the model's modules."""
    (gpt,) = model.gpts
    targets = [
        (module, "forward", MODULES[name.rpartition(".")[2]])
        for name, module in gpt.named_modules()
        if name.rpartition(".")[2] in MODULES
    ]
    targets.append((gpt, "compute_language_model_loss", "vocabulary"))
    for owner, name, group in targets:
        setattr(owner, name, _watched(watch, group, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, _ in targets:
            delattr(owner, name)


def _measured_us(
    model: Model, lengths: Sequence[int], vocab_size: int, repeats: int, device: str
) -> dict[str, float]:
    from megatron_wlb.runtime.measuring.measure import run_passes

    watch, began, found = _Watch(device), list[Any](), []
    pre_hook = model.chunks[0].register_forward_pre_hook(lambda *_: began.append(watch.now()))
    with _watching(model, watch):
        for _ in range(repeats + 1):  # the first loads and allocates
            model.chunks[0].zero_grad_buffer()  # type: ignore[operator]
            run_passes(model, lengths, vocab_size)
            watch.end("total", began.pop())
            times = watch.take_us()
            groups_us = sum(us for what, us in times.items() if what != "total")
            found.append({**times, "elementwise": times["total"] - groups_us})
    pre_hook.remove()
    typical = np.median if device == "cuda" else np.min
    return {what: float(typical([times[what] for times in found[1:]])) for what in GROUPS}


def _measured_bytes(model: Model, lengths: Sequence[int], vocab_size: int, device: str) -> int:
    """The most that forward and backward add to what is held before."""
    from megatron_wlb.runtime.measuring.measure import run_passes

    def run() -> None:
        run_passes(model, lengths, vocab_size)

    if device == "cuda":
        run()
        gc.collect()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - held
    with LiveBytes() as live:
        live.watch(model.gpts[0].parameters())
        run()  # what it finds from before is known then
        gc.collect()
        held = live.live
        live.reset_peak()
        run()
    return live.peak - held

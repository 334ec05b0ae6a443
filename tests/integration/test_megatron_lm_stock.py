"""Megatron-LM without packing is an oracle of its own: it shares no attention, mask or loss.

Each document fills one window, and both runs get the same windows in the same order. So both
compute the same: losses, the gradients' norm and auxiliary losses of each step.

Megatron's samples overlap by a token, which is the last label. Here the last token of a sample ends
its document, so ``--eod-mask-loss`` leaves that label out, as we do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.layouts import further
from helpers.whole_windows import two_corpora
from megatron_lm_runs import (
    BOTH,
    DELTA,
    LLAMA,
    LLAMA_EXPERTS,
    LLAMA_LATENT,
    MAMBA,
    PP2,
    Finished,
    Flags,
    launch,
    logged,
    run_without_launcher,
)
from rank_runs import finish

pytestmark = pytest.mark.launcher

SEED, END = 1234, 255
BATCH = 4
ROUNDING = 2e-6
"""Relative, of losses: fp32 sums in another order, and seven digits in the log."""
SHOWN = 6e-4
"""Of the gradients' norm, which the log rounds to a thousandth. Here it is 3 to 300."""
SMALL: Flags = BOTH | {
    "num_layers": 2,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "global_batch_size": BATCH,
    "train_iters": 3,
    "seed": SEED,
    "vocab_size": END + 1,
    "split": "1",
    "init_method_std": 0.4,  # with which heads see more than means
}
ALONE: Flags = {"eod_mask_loss": True, "data_cache_path": "cache"}
RAMP: Flags = {
    "train_iters": None, "train_samples": 12, "global_batch_size": None,
    "step_batch_size_schedule": f"0:2 {4 * SMALL['seq_length']}:4",
}  # fmt: skip


def balanced(*kinds: str) -> Flags:
    coefficients = [0.5 + 0.2 * n for n in range(len(kinds))]
    return LLAMA_EXPERTS | {
        "moe_router_load_balancing_type": kinds,
        "moe_aux_loss_coeff": coefficients,
    }


CASES: dict[str, Flags] = {
    "dense": {},
    "llama": LLAMA,
    "learned": {"position_embedding_type": "learned_absolute"},
    "rope-percent": {"rotary_percent": 0.5, "rotary_base": 500},
    "rope-pairs": {"rotary_interleaved": True},
    "rope-scaled": {"use_rope_scaling": True, "rope_scaling_factor": 64},
    "latent": LLAMA_LATENT | {"rope_type": "rope"},
    "latent-yarn": LLAMA_LATENT | {"rotary_scaling_factor": 4.0, "mscale": 1.3},
    "experts": balanced("aux_loss", "seq_aux_loss", "global_aux_loss") | {"moe_z_loss_coeff": 0.1},
    "aux_loss": balanced("aux_loss"),
    "seq_aux_loss": balanced("seq_aux_loss"),
    "global_aux_loss": balanced("global_aux_loss"),
    "prediction": {"mtp_num_layers": 2},
    "sliding": {"window_size": "7,0", "window_attn_skip_freq": 2},
    "mup": LLAMA | {"use_mup": True},
    "ramp": RAMP,
    "hybrid": {"hybrid_layer_pattern": "*-*-"},
    "hybrid-prediction": LLAMA | {"hybrid_layer_pattern": "*-*-/*-/*-"},
    "hybrid-latent": LLAMA_LATENT
    | {
        "rope_type": "rope",
        "hybrid_layer_pattern": "+-+-",
        "qk_layernorm": None,
        "init_method_std": 0.2,
    },
    "hybrid-experts": balanced("seq_aux_loss")
    | {"hybrid_layer_pattern": "*E*-E", "moe_latent_size": 24},
    "hybrid-sliding": PP2
    | {
        "hybrid_layer_pattern": "*-*|-*-",
        "window_size": "7,0",
        "window_attn_skip_freq": 2,
    },
    "hybrid-mamba": MAMBA | {"hybrid_layer_pattern": "M-*-M-"},
    "hybrid-delta": DELTA | {"hybrid_layer_pattern": "G-*-G-"},
    "uneven": PP2 | {"num_layers": 3, "decoder_first_pipeline_num_layers": 1},
}
FIGURES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "moe_z_loss_coeff": "z_loss",
    "mtp_num_layers": "mtp_2 loss",
}
"""What a flag, or its value, adds to the log."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same documents, for Megatron alone and for us."""
    folder = tmp_path_factory.mktemp("corpora")
    return two_corpora(folder, SMALL["seq_length"], seed=SEED, end=END)


def figures(finished: Finished, flags: Flags) -> dict[str, list[float]]:
    """Losses by name, and the gradients' norm, of each step."""
    said = [*flags, *flags.get("moe_router_load_balancing_type", ())]
    names = ["lm loss", "grad norm", *(FIGURES[word] for word in said if word in FIGURES)]
    found = {name: [float(word) for word in logged(finished, name)] for name in names}
    assert all(len(steps) >= 3 for steps in found.values()), found
    return found


def assert_equal(ours: dict[str, list[float]], alone: dict[str, list[float]]) -> None:
    assert ours.keys() == alone.keys()
    for name, expected in alone.items():
        tolerance = {"abs": SHOWN} if name == "grad norm" else {"rel": ROUNDING}
        assert ours[name] == pytest.approx(expected, **tolerance), name


def attend_latents() -> None:
    """Lets Megatron run its latents without TransformerEngine: its own attention does all of them,
    but takes no width of values.
    """
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    init = DotProductAttention.__init__

    def with_widths(
        self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any
    ) -> None:
        init(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    DotProductAttention.__init__ = with_widths
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def runs(
    folder: Path,
    corpora: dict[str, Path],
    flags: Flags,
    fault: Callable[[], None] | None = None,
    alone: Callable[[], None] = attend_latents,
) -> list[dict[str, list[float]]]:
    """Figures of our path, then of Megatron alone; both at once."""
    flags, size = SMALL | flags, flags.get("pipeline_model_parallel_size", 1)
    started = [launch(folder, size, flags | {"data_path": corpora["ours"]}, fault=fault)]
    flags = {name: value for name, value in flags.items() if not name.startswith("wlb_")}
    flags |= ALONE | {"data_path": corpora["alone"]}
    started.append(run_without_launcher(folder, size, flags, fault=alone))
    return [figures(finish(run), flags) for run in started]


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        ("dense", "hold"),
        ("latent", "hold"),
        ("experts", "original"),
        ("sliding", "original"),
        *(further(name, "original") for name in CASES),
        *(
            further(name, "hold")
            for name in ("llama", "aux_loss", "seq_aux_loss", "prediction", "ramp")
        ),
    ],
)
def test_model_is_megatrons_own(
    name: str, packing: str, corpora: dict[str, Path], tmp_path: Path
) -> None:
    assert_equal(*runs(tmp_path, corpora, CASES[name] | {"wlb_packing": packing}))


def turn_halves() -> None:
    """Turns channels i and i + n ÷ 2 of a latent's head together: Megatron turns 2i and 2i + 1."""
    from megatron_wlb.runtime.gpt.attention.latent_attention import DocumentLatentAttention

    rotated = DocumentLatentAttention._rotated

    def wrong(self: Any, heads: Any, angles: Any, factor: float) -> Any:
        pairs = heads.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return rotated(self, pairs, angles, factor)

    DocumentLatentAttention._rotated = wrong


def test_another_model_is_seen(corpora: dict[str, Path], tmp_path: Path) -> None:
    """Negative control."""
    flags = CASES["latent"] | {"wlb_packing": "hold", "train_iters": 3}
    ours, alone = runs(tmp_path, corpora, flags, turn_halves)
    assert ours["lm loss"][0] != pytest.approx(alone["lm loss"][0], rel=100 * ROUNDING)


def attend_in_fp32() -> None:
    """Keeps scores and probabilities of Megatron's attention from being rounded to bf16."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    forward = DotProductAttention.forward

    def exact(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        found = forward(self, query.float(), key.float(), value.float(), *args, **kwargs)
        return found.to(query.dtype)

    DotProductAttention.forward = exact


@pytest.mark.long
def test_bf16_differs_as_megatron_does_from_itself(
    corpora: dict[str, Path], tmp_path: Path
) -> None:
    """In fp32 this model is equal, so what is left is rounding.

    Where Megatron alone rounds less in its attention, its losses move as far from its own.
    """
    flags = LLAMA | {"wlb_packing": "original", "bf16": True}
    ours, alone = (found["lm loss"] for found in runs(tmp_path, corpora, flags))
    exact = runs(tmp_path, corpora, flags, alone=attend_in_fp32)[1]["lm loss"]
    by_rounding = max(abs(a - b) for a, b in zip(exact, alone, strict=True))
    assert 0 < by_rounding < 1e-3 * alone[0]
    assert max(abs(a - b) for a, b in zip(ours, alone, strict=True)) < 3 * by_rounding

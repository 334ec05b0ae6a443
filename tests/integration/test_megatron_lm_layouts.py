"""The launcher: every feature in layouts, against one process.

What layers and layouts compute is in ``tests/distributed/test_oracle.py``, which is quicker. Here
runs what the launcher has a way of its own for, and in the long form all of it.

A layout goes on from the checkpoint that the process has saved, with its weights, its documents and
its pool. Where the form of the optimizer's state differs, it starts from the same weights.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.layouts import further, some_of
from helpers.nccl.record import recorded
from helpers.nccl.rules import Call, hangs
from helpers.texts import write_texts
from megatron_lm_runs import (
    BOTH,
    CP2,
    DELTA,
    DP2,
    EXPERTS,
    FOCAL,
    LATENT,
    MAMBA,
    PP2,
    PP2_CP2,
    PP2_VPP2,
    RECOMPUTED,
    SLICES,
    TP2_SP,
    Finished,
    Flags,
    assert_equal_steps,
    launch,
    logged,
    validations,
)
from rank_runs import command_line, finish, losses, read_metrics

from megatron_wlb.data.corpora import Corpora
from megatron_wlb.planning.from_config import known_cost, make_planner
from megatron_wlb.planning.from_words import settings_of_script

pytestmark = pytest.mark.launcher

NUM_STEPS, SAVED = 6, 2
ROUNDING = 2e-6
"""Relative, of evaluations: fp32 sums in another order, and seven digits in the log."""
RUN: Flags = BOTH | {"train_iters": NUM_STEPS, "seed": 7, "wlb_packing": "hold"}


def set_weights() -> None:
    """Gives experts the same weights in every layout: Megatron's depend on their rank."""
    sys.path.append(str(Path(__file__).parents[2] / "scripts"))
    importlib.import_module("_run_recipes.inside")._set_weights(False)


@dataclass(frozen=True)
class Feature:
    """Flags of a run, and what else of it must be equal."""

    flags: Flags
    logged: tuple[str, ...] = ()
    """Figures of Megatron's log."""
    weights: Callable[[], None] | None = None
    """Sets the first weights; no run goes on from a checkpoint then."""


BALANCE = ("seq_load_balancing_loss", "z_loss")
EVALUATED: Flags = {"eval_interval": 3, "eval_iters": 2}
FEATURES: dict[str, Feature] = {
    "hold": Feature({}),
    "blend": Feature({"wlb_packing": "original"} | EVALUATED),
    "two-windows": Feature({"micro_batch_size": 2, "wlb_packing": "wlb"}),
    "numbers": Feature({"wlb_micro_batches": "auto"}),
    "six-layers": Feature({"num_layers": 6}),
    "windows": Feature({"window_size": "19,0"}),
    "latents": Feature(LATENT),
    "prediction": Feature({"mtp_num_layers": 2}, ("mtp_1 loss", "mtp_2 loss")),
    "own-loss": Feature({"wlb_loss": "mine.py"}),
    "experts": Feature(EXPERTS, BALANCE, set_weights),
    # Documents are cut elsewhere where other ranks share the work: they count as a whole.
    "experts-slices": Feature(EXPERTS | SLICES, BALANCE, set_weights),
    "slices": Feature(SLICES | EVALUATED),
    "windows-slices": Feature(SLICES | {"window_size": "19,0", "window_attn_skip_freq": 2}),
    "latents-slices": Feature(SLICES | LATENT),
    "own-loss-slices": Feature(SLICES | {"wlb_loss": "mine.py", "wlb_max_step_tokens": 0}),
    "six-layers-slices": Feature(SLICES | {"num_layers": 6}),
    "hybrid-slices": Feature(SLICES | {"hybrid_layer_pattern": "*-**-*-"}),
    "delta": Feature(DELTA | {"hybrid_layer_pattern": "G-*-GG-"}),
    "delta-slices": Feature(DELTA | SLICES | EVALUATED | {"hybrid_layer_pattern": "G-*-GG-"}),
    "mamba": Feature(MAMBA | {"hybrid_layer_pattern": "M-*M-M-"}),
    "mamba-slices": Feature(MAMBA | SLICES | EVALUATED | {"hybrid_layer_pattern": "M-*M-M-"}),
    # Stacks of depths count their layers from 1, as the decoder does.
    "states-ahead-slices": Feature(
        DELTA | MAMBA | SLICES | EVALUATED | {"hybrid_layer_pattern": "G-*-M-/GM/GM"},
        ("mtp_1 loss", "mtp_2 loss"),
    ),
    "no-attention-slices": Feature(MAMBA | SLICES | {"hybrid_layer_pattern": "M-M-"}),
    "hybrid-experts": Feature(
        EXPERTS | {"hybrid_layer_pattern": "*E*-E/E*", "untie_embeddings_and_output_weights": True},
        (*BALANCE, "mtp_1 loss"),
        set_weights,
    ),
    "hybrid-latents-slices": Feature(
        SLICES | LATENT | {"hybrid_layer_pattern": "+-++-", "qk_layernorm": None}
    ),
}
STATEFUL = "delta", "mamba"
UP_PROJECTED: Flags = {
    "recompute_granularity": "selective", "recompute_modules": "mla_up_proj",
}  # fmt: skip
PP4: Flags = {"pipeline_model_parallel_size": 4}
EP2: Flags = {"expert_model_parallel_size": 2}
SELECTIVE: Flags = {"recompute_granularity": "selective"}


def cut(pattern: str) -> Flags:
    return {"hybrid_layer_pattern": pattern}


TIGHT: Flags = {"wlb_memory_gib": 0.002}
"""Less than some steps need, unless they recompute, or send activations to the host."""
HOSTED: Flags = TIGHT | {"wlb_host_gib": 1}
CASES = [
    # A feature, processes, and a layout.
    ("hold", 2, PP2_VPP2),
    further("hold", 2, PP2),
    further("hold", 2, TP2_SP | {"wlb_verify_shapes": True}),
    further("hold", 2, CP2),
    further("hold", 2, DP2),
    further("hold", 8, PP2_CP2),
    further("hold", 2, PP2_VPP2 | {"overlap_p2p_communication_warmup_flush": True}),
    further("hold", 4, {
        "context_parallel_size": 4, "cp_comm_type": "a2a+p2p",
        "hierarchical_context_parallel_sizes": [2, 2],
    }),
    # Flags that want one length, or a mean over ranks: turned off.
    ("hold", 2, TP2_SP | {
        "ddp_average_in_collective": True, "cuda_graph_impl": "local", "tp_comm_overlap": True,
    }),
    *(further("hold", 2, CP2 | {"wlb_cp_sharding": sharding})
      for sharding in ("per-sequence", "per-document")),
    ("hold", 2, CP2 | {
        "wlb_cp_sharding": "hybrid", "wlb_cp_overlap_groups": 2, "wlb_verify_shapes": True,
    }),
    ("blend", 2, PP2),
    further("blend", 2, DP2),
    further("blend", 8, PP2_CP2),
    ("two-windows", 2, PP2_VPP2),
    further("two-windows", 2, {}),
    further("numbers", 2, PP2),
    ("numbers", 2, PP2_VPP2),
    further("six-layers", 4, PP4 | {
        "decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1,
    }),
    # As Megatron's own recipe has it: the first and the last chunk are without layers.
    further("six-layers", 4, PP4 | {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True, "num_virtual_stages_per_pipeline_rank": 2,
    }),
    ("six-layers", 2, PP2 | {"pipeline_model_parallel_layout": "Et*3|t||ttL"}),
    further("windows", 2, CP2),
    further("latents", 2, CP2 | UP_PROJECTED),
    further("latents", 2, TP2_SP | SELECTIVE),
    ("prediction", 2, PP2 | {"pipeline_model_parallel_layout": "Et*3|tmmL"}),
    further("prediction", 2, CP2),
    further("prediction", 2, DP2 | {"overlap_grad_reduce": True}),
    ("own-loss", 2, CP2),
    # Whole experts on ranks that divide all else.
    further("experts", 2, TP2_SP | {"expert_tensor_parallel_size": 1}),
    ("experts", 4, EP2 | PP2 | {"recompute_granularity": "selective", "recompute_modules": "moe"}),
    further("experts-slices", 4, EP2 | PP2),
    ("slices", 2, PP2_VPP2 | HOSTED),
    further("slices", 2, PP2_VPP2 | TIGHT),
    further("slices", 1, TIGHT),
    ("slices", 2, CP2 | {"wlb_slice_cache": "divided"}),
    further("slices", 4, PP2 | DP2 | {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    further("windows-slices", 2, PP2),
    further("latents-slices", 2, PP2),
    further("own-loss-slices", 2, PP2),
    further("six-layers-slices", 4, PP2 | {"decoder_last_pipeline_num_layers": 2}),
    further("experts-slices", 4,
            EP2 | PP2 | TP2_SP | {"expert_tensor_parallel_size": 1} | RECOMPUTED),
    # A GPT's checkpoint goes on in a HybridModel.
    ("hold", 2, PP2 | cut("*-*|-*-*-")),
    ("hybrid-slices", 2, PP2 | cut("*-|**|-*|-") | TIGHT),
    further("hybrid-slices", 2, PP2 | cut("*-|**|-*|-") | HOSTED),
    further("hybrid-slices", 2, CP2 | RECOMPUTED),
    further("hybrid-slices", 2, TP2_SP),
    further("hybrid-slices", 2, DP2),
    ("delta", 2, CP2),
    further("delta", 2, PP2 | cut("G-*|-GG-")),
    ("delta-slices", 2, PP2 | cut("G-|*-|GG|-") | TIGHT),
    ("mamba", 2, CP2),
    further("mamba", 2, PP2 | cut("M-*M|-M-")),
    ("mamba-slices", 2, PP2 | cut("M-|*M|-M|-") | TIGHT),
    *(further(f"{kind}-slices", 2, layout)
      for kind in STATEFUL for layout in (CP2 | RECOMPUTED, TP2_SP, DP2)),
    ("states-ahead-slices", 2, PP2 | cut("G-*-|M-/GM/GM")),
    further("states-ahead-slices", 2, CP2 | RECOMPUTED),
    further("no-attention-slices", 2, PP2 | cut("M-|M-")),
    ("hybrid-experts", 4, EP2 | PP2 | cut("*E*|-E/E*")),
    further("hybrid-experts", 2, CP2 | RECOMPUTED),
    further("hybrid-latents-slices", 2, PP2 | cut("+-|++-")),
    further("hybrid-latents-slices", 2, CP2),
]  # fmt: skip


class Alone:
    """Runs of one process with each feature, made when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.corpus = write_texts(folder / "texts", mean=4.0, spread=1.3, least=1, most=1000)
        self.other = write_texts(folder / "others", 100, seed=12)
        self._ended: dict[str, Finished] = {}

    def flags(self, name: str, folder: Path) -> Flags:
        (folder / "mine.py").write_text(FOCAL)
        blend = [0.8, self.corpus, 0.2, self.other] if name == "blend" else self.corpus
        return RUN | FEATURES[name].flags | {"data_path": blend, "wlb_metrics": "metrics"}

    def run(self, name: str) -> tuple[Path, Finished]:
        """Its folder and its end."""
        folder = self.folder / name
        if name not in self._ended:
            folder.mkdir()
            flags = self.flags(name, folder) | {"save": "ck", "save_interval": SAVED}
            run = launch(folder, 1, flags, fault=FEATURES[name].weights)
            self._ended[name] = finish(run)
        return folder, self._ended[name]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("name", "num_processes", "layout"), CASES)
def test_feature_in_a_layout_equals_one_process(
    name: str, num_processes: int, layout: Flags, alone: Alone, tmp_path: Path
) -> None:
    feature = FEATURES[name]
    folder, one = alone.run(name)
    flags, first = alone.flags(name, tmp_path) | layout, 1
    if feature.weights is None and "use_distributed_optimizer" not in layout:
        flags, first = flags | {"load": folder / "ck", "ckpt_step": SAVED}, SAVED + 1
    found = finish(launch(tmp_path, num_processes, flags, fault=feature.weights))
    assert_equal_steps(tmp_path / "metrics", folder / "metrics", first)
    for figure in feature.logged:
        # The last ones: Megatron counts the first figure of a run in the second again.
        ours, theirs = ([*map(float, logged(run, figure)[-2:])] for run in (found, one))
        assert ours == pytest.approx(theirs, rel=1e-5) and len(ours) == 2
    evaluated = [[*map(float, validations(run))] for run in (found, one)]
    assert evaluated[0] == pytest.approx(evaluated[1][-len(evaluated[0]) :], rel=ROUNDING)
    assert len(evaluated[0]) > 2 or "eval_interval" not in flags
    again, hosted = (
        sum(line.get(key, 0) for line in read_metrics(tmp_path / "metrics"))
        for key in ("recomputed_tokens", "hosted_tokens")
    )
    assert (hosted > 0) == ("wlb_host_gib" in layout)
    assert (again > 0) == ("wlb_memory_gib" in layout) or hosted > 0
    samples = [str(n * BOTH["global_batch_size"]) for n in range(first, NUM_STEPS + 1)]
    assert logged(found, "consumed samples") == samples
    anew = first > 1 and num_processes > 1
    assert ("random numbers (dropout) start anew" in found.output) == anew


RUN_ALWAYS = {case[0] for case in CASES if isinstance(case, tuple) and isinstance(case[0], str)}
OTHERS = [name for name in FEATURES if name not in ("hold", "slices")]


@pytest.mark.parametrize("name", some_of(OTHERS, *RUN_ALWAYS))
def test_feature_is_another_run(name: str, alone: Alone) -> None:
    """Negative control of the equalities above, and that documents wait."""
    (plain, _), (folder, _) = alone.run("hold"), alone.run(name)
    if "slices" in name:
        plain, _ = alone.run("slices")
    else:
        assert any(line["waiting_documents"] for line in read_metrics(plain / "metrics"))
    without, found = losses(plain / "metrics"), losses(folder / "metrics")
    assert all(found.values()) and len(found) == NUM_STEPS
    if name != "numbers":  # which mean nothing to one process
        assert abs(found[NUM_STEPS] - without[NUM_STEPS]) > 1e-5 * without[NUM_STEPS]


def record_step() -> None:
    """Leaves what the last step asks of torch.distributed, a file a rank."""
    from megatron_wlb.runtime.stepping.step import StepRunner

    right = StepRunner.run_schedule

    def run_schedule(self: Any, *args: Any, **options: Any) -> Any:
        found, program = recorded(functools.partial(right, self, *args, **options))
        Path(f"program {os.environ['RANK']}").write_bytes(pickle.dumps(program))
        return found

    StepRunner.run_schedule = run_schedule


@pytest.mark.parametrize("name", ["delta-slices", further("mamba-slices")])
def test_states_keep_nccls_rules(name: str, alone: Alone, tmp_path: Path) -> None:
    """Their exchanges stand between those of attention and the messages of the pipeline."""
    signs = FEATURES[name].flags["hybrid_layer_pattern"]
    more = PP2_CP2 | cut(f"{signs[:4]}|{signs[4:]}") | {"train_iters": 1, "eval_iters": 0}
    finish(launch(tmp_path, 4, alone.flags(name, tmp_path) | more, fault=record_step))
    programs = {r: pickle.loads((tmp_path / f"program {r}").read_bytes()) for r in range(4)}
    assert not hangs(programs)
    calls = {rank: [c for c in own if isinstance(c, Call)] for rank, own in programs.items()}
    assert {"all_gather", "send"} <= {call.parts[0].kind for call in calls[0]}
    assert not hangs(calls)
    # Negative control: a rank exchanges its heads once less.
    calls[0].remove(next(call for call in calls[0] if call.parts[0].kind == "all_to_all"))
    assert hangs(calls)


def numbers_of_steps(alone: Alone, layout: Flags) -> Iterator[int]:
    """Micro-batches of each step, where they are chosen."""
    flags = RUN | FEATURES["numbers"].flags | layout | {"data_path": alone.corpus}
    config = settings_of_script(command_line(flags))
    cost = known_cost(config, 256)
    assert cost is not None
    planner = make_planner(config, Corpora.open(config), cost, 1)
    return (len(plan.micro_batches[0]) for plan in planner.plans(NUM_STEPS))


@pytest.mark.parametrize("layout", [PP2, PP2_VPP2], ids=["pp2", "pp2-vpp2"])
def test_steps_have_unlike_numbers(alone: Alone, layout: Flags) -> None:
    """That the runs with ``numbers`` are what they seem."""
    numbers = [*numbers_of_steps(alone, layout)]
    assert len({*numbers[SAVED:]}) > 1
    assert any(number != BOTH["global_batch_size"] for number in numbers)

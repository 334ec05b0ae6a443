"""Layers that predict further ahead: in costs, memory, stages and the flags that are written."""

from __future__ import annotations

import dataclasses

from helpers.machines import H100

from megatron_wlb.cost import MemoryModel, ModelShape, Parallelism, Recompute
from megatron_wlb.cost.analytic import AnalyticModel
from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.step_costs import analytic_costs
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.split import split_of
from megatron_wlb.study.stages import balanced_layers

FLAGS = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1536 --swiglu "
    "--untie-embeddings-and-output-weights"
)
PLAIN = model_shape(parse(FLAGS.split()), 32000)
TWO = model_shape(parse([*FLAGS.split(), "--mtp-num-layers", "2"]), 32000)
LENGTHS = [4096, 300, 17]


def test_prediction_makes_the_balanced_last_stage_shorter() -> None:
    layout = Parallelism(pp_size=2)
    deep = [dataclasses.replace(shape, num_layers=48) for shape in (PLAIN, TWO)]
    plain, two = (balanced_layers(s, H100, layout, Recompute(), LENGTHS) for s in deep)
    assert sum(plain) == sum(two) == 48
    assert two[-1] < plain[-1] - 2


def test_prediction_adds_up_gradients_of_its_embedding() -> None:
    def embedding_us(shape: ModelShape, pp_size: int) -> float:
        layout = Parallelism(pp_size=pp_size)
        model = AnalyticModel(shape, Execution(layout), H100)
        return analytic_costs(
            model,
            MemoryModel(shape, Execution(layout)),
        ).embedding_us

    tied = dataclasses.replace(PLAIN, tied_embeddings=True)
    assert embedding_us(TWO, 2) == embedding_us(tied, 2) > H100.latency_us
    assert embedding_us(TWO, 1) == embedding_us(PLAIN, 2) == 0


def test_prediction_is_in_flags_that_are_written() -> None:
    layers = split_of([4, 3, 0, 1], 2, num_ahead=2).pipeline_model_parallel_layout
    assert layers == "Et*4|t*3||tmmL"
    flags = f"{FLAGS} --mtp-num-layers 2 --pipeline-model-parallel-size 2"
    config = parse([*flags.split(), "--pipeline-model-parallel-layout", str(layers)])
    assert config.parallel.split.num_ahead == 2
    assert config.parallel.split.layers(8, 2, 2) == (4, 3, 0, 1)


def test_prediction_layers_stay_in_fp8_where_last_layers_leave_it() -> None:
    flags = f"{FLAGS} --mtp-num-layers 1 --bf16 --fp8-format hybrid --first-last-layers-bf16"
    shape = model_shape(parse(flags.split()), 32000)
    assert shape.runs[-1][1].precisions is None
    ((num, layer),) = shape.predictors
    assert num == 1
    assert layer.precisions is not None
    assert layer.precisions.matrix.element_bytes == 1

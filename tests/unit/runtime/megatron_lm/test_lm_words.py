"""Command lines of ``pretrain_gpt.py`` judged without a checkout."""

from __future__ import annotations

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.runtime.megatron_lm import words

FINE = (
    "--num-layers 4 --hidden-size 768 --num-attention-heads 4 --max-position-embeddings 512 "
    "--seq-length 512 --micro-batch-size 1 --attention-dropout 0.0 --data-path a --wlb-packing hold"
)


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--data-path 0.3 a 0.7 b --fp8-param-gather --bf16",
        "--overlap-grad-reduce --use-distributed-optimizer --save out --bf16",
        "--use-distributed-optimizer --save out --dist-ckpt-optim-fully-reshardable",
        "--use-distributed-optimizer --save out --no-save-optim",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        "--cuda-graph-impl none --micro-batch-size=2 --ckpt-format torch",
        "--step-batch-size-schedule 0:2,1M:8",
        "--decrease-batch-size-if-needed",
        "--cpu-offloading-num-layers 0 --lr -1e-3",
        "--bf16 --fp8-format hybrid --fp8-margin 0 --fp8-amax-history-len 1024",
        "--bf16 --fp8-format=e4m3 --fp8-recipe mxfp8 --fp8-output-proj",
        "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --wlb-packing slim",
    ],
)
def test_words_of_what_runs_pass(more: str) -> None:
    words.check([*FINE.split(), *more.split()], 4, {})


def test_words_of_a_ramp_are_told_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    words.check([*FINE.split(), "--rampup-batch-size", "2", "2", "9"], 4, {})
    assert ["ignores it" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--softmax-type=learnable", "^--softmax-type learnable does not work"),
        ("--use-varlen-dataset", "^--use-varlen-dataset does not work"),
        ("--position-embedding-type mrope", "^--position-embedding-type mrope does not work"),
        ("--use-distributed-optimizer --save out", "^--use-distributed-optimizer does not work"),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--no-overlap-p2p-communication",
            "^--no-overlap-p2p-communication does not work",
        ),
        ("--yaml-cfg run.yaml", "^--yaml-cfg does not work .* use flags$"),
        ("--bf16 --fp8-format hybrid --transformer-impl local", "would train in bf16"),
        ("--bf16 --fp4-format e2m1", "^--fp4-format e2m1 does not work"),
        ("--tensor-model-parallel-size 3", "^4 processes do not divide"),
        ("--deterministic-mode", "NCCL_ALGO=None; set that"),
    ],
)
def test_words_of_what_the_run_refuses_are_refused(more: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        words.check([*FINE.split(), *more.split()], 4, {})


def test_words_ask_for_what_megatron_has_no_default_of() -> None:
    given = FINE.split()
    for flag in ("--num-layers", "--max-position-embeddings", "--seq-length", "--micro-batch-size"):
        at = given.index(flag)
        with pytest.raises(ConfigError, match=f"^{flag} is missing"):
            words.check([*given[:at], *given[at + 2 :]], 4, {})
    at = given.index("--data-path")
    with pytest.raises(ConfigError, match="prefix of one"):
        words.check([*given[:at], *given[at + 2 :]], 4, {})


def test_deterministic_words_take_the_algorithm_of_the_environment() -> None:
    words.check([*FINE.split(), "--deterministic-mode"], 4, {"NCCL_ALGO": "Ring"})


def test_settings_of_fp8_are_read() -> None:
    given = (
        "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --fp8-amax-history-len 9"
    )
    bf16 = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 3"
    training = words.settings([*FINE.split(), *given.split(), *bf16.split()], 8).training
    assert (training.fp8_format, training.fp8_recipe) == ("hybrid", "tensorwise")
    assert training.fp8_param_gather and training.first_last_layers_bf16
    assert training.num_layers_at_start_in_bf16 == 3 and training.num_layers_at_end_in_bf16 == 1
    assert words.settings(FINE.split(), 8).training.fp8_format is None


def test_settings_that_are_not_given_are_megatrons() -> None:
    config = words.settings([*FINE.split(), "--tensor-model-parallel-size", "2"], 8)
    assert config.model.position_embedding_type == "learned_absolute"
    assert config.model.transformer_impl == "transformer_engine"
    assert config.model.hidden_dropout == 0.1 and config.model.attention_dropout == 0
    assert config.training.global_batch_size == 4  # a micro-batch for each of DP 4
    assert config.model.ffn_hidden_size is None and not config.training.bf16
    at = FINE.split().index("--attention-dropout")
    config = words.settings([*FINE.split()[:at], *FINE.split()[at + 2 :]], 4)
    assert config.model.attention_dropout == 0.1
    with pytest.raises(ConfigError, match=r"^--attention-dropout is 1.5.*\[0, 1\)"):
        words.settings([*FINE.split(), "--attention-dropout", "1.5"], 4)
    config = words.settings([*FINE.split(), "--swiglu", "--fp16", "--global-batch-size", "16"], 8)
    assert config.model.ffn_hidden_size == 2048
    assert config.training.bf16 and config.training.global_batch_size == 16


def test_settings_that_megatron_alone_reads_are_not_judged() -> None:
    more = "--eval-iters 0 --lr-decay-style WSD --lr-wsd-decay-style linear --log-interval=0"
    assert words.settings([*FINE.split(), *more.split()], 4) == words.settings(FINE.split(), 4)
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size is 0"):
        words.settings([*FINE.split(), "--tensor-model-parallel-size", "0"], 4)

"""A step of another trainer by its own code, with and without sharing: run by torchrun, on the CPU.

``_trainers_shared.py TRAINER KIND FILE``: the ranks are stages of a pipeline (``pp``), or
context-parallel ranks (``cp``), for which FILE has what one rank wrote there.

The trainer's checkout and what it imports are on PYTHONPATH. Groups of answers to a prompt run
twice: each alone by Megatron's stock attention, and together by ``megatron_wlb``. Its own batches,
losses and schedules are called both times. Each rank prints how far gradients, log-probabilities
and what losses say are apart; and as a control how far where samples do not see what they share.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron_wlb.runtime.emulation import cpu

cpu.install()

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from helpers.stock_gpt import VOCAB_SIZE, stock_gpt  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402

from megatron_wlb.planning.balance import trees  # noqa: E402
from megatron_wlb.runtime.trainer import given_model  # noqa: E402

ANSWERS, LONGEST = 4, 40
PROMPTS = (100, 77, 90)
MAX_TOKENS = 400
TEMPERATURE = 0.7
Step = Callable[[], tuple[dict[str, float], list[torch.Tensor]]]
"""Runs a step: what it says of losses, and log-probabilities of responses on the last stage."""


def answers() -> tuple[list[torch.Tensor], list[int]]:
    """Token ids of prompts with their answers, and tokens of each answer."""
    random = torch.Generator().manual_seed(1)
    samples, lengths = [], []
    for size in PROMPTS:
        prompt = torch.randint(1, VOCAB_SIZE, (size,), generator=random)
        for _ in range(ANSWERS):
            lengths.append(int(torch.randint(3, LONGEST + 1, (1,), generator=random)))
            own = torch.randint(1, VOCAB_SIZE, (lengths[-1],), generator=random)
            samples.append(torch.cat([prompt, own]))
    return samples, lengths


def noise(lengths: list[int], seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=random) for length in lengths]


def padded(rows: list[torch.Tensor], *, left: bool = False) -> torch.Tensor:
    side = "left" if left else "right"
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)


def verl(gpt: GPTModel) -> tuple[Step, Step, Callable[[], None]]:
    import verl.workers.engine.megatron.transformer_impl as theirs
    from tensordict import TensorDict
    from verl.utils import device, seqlen_balancing
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import McoreActorConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    for module in theirs, device, seqlen_balancing:  # for a CPU verl knows no platform
        module.get_device_id = module.get_device_name = lambda: "cpu"
    samples, lengths = answers()
    pairs = list(zip(samples, lengths, strict=True))
    prompts = padded([ids[:-size] for ids, size in pairs], left=True)
    responses = padded([ids[-size:] for ids, size in pairs])
    mask = torch.cat([prompts, responses], 1) > 0

    def batch() -> TensorDict:
        given = TensorDict(
            {
                "prompts": prompts,
                "responses": responses,
                "input_ids": torch.cat([prompts, responses], 1),
                "attention_mask": mask.long(),
                "response_mask": (responses > 0).long(),
                "position_ids": (mask.cumsum(1) - 1).clamp(0),
                "old_log_probs": padded([0.1 * row - 4.1 for row in noise(lengths, 5)]),
                "advantages": padded(noise(lengths, 6)),
                "temperature": torch.full((len(samples),), TEMPERATURE),
            },
            [len(samples)],
        )
        given = left_right_2_no_padding(given)
        tu.assign_non_tensor(
            given, use_dynamic_bsz=True, max_token_len_per_gpu=MAX_TOKENS, calculate_entropy=True,
            global_batch_size=len(samples),
        )  # fmt: skip
        return given

    class Engine(theirs.MegatronEngineWithLMHead):  # type: ignore[misc]
        def __init__(self, *, packed: bool) -> None:
            self.engine_config = SimpleNamespace(
                context_parallel_size=gpt.config.context_parallel_size,
                dynamic_context_parallel=False, use_fused_kernels=False,
                pad_bshd_to_minibatch_max=False, use_remove_padding=packed, pad_to_length=False,
                entropy_from_logits_with_chunking=False,
                router_replay=SimpleNamespace(mode="disabled"),
            )  # fmt: skip
            self.model_config = SimpleNamespace(
                hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
                tokenizer=SimpleNamespace(pad_token_id=0),
                mtp=SimpleNamespace(enable=False, enable_train=False),
            )
            self.tf_config, self.enable_routing_replay = gpt.config, False
            self.module = self._build_megatron_module()

    config = McoreActorConfig(
        strategy="megatron", rollout_n=ANSWERS, ppo_micro_batch_size_per_gpu=1,
        ppo_mini_batch_size=len(samples), entropy_coeff=0.01, loss_agg_mode="token-mean",
    )  # fmt: skip

    def step(engine: Engine) -> tuple[dict[str, float], list[torch.Tensor]]:
        loss = partial(ppo_loss, config=config)
        found = engine.forward_backward_batch(batch(), loss)
        if not mpu.is_pipeline_last_stage():
            return {}, []
        log_probs = no_padding_2_padding(found["model_output"]["log_probs"], batch()).detach()
        own = [row[:length] for row, length in zip(log_probs, lengths, strict=True)]
        said = {"loss": sum(found["loss"])}
        for name in "actor/pg_loss", "actor/entropy_loss":
            said[name] = float(found["metrics"][name].aggregate())
        return said, own

    theirs.MegatronEngine._build_megatron_module = lambda self: [gpt]
    alone = Engine(packed=False)

    def together() -> Any:
        from megatron_wlb.adapters import verl_shared

        assert verl_shared.__doc__  # its import replaces what verl calls
        return step(Engine(packed=True))

    return partial(step, alone), together, lambda: None


def slime(gpt: GPTModel) -> tuple[Step, Step, Callable[[], None]]:
    from megatron.training.global_vars import set_args
    from slime.backends.megatron_utils import cp_utils, data, loss
    from slime.backends.megatron_utils import model as theirs

    from megatron_wlb.adapters.slime import build_dp_schedule
    from megatron_wlb.adapters.slime_shared import share_prefixes

    data.accelerator.device = lambda: "cpu"
    samples, lengths = answers()
    total = list(map(len, samples))
    pp_size = mpu.get_pipeline_model_parallel_world_size()
    args = Namespace(
        seq_length=512, micro_batch_size=1, decoder_seq_length=None, data_pad_size_multiplier=8,
        allgather_cp=False, loss_type="policy_loss", rollout_temperature=TEMPERATURE,
        log_probs_chunk_size=-1, entropy_coef=0.01, calculate_per_token_loss=False,
        use_rollout_logprobs=False, advantage_estimator="grpo", use_opsm=False, eps_clip=0.2,
        eps_clip_high=0.28, eps_clip_c=None, use_tis=False, get_mismatch_metrics=False,
        use_kl_loss=False, recompute_loss_function=False, enable_mtp_training=False,
        use_dynamic_batch_size=True, max_tokens_per_gpu=MAX_TOKENS, use_rollout_entropy=True,
        custom_megatron_before_train_step_hook_path=None, ci_test=False,
        custom_megatron_before_log_prob_hook_path=None, save_debug_train_data=None,
        pipeline_model_parallel_size=pp_size, num_layers=4, hidden_size=32, ffn_hidden_size=128,
        num_attention_heads=4, num_query_groups=2, kv_channels=8, group_query_attention=True,
        vocab_size=VOCAB_SIZE, num_experts=None, swiglu=True, check_for_nan_in_loss_and_grad=True,
        multi_latent_attention=False, q_lora_rank=None, use_rollout_top_p_replay=False,
        rollout_top_p=1.0,
    )  # fmt: skip
    set_args(args)

    def own_part(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """What slime has of responses on this context-parallel rank."""
        known = zip(rows, total, lengths, strict=True)
        return [cp_utils.slice_log_prob_with_cp(*each) for each in known]

    rollout = {
        "tokens": samples, "total_lengths": total, "response_lengths": lengths,
        "loss_masks": [torch.ones(length) for length in lengths],
        "log_probs": own_part([0.1 * row - 4.1 for row in noise(lengths, 5)]),
        "advantages": own_part(noise(lengths, 6)),
        "rollout_mask_sums": [torch.tensor(float(length)) for length in lengths],
    }  # fmt: skip
    gpt.zero_grad_buffer = lambda: None
    optimizer = SimpleNamespace(zero_grad=lambda: None, step=lambda: (True, 0.0, 0))
    schedule = SimpleNamespace(step=lambda increment: None)

    def step(micro_batches: list[list[int]]) -> tuple[dict[str, float], list[torch.Tensor]]:
        batches = [data.DataIterator(rollout, micro_batches)]
        number = len(micro_batches)
        known = theirs.forward_only(
            loss.get_log_probs_and_entropy, args, [gpt], batches, [number], store_prefix="own_"
        )
        batches[0].reset()
        said, _ = theirs.train_one_step(
            args, 0, 0, batches, [gpt], optimizer, schedule, [number][0], len(samples)
        )
        log_probs = []
        if known:  # on the last stage
            own = zip(known["own_log_probs"], total, lengths, strict=True)
            log_probs = [cp_utils.all_gather_with_cp(*each).detach() for each in own]
        return {k: float(v) for k, v in said.items()}, log_probs

    def together() -> Any:
        _, (parts,), _, _ = build_dp_schedule(
            args,
            {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1},
            total, global_batch_size=len(samples), rollout_indices=range(len(samples)),
            tokens=samples,
        )  # fmt: skip
        return step(parts)

    def teach() -> None:
        theirs.get_model = lambda: [gpt]
        share_prefixes(args)
        theirs.get_model()

    return partial(step, [[n] for n in range(len(samples))]), together, teach


def nemo_rl(gpt: GPTModel) -> tuple[Step, Step, Callable[[], None]]:
    # Megatron-Bridge needs TransformerEngine, which a CPU has not. It builds models.
    for name in (
        "", ".models", ".models.model_provider", ".training", ".training.config",
        ".training.state", ".training.utils", ".training.utils.packed_seq_utils",
    ):  # fmt: skip
        sys.modules[f"megatron.bridge{name}"] = mock.MagicMock()
    builder = SimpleNamespace(get_model=lambda: [gpt])
    sys.modules["nemo_rl.models.megatron.setup"] = builder  # type: ignore[assignment]
    from nemo_rl.algorithms.logits_sampling_utils import TrainingSamplingParams
    from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.megatron import data, train
    from nemo_rl.models.policy.lm_policy import Policy

    from megatron_wlb.adapters.nemo_rl_shared import pack_shared, share_prefixes

    samples, lengths = answers()
    sizes = [len(ids) for ids in samples]
    ids = padded(samples)

    def rows(values: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(values, sizes, strict=True)
        return padded([torch.nn.functional.pad(row, (n - len(row), 0)) for row, n in pairs])

    batch = BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.tensor(sizes),
        token_mask=rows([torch.ones(length) for length in lengths]),
        sample_mask=torch.ones(len(samples)),
        advantages=rows(noise(lengths, 6)),
        prev_logprobs=rows([0.1 * row - 4.1 for row in noise(lengths, 5)]),
        generation_logprobs=rows([0.1 * row - 4.1 for row in noise(lengths, 5)]),
        reference_policy_logprobs=rows([0.1 * row - 4.1 for row in noise(lengths, 7)]),
    )
    config = {"sequence_packing": {"enabled": True}, "megatron_cfg": {}}
    sampling = TrainingSamplingParams(top_k=None, top_p=1.0, temperature=TEMPERATURE)
    loss = ClippedPGLossFn(ClippedPGLossConfig())

    def step(max_tokens: int) -> tuple[dict[str, float], list[torch.Tensor]]:
        policy = SimpleNamespace(
            data_parallel_size=1,
            use_dynamic_batches=False,
            use_sequence_packing=True,
            cfg={"sequence_packing": {"logprob_mb_tokens": max_tokens}},
            sequence_packing_args={
                "algorithm": "concatenative", "sequence_length_pad_multiple": 1,
                "input_key": "input_ids", "input_lengths_key": "input_lengths",
            },
        )  # fmt: skip
        (shard,), order = Policy._shard_for_logprob(policy, batch)

        def run(post: Any, *, forward_only: bool) -> Any:
            number, _ = shard.get_microbatch_iterator_for_packable_sequences_len()
            processed = data.make_processed_microbatch_iterator(
                shard.make_microbatch_iterator_for_packable_sequences(), config, "input_lengths",
                1, 1, None, None,
            )  # fmt: skip
            return train.megatron_forward_backward(
                gpt, processed, number, 512, 1, post, forward_only=forward_only,
                global_valid_seqs=torch.tensor(float(len(samples))),
                global_valid_toks=torch.tensor(float(sum(lengths))), sampling_params=sampling,
            )  # fmt: skip

        known = run(train.LogprobsPostProcessor(config, sampling), forward_only=True)
        found = run(
            train.LossPostProcessor(
                loss,
                config,
                shard.get_microbatch_iterator_for_packable_sequences_len()[0],
                sampling_params=sampling,
            ),
            forward_only=False,
        )
        if not mpu.is_pipeline_last_stage():
            return {}, []
        said = {
            name: sum(float(one[name]) for one in found)
            for name in ("loss", "kl_penalty", "probs_ratio")
        }
        log_probs = [row for one in known for row in one["logprobs"]]
        own: dict[int, torch.Tensor] = dict(zip(order, log_probs, strict=True))
        return said, [own[n][: sizes[n]] for n in range(len(samples))]

    def teach() -> None:
        share_prefixes()
        pack_shared(pp_size=mpu.get_pipeline_model_parallel_world_size())
        builder.get_model()

    # At first a micro-batch has room for one sample.
    return partial(step, max(sizes)), partial(step, MAX_TOKENS), teach


def main() -> None:
    trainer, kind, file = sys.argv[1:]
    torch.distributed.init_process_group("gloo")
    world = torch.distributed.get_world_size()
    pp_size, cp_size = (world, 1) if kind == "pp" else (1, world)
    mpu.initialize_model_parallel(
        pipeline_model_parallel_size=pp_size, context_parallel_size=cp_size
    )
    gpt = stock_gpt()
    rows: list[int] = []

    def gradients(step: Step) -> tuple[dict[str, torch.Tensor], Any, Any]:
        gpt.zero_grad(set_to_none=True)
        rows.clear()
        said, log_probs = step()
        found = {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}
        for gradient in found.values() if cp_size > 1 else ():
            torch.distributed.all_reduce(gradient)
            gradient /= 1 if trainer == "nemo_rl" else cp_size  # as its gradients are reduced
        return found, said, log_probs

    alone, together, teach = globals()[trainer](gpt)
    forward: Callable[..., torch.Tensor] = gpt.forward

    def stock(*_: Any, **given: Any) -> torch.Tensor:
        # Causal, as TransformerEngine's attention is; and no packs, which stock attention cannot.
        rows.append(given["input_ids"].numel())
        return forward(**given | {"attention_mask": None, "packed_seq_params": None})

    gpt.forward = stock
    if cp_size > 1:
        wanted, said, log_probs, num_tokens = torch.load(file, weights_only=False)
    else:
        wanted, said, log_probs = gradients(alone)
        num_tokens = sum(rows)
        if world == 1:
            torch.save((wanted, said, log_probs, num_tokens), file)
    report: dict[str, Any] = {"tokens": num_tokens}

    def counted(**given: Any) -> torch.Tensor:
        rows.append(given["packed_seq_params"].num_tokens)
        return forward(**given)

    gpt.forward = counted
    teach()
    part_of = trees.part_of

    def apart(*given: Any) -> Any:
        spans, sharing = part_of(*given)
        return spans, sharing._replace(above=((),) * len(spans))

    for name, parts in ("together", part_of), ("control", apart):
        with mock.patch.object(given_model, "part_of", parts):
            got, own_said, own_log_probs = gradients(together)
        pairs = list(zip(own_log_probs, log_probs, strict=True))
        report[name] = {
            "rows": sum(rows),
            "gradients": max(
                float((got[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in wanted
            ),
            "said": max((abs(own_said[n] - said[n]) for n in said), default=0.0),
            "names": sorted(said),
            "log_probs": max((float((a - b).abs().max()) for a, b in pairs), default=0.0),
            "samples": len(pairs),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

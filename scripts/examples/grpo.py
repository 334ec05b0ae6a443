#!/usr/bin/env python3
r"""Reinforcement learning with a loss of one's own: GRPO on a game that a tiny model learns.

    torchrun --nproc-per-node 2 scripts/examples/grpo.py --pipeline-model-parallel-size 2 \
        --wlb-packing slim

A prompt is one token, or ``--prompt`` of them. A response is right where each token is the one
before it, plus one; its reward is the share of right tokens. Each iteration draws responses from
the model, which end where the model says so and are of unlike lengths. Their log-probabilities are
noted, and two updates run over the same plan, with GRPO's clipped ratio and advantages within each
prompt's group. With ``--share`` a long prompt runs once in a micro-batch for all its responses.

It runs on CPUs in a minute. All other flags are those of ``SampleTrainer``
(``docs/samples.md``), and layouts and packings change nothing but the time.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_wlb.runtime.rank_main import rank_main

MODEL = """
--wlb-device cpu --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 0.003
--lr-decay-style constant --weight-decay 0
"""
VOCABULARY, END = 16, 15
Samples = list[npt.NDArray[np.int64]]


def generate(
    trainer: Any, prompts: npt.NDArray[np.int64], longest: int, seed: int, shared: bool
) -> Samples:
    """Draws a response to each prompt, token by token; every rank has all of them."""
    import torch

    samples = list(prompts)
    drawn = np.random.default_rng(seed).gumbel(size=(longest, len(samples), VOCABULARY))
    for noise in drawn:
        is_open = [n for n, sample in enumerate(samples) if sample[-1] != END]
        if not is_open:
            break
        chosen = torch.zeros(len(samples), dtype=torch.int64)

        def last_logits(batches, model, chosen=chosen, is_open=is_open, noise=noise):
            batch = next(batches)
            output = model(
                input_ids=batch.tokens,
                position_ids=batch.position_ids,
                attention_mask=None,
                packed_seq_params=batch.packed_seq_params,
            )

            def choose(logits):
                row = 0
                for span in batch.plan.spans:
                    row += span.length
                    if span.stop == span.document.length:
                        sample = is_open[span.document.number]
                        scores = logits[0, row - 1, :VOCABULARY].double().numpy() + noise[sample]
                        chosen[sample] = int(scores.argmax())
                return logits.sum(), torch.tensor(1, dtype=torch.int), None

            return output, choose

        batch = trainer.batch([samples[n] for n in is_open], shared=shared)
        trainer.forward(batch, last_logits)
        torch.distributed.all_reduce(chosen)
        for n in is_open:
            samples[n] = np.append(samples[n], chosen[n].item())
    return samples


def reward(response: npt.NDArray[np.int64]) -> float:
    """The share of tokens that count on from the one before; 0 for an empty response."""
    return float((np.diff(response) == 1).mean()) if len(response) > 2 else 0.0


def train(args: argparse.Namespace, flags: list[str]) -> None:
    import torch

    from megatron_wlb import SampleTrainer

    trainer = SampleTrainer([*MODEL.split(), "--vocab-size", str(VOCABULARY), *flags])
    if trainer.layout.tp_size * trainer.layout.cp_size > 1:
        raise SystemExit("this example draws tokens with TP 1 and CP 1; training takes any layout")
    random = np.random.default_rng(args.seed)
    for iteration in range(args.iterations):
        last = random.integers(0, VOCABULARY - 4, (args.prompts, 1)).repeat(args.group, axis=0)
        prompts = (last + np.arange(1 - args.prompt, 1)) % (VOCABULARY - 4)
        drawn = args.longest, args.seed + iteration, args.share
        samples = generate(trainer, prompts, *drawn)
        before_response = args.prompt - 1
        rewards = np.array([reward(sample[before_response:]) for sample in samples])
        rewards = rewards.reshape(-1, args.group)
        spread = rewards.std(axis=1, keepdims=True) + 1e-4
        advantages = torch.from_numpy(
            ((rewards - rewards.mean(axis=1, keepdims=True)) / spread).ravel().astype(np.float32)
        )
        # A sample's tokens count 1 together: the loss is a mean over samples.
        responses = [len(sample) - args.prompt for sample in samples]
        weights = [np.repeat([0.0, 1 / number], [args.prompt, number]) for number in responses]
        batch = trainer.batch(samples, weights, shared=args.share)
        starts = torch.tensor(np.cumsum([0, *map(len, samples)])[:-1])
        before = torch.from_numpy(np.concatenate(trainer.log_probs(batch)))

        def grpo(log_probs, targets, before=before, starts=starts, advantages=advantages):
            old = before[starts[targets.samples] + targets.positions]
            ratio, gain = (log_probs - old).exp(), advantages[targets.samples]
            return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)

        steps = [trainer.step(batch, grpo) for _ in range(args.epochs)]
        if torch.distributed.get_rank() == 0:
            print(
                f"iteration {iteration}: reward {rewards.mean():.3f}, {len(samples)} samples of "
                f"{min(map(len, samples))} to {max(map(len, samples))} tokens, of "
                f"{sum(map(len, samples))} ran {batch.plan.num_tokens}, losses "
                f"{' '.join(f'{loss:.4f}' for loss, _ in steps)}",
                flush=True,
            )
    trainer.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=6, help="of an iteration")
    parser.add_argument("--prompt", type=int, default=1, help="tokens of each prompt")
    parser.add_argument("--share", action="store_true", help="run what samples share once")
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--longest", type=int, default=24, help="tokens of a response at most")
    parser.add_argument("--epochs", type=int, default=2, help="updates over each batch")
    parser.add_argument("--seed", type=int, default=1)
    args, flags = parser.parse_known_args()
    return rank_main(lambda: train(args, flags))


if __name__ == "__main__":
    sys.exit(main())

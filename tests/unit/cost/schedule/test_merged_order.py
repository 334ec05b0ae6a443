"""Replicas that run their first chains together never wait for ever, whatever else each runs."""

from __future__ import annotations

from random import Random

import pytest

from megatron_wlb.cost.schedule.order import Action, sliced

DP_SIZE = 4
BLOCKS = ((0, 1, 2, 3), (0, 1), (2, 3))


def runs_to_its_end(blocks: list[tuple[int, ...]], chains: list[list[int]], pp_size: int) -> bool:
    """Whether all actions run, where one of several replicas runs on all of them at once.

    ``blocks`` are those of the merged micro-batches; each replica's first chain are its own.
    """
    merged = [[m for m, block in enumerate(blocks) if rank in block] for rank in range(DP_SIZE)]
    left = {
        (rank, stage): list(reversed(actions))
        for rank in range(DP_SIZE)
        for stage, actions in enumerate(sliced(pp_size, chains[rank]))
    }
    done: set[tuple[int, int, Action]] = set()

    def is_next(rank: int, stage: int, action: Action) -> bool:
        """Whether the stage is at this action, and has what it needs of another stage."""
        actions = left[rank, stage]
        source = stage + (-1 if action.kind == "F" else 1)
        has = not 0 <= source < pp_size or (rank, source, action) in done
        return bool(actions) and actions[-1] == action and has

    while True:
        before = len(done)
        for (rank, stage), actions in left.items():
            if not actions:
                continue
            action, own = actions[-1], merged[rank]
            together = [(rank, action)]
            if action.micro_batch < len(own):
                number = own[action.micro_batch]
                together = [
                    (peer, Action(action.kind, 0, merged[peer].index(number)))
                    for peer in blocks[number]
                ]
            if all(is_next(peer, stage, its) for peer, its in together):
                for peer, _ in together:
                    done.add((peer, stage, left[peer, stage].pop()))
        if len(done) == before:
            return not any(left.values())


@pytest.mark.parametrize("seed", range(40))
def test_replicas_that_run_together_come_to_an_end(seed: int) -> None:
    random = Random(seed)
    blocks = sorted((random.choice(BLOCKS) for _ in range(random.randint(1, 6))), key=BLOCKS.index)
    chains = []
    for rank in range(DP_SIZE):
        num = sum(rank in block for block in blocks)
        own = [random.choice((1, 1, 2, 7)) for _ in range(random.randint(0 if num else 1, 6))]
        chains.append([num, *own] if num else own)
    assert runs_to_its_end(blocks, chains, pp_size=random.choice((1, 2, 4)))


def test_replicas_with_chains_of_their_own_wait_for_ever() -> None:
    """Why what replicas run together is one chain on each: their backwards come in one order."""
    blocks = [(0, 1, 2, 3)] * 2
    assert runs_to_its_end(blocks, [[2, 3], [2], [2, 1], [2]], 2)
    assert not runs_to_its_end(blocks, [[1, 1, 3], [2], [2, 1], [2]], 2)

"""Strategies as data: the layout of each model replica of a step, its ranks, and its text form.

A *scheme* is how one replica is divided (Hydraulis §2.2), a *strategy* the replicas of a step.
Replicas may be unlike, ranks may be idle. As text::

    tp8pp2:128k+2*tp4cp2:32k        a replica of 16 ranks that takes documents up to 128K tokens,
                                    and two of 8 ranks for documents up to 32K
    tp2:4096@0-1+tp2:4096@6-7       the same with ranks given; both ends are meant
    tp2pp4sliced:128k               a pipeline that cuts long documents into slices

Sizes of 1 are left off; ``tp1`` is one rank alone. Without ``@`` ranks are those of :func:`placed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import yaml

from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text
from megatron_wlb.planning.balance.replica_costs import Scheme
from megatron_wlb.reading import (
    MAX_SIZE,
    MOST_DEVICES,
    check_names,
    listed,
    read_mapping,
    shown,
    whole_number,
)

_K = 1024
_TERM = re.compile(
    r"(?:(\d{1,9})\*)?((?:(?:tp|cp|pp|vpp)\d{1,9})+(?:sliced)?):(\d{1,9})(k?)(?:@([\d,-]+))?"
)
_EXAMPLE = "give one such as tp8pp2:128k+2*tp4cp2:32k"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of a run: ranks ``[n · devices_per_node, (n + 1) · devices_per_node)`` are node
    ``n``. Raises :class:`ConfigError` for a size below 1.
    """

    num_devices: int
    devices_per_node: int

    def __post_init__(self) -> None:
        for f in fields(self):
            whole_number(f"cluster: {f.name}", getattr(self, f.name), 1, MOST_DEVICES)

    def node(self, rank: int) -> int:
        return rank // self.devices_per_node


Layout: TypeAlias = tuple[Scheme, tuple[int, ...]]
"""A scheme, and the ranks that it is divided over."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One model replica of a step."""

    scheme: Scheme
    max_tokens: int
    """S_max: the longest micro-batch, so also the longest document, that its memory holds."""
    ranks: tuple[int, ...]
    """Global ranks ``[PP][CP][TP]``, the last index innermost."""

    @property
    def layout(self) -> Layout:
        """What its models depend on."""
        return self.scheme, self.ranks

    @property
    def kind(self) -> tuple[Scheme, int]:
        """What replicas have in common that can change places."""
        return self.scheme, self.max_tokens

    @property
    def stages(self) -> list[list[int]]:
        """The ranks of each pipeline rank."""
        inner = len(self.ranks) // self.scheme.pp_size
        return [list(self.ranks[at : at + inner]) for at in range(0, len(self.ranks), inner)]


@dataclass(frozen=True)
class Strategy:
    """The replicas of a step; ranks that are in none are idle in it.

    Raises :class:`ConfigError` without replicas, for ranks that the cluster lacks or that two
    replicas have, for a replica with more or fewer ranks than its scheme asks for, and for
    tensor-parallel ranks in several nodes.
    """

    cluster: Cluster
    replicas: tuple[Replica, ...]

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ConfigError(f"a strategy has no replicas; {_EXAMPLE}")
        owners: dict[int, int] = {}
        for number, replica in enumerate(self.replicas):
            scheme, name = replica.scheme, f"replica {number} ({replica.scheme})"
            whole_number(f"{name}: max_tokens", replica.max_tokens, scheme.length_multiple)
            if len(replica.ranks) != scheme.num_ranks:
                raise ConfigError(
                    f"{name} has {len(replica.ranks)} ranks, but needs {scheme.num_ranks}; give "
                    "as many"
                )
            for rank in replica.ranks:
                whole_number(f"{name}: rank", rank, 0, self.cluster.num_devices - 1)
                if rank in owners:
                    raise ConfigError(
                        f"rank {rank} is in replicas {owners[rank]} and {number}; give it to one"
                    )
                owners[rank] = number
            for group in _groups(replica.ranks, scheme.tp_size):
                nodes = {self.cluster.node(rank) for rank in group}
                if len(nodes) > 1:
                    raise ConfigError(
                        f"{name} has tensor-parallel ranks {_ranges(group)} in {len(nodes)} nodes "
                        f"of {self.cluster.devices_per_node} devices; keep them in one"
                    )

    @classmethod
    def of(cls, cluster: Cluster, kinds: Iterable[tuple[Scheme, int]]) -> Strategy:
        """Places replicas of these ``(scheme, max_tokens)``, in their order, by :func:`placed`."""
        kinds = tuple(kinds)
        ranks = placed(cluster, [scheme for scheme, _ in kinds])
        return cls(
            cluster, tuple(Replica(*kind, own) for kind, own in zip(kinds, ranks, strict=True))
        )

    @classmethod
    def parse(cls, text: str, cluster: Cluster) -> Strategy:
        """Reads the text form. Raises :class:`ConfigError` for none, or what cannot be placed."""
        kinds: list[tuple[Scheme, int]] = []
        given: list[tuple[int, ...]] = []
        for term in text.split("+"):
            found = _TERM.fullmatch(term)
            if found is None:
                raise ConfigError(
                    f"strategy {shown(text)}: {shown(term)} is not a replica; {_EXAMPLE}"
                )
            count, scheme, tokens, k, ranks = found.groups()
            num = whole_number(
                "strategy: number of replicas", int(count or 1), 1, cluster.num_devices
            )
            if ranks and num > 1:
                raise ConfigError(
                    f"strategy {shown(text)}: {num} replicas have the ranks of one, {ranks}; "
                    "write each for itself"
                )
            max_tokens = whole_number("strategy: longest document", int(tokens), 1, MAX_SIZE)
            kinds += [(Scheme.parse(scheme), max_tokens * (_K if k else 1))] * num
            if ranks:
                given.append(_ranks(ranks))
        if not given:
            return cls.of(cluster, kinds)
        if len(given) < len(kinds):
            raise ConfigError(
                f"strategy {shown(text)}: {len(given)} of {len(kinds)} replicas have ranks; give "
                "them to all or none"
            )
        pairs = zip(kinds, given, strict=True)
        return cls(cluster, tuple(Replica(*kind, ranks) for kind, ranks in pairs))

    def __str__(self) -> str:
        kinds = [replica.kind for replica in self.replicas]
        try:
            default = self == Strategy.of(self.cluster, kinds)
        except ConfigError:
            default = False
        if not default:
            return "+".join(f"{kind_text(*r.kind)}@{_ranges(r.ranks)}" for r in self.replicas)
        counted = [(kind, len(list(same))) for kind, same in groupby(kinds)]
        return "+".join(
            f"{num}*{kind_text(*k)}" if num > 1 else kind_text(*k) for k, num in counted
        )

    @property
    def key(self) -> str:
        """All that ranks must agree on: the text, and the cluster that it is placed on."""
        return f"{self}/{self.cluster.num_devices}/{self.cluster.devices_per_node}"

    @cached_property
    def max_tokens(self) -> int:
        """The longest document that any of its replicas takes."""
        return max(replica.max_tokens for replica in self.replicas)

    @cached_property
    def kinds(self) -> dict[tuple[Scheme, int], tuple[int, ...]]:
        """Numbers of the replicas of each kind, the kind for the longest documents first."""
        found: dict[tuple[Scheme, int], list[int]] = {}
        for number, replica in enumerate(self.replicas):
            found.setdefault(replica.kind, []).append(number)
        ordered = sorted(found.items(), key=lambda item: (-item[0][1], item[1]))
        return {kind: tuple(numbers) for kind, numbers in ordered}


def placed(cluster: Cluster, schemes: Sequence[Scheme]) -> list[tuple[int, ...]]:
    """Finds ranks for each replica: TP in a node, CP beside it, PP outermost.

    Blocks of TP · CP ranks, or of TP where those are more than a node has, go to the first node
    with room, the largest first. Raises :class:`ConfigError` where TP is more than a node, or no
    node has room.
    """
    whole, rest = divmod(cluster.num_devices, cluster.devices_per_node)
    sizes = [cluster.devices_per_node] * whole + ([rest] if rest else [])
    used = [0] * len(sizes)
    ranks: list[tuple[int, ...]] = [()] * len(schemes)
    # A block that fills nodes leaves no gap for smaller ones behind it.
    order = sorted(range(len(schemes)), key=lambda n: (-_block(schemes[n], cluster), n))
    for number in order:
        scheme, block = schemes[number], _block(schemes[number], cluster)
        own: list[int] = []
        for _ in range(scheme.num_ranks // block):
            node = next((n for n, size in enumerate(sizes) if size - used[n] >= block), None)
            if node is None:
                _no_room(cluster, schemes, scheme, block)
            first = node * cluster.devices_per_node + used[node]
            own += range(first, first + block)
            used[node] += block
        ranks[number] = tuple(own)
    return ranks


def write_strategies(path: Path, strategies: Sequence[Strategy]) -> None:
    """Writes strategies of one cluster as YAML; the inverse of :func:`read_strategies`."""
    cluster = strategies[0].cluster
    content = {
        "num_devices": cluster.num_devices,
        "devices_per_node": cluster.devices_per_node,
        "strategies": [str(strategy) for strategy in strategies],
    }
    write_text(path, yaml.safe_dump(content, sort_keys=False))


def read_strategies(path: str | Path) -> tuple[Strategy, ...]:
    """Reads strategies of a run. Raises :class:`ConfigError`, with the path, for what is none."""
    content = read_mapping(path, "strategies", "give a file as wlb plan --strategies writes it")
    try:
        return _of_mapping(content)
    except ConfigError as error:
        raise ConfigError(f"strategies {path}: {error}") from None


def _of_mapping(content: dict[str, Any]) -> tuple[Strategy, ...]:
    names = [*(f.name for f in fields(Cluster)), "strategies"]
    check_names("", "entry", content, names, names)
    cluster = Cluster(*(whole_number(name, content[name], 1, MOST_DEVICES) for name in names[:2]))
    texts = listed("strategies", content["strategies"])
    if not texts:
        raise ConfigError(f"there are no strategies; {_EXAMPLE}")
    return tuple(Strategy.parse(str(text), cluster) for text in texts)


def _block(scheme: Scheme, cluster: Cluster) -> int:
    """Ranks of a scheme that go to one node together."""
    inner = scheme.tp_size * scheme.cp_size
    return inner if inner <= cluster.devices_per_node else scheme.tp_size


def _no_room(cluster: Cluster, schemes: Sequence[Scheme], scheme: Scheme, block: int) -> NoReturn:
    if block > cluster.devices_per_node:
        raise ConfigError(
            f"scheme {scheme} has TP {scheme.tp_size}, above the {cluster.devices_per_node} "
            "devices of a node; use less TP and more CP or PP"
        )
    needed = sum(one.num_ranks for one in schemes)
    raise ConfigError(
        f"{len(schemes)} replicas need {needed} ranks of {cluster.num_devices}, and no node of "
        f"{cluster.devices_per_node} has {block} left for {scheme}; leave replicas out"
    )


def _groups(ranks: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ranks[at : at + size] for at in range(0, len(ranks), size)]


def kind_text(scheme: Scheme, max_tokens: int) -> str:
    """A replica as text: its scheme and how long documents may be."""
    k, rest = divmod(max_tokens, _K)
    return f"{scheme}:{max_tokens}" if rest else f"{scheme}:{k}k"


def _ranges(ranks: Sequence[int]) -> str:
    """Ranks as text, runs of neighbours as ``first-last``."""
    starts = [0, *(n for n, (a, b) in enumerate(pairwise(ranks), start=1) if b != a + 1)]
    runs = [ranks[a:b] for a, b in pairwise([*starts, len(ranks)])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _ranks(text: str) -> tuple[int, ...]:
    ranks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if found is None:
            raise ConfigError(f"{shown(part)} is not a range of ranks; give one such as 0-7,12")
        first = whole_number("rank", int(found[1]), 0, MOST_DEVICES)
        last = whole_number("rank", int(found[2] or first), first, MOST_DEVICES)
        ranks += range(first, last + 1)
    return tuple(ranks)

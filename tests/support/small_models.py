"""Makes small random Hugging Face models of every family, with tokenizers, as complete folders."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, XLMRobertaTokenizer

from qrag_jax.models.files.model_folder import open_tensors
from tests.support import torch_gte as torch_gte_classes

# A model of each family: large enough that mistakes show, and that a row of 20 tokens fits.
SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
SHORT = {"intermediate_size": 40, "max_position_embeddings": 24}  # of XLM-R's rows can use 22
GROUPED = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _small(
    kind: str, form: str, fixed: dict[str, Any], seed: int = 0, noise: float = 0.2, **sizes: Any
) -> Any:
    """A random model of Hugging Face's classes; biases and norms, too, are not 0 and 1."""
    source: Any = torch_gte_classes if kind == "New" else transformers
    settings = getattr(source, f"{kind}Config")(**(SMALL | fixed | sizes))
    settings._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(source, f"{kind}{form}")
    has_pooler = "add_pooling_layer" in inspect.signature(model).parameters
    made = model(settings, **({"add_pooling_layer": False} if has_pooler else {})).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return made


_XLM_R = {**SHORT, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
_ROBERTA = _XLM_R | {"type_vocab_size": 2, "hidden_act": "gelu_new"}
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_QWEN3 = {**GROUPED, "head_dim": 16, "intermediate_size": 48, "rope_parameters": _ROPE}
_MODERNBERT = {
    "local_attention": 8,  # a global layer, then local ones that see 4 tokens
    "pad_token_id": 260,
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 258),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 259),
}
_MPNET = {"intermediate_size": 40, "layer_norm_eps": 1e-5}


def numpy_tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Copies of the weights under their names, each once."""
    return {name: array.detach().numpy().copy() for name, array in model.named_parameters()}


def write_tokenizer(folder: Path) -> None:
    """Writes a real word-level tokenizer, so that the folder is complete."""
    vocab = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ("pad", "unk", "cls", "sep")
    special = {f"{name}_token": f"[{name.upper()}]" for name in names}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


QWEN_END = "<|endoftext|>"


def write_bpe_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE tokenizer like Qwen3-Embedding's, which knows all bytes and "the".

    It has no [CLS]. A text ends with `QWEN_END`, while the eos_token is the end of a chat turn.
    """
    tokenizer = _bytes_and_the()
    tokenizer.add_special_tokens([QWEN_END, "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {QWEN_END}", special_tokens=[(QWEN_END, tokenizer.token_to_id(QWEN_END))]
    )
    special = {"pad_token": QWEN_END, "eos_token": "<|im_end|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_modernbert_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE tokenizer like ModernBERT's, whose rows are [CLS] text [SEP].

    Its special tokens have the ids from 258 on.
    """
    names = ("cls", "sep", "pad", "unk", "mask")
    special = {f"{name}_token": f"[{name.upper()}]" for name in names}
    tokenizer = _bytes_and_the()
    tokenizer.add_special_tokens([*special.values()])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _bytes_and_the() -> Tokenizer:
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {letter: i for i, letter in enumerate([*letters, "th", "the"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_unigram_tokenizer(folder: Path) -> None:
    """Writes a unigram tokenizer with XLM-R's special tokens and ids: <s> 0, <pad> 1, </s> 2."""
    letters = [chr(ord("a") + i) for i in range(26)]
    words = ["▁", "▁the", "▁query", "▁passage", ":", "▁moth", "th", *letters, ".", "?"]
    pieces = [(piece, -1.0 - 0.1 * i) for i, piece in enumerate(words)]
    special = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    XLMRobertaTokenizer(vocab=[*special, *pieces, ("<mask>", 0.0)]).save_pretrained(folder)


# Family → its model, its tokenizer, and a vocabulary size that holds the tokenizer's tokens.
FAMILIES: dict[str, tuple[tuple[str, str, dict[str, Any]], Callable[..., Any], int]] = {
    "bert": (("Bert", "Model", SHORT), write_tokenizer, 60),
    "xlm-roberta": (("XLMRoberta", "Model", _XLM_R), write_unigram_tokenizer, 60),
    "qwen3": (("Qwen3", "ForCausalLM", _QWEN3), write_bpe_tokenizer, 264),  # `.model` is the trunk
    "new": (("New", "Model", {"hidden_dropout_prob": 0.0}), write_unigram_tokenizer, 60),
    "modernbert": (("ModernBert", "Model", _MODERNBERT), write_modernbert_tokenizer, 264),
    "mpnet": (("MPNet", "Model", _MPNET), write_unigram_tokenizer, 60),
    "nomic_bert": (("NomicBert", "Model", {"pad_token_id": 1}), write_unigram_tokenizer, 60),
    "roberta": (("Roberta", "Model", _ROBERTA), write_unigram_tokenizer, 60),
}
# Further forms of a decoder: its classes of Hugging Face, and the fields of its config.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"tie_word_embeddings": False}),
    "llama": ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama3": ("Llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    "llama3-head": ("Llama", {"head_dim": 6, "rope_parameters": LLAMA3}),
}


def torch_decoder(name: str, **sizes: Any) -> Any:
    """The small random causal model of a name of `DECODERS`; its token 5 ends a text."""
    kind, fields = DECODERS[name]
    fixed = {**GROUPED, "vocab_size": 264, "intermediate_size": 48, "eos_token_id": 5, **fields}
    return _small(kind, "ForCausalLM", fixed, **sizes)


def small_model(family: str, **sizes: Any) -> Any:
    """The small random model of a family."""
    model, _, vocab = FAMILIES[family]
    return _small(*model, **({"vocab_size": vocab} | sizes))


def torch_trunk(family: str, **sizes: Any) -> Any:
    """The trunk of the small model that `write_small_model` writes."""
    made = small_model(family, **sizes)
    return made.model if family == "qwen3" else made


def write_small_model(family: str, folder: Path, **sizes: Any) -> Path:
    """Writes the complete folder of a small random model of the family; returns the folder."""
    small_model(family, **sizes).save_pretrained(folder)
    FAMILIES[family][1](folder)
    return folder


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All weights of a folder, read into memory."""
    return {name: np.asarray(tensor) for name, tensor in open_tensors(folder).items()}

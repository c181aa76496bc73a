"""Turns a GGUF file of a Llama with a byte-level BPE into a folder in Hugging Face's layout.

llama.cpp turns neighbouring entries of a head together, Hugging Face those that are half a head
apart. So GGUF holds the rows of queries and keys in another order, which is undone here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from qrag_jax.errors import InputError
from qrag_jax.models.files.gguf import GGUFFile
from qrag_jax.models.files.model_folder import write_folder
from qrag_jax.models.files.shards import Size
from qrag_jax.models.files.weight_names import expected_shapes
from qrag_jax.models.pretrained_lm import GENERATION, table_of
from qrag_jax.models.trunks.llama import LlamaConfig
from qrag_jax.models.trunks.qwen3 import Qwen3
from qrag_jax.runtime.whole_files import write_whole

_LLAMA = "llama"
_HEAD = "output.weight"  # absent where the word table is the head
_SPECIAL, _ADDED = 3, 4  # in tokenizer.ggml.token_type: CONTROL and USER_DEFINED
# How texts are cut into words, by tokenizer.ggml.pre. Each digit is a word; the rest is GPT-2's.
_CUTS = {"smollm": (pre_tokenizers.Digits(individual_digits=True),)}


def write_llama_folder(source: GGUFFile, out: Path) -> None:
    """Writes a model's folder: float32 weights, configs, and tokenizer with its chat template.

    Tensors are dequantised one at a time.

    Args:
        source: the model.
        out: folder to write, created if it does not exist; files of the same names are replaced.
    """
    architecture = source.field("general.architecture", str)
    if architecture != _LLAMA:
        raise InputError(f"{source.path}: holds a model of type {architecture!r}, not {_LLAMA!r}.")
    config, tokenizer = _config(source), _tokenizer(source)
    tokenizer_config = _tokenizer_config(source)
    names = _names_in_gguf(source, config)
    sizes = {name: Size(source.shape(there), np.dtype("f4")) for name, there in names.items()}
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(out / "tokenizer_config.json", tokenizer_config)
    ends = {name: id for name, id in config.items() if name.endswith("_token_id")}
    _write_json(out / GENERATION, ends)
    arrays = _arrays(source, names, config)
    write_folder(sizes, arrays, config, tokenizer_files_from=out, out=out)


def _config(source: GGUFFile) -> dict[str, Any]:
    def size(name: str) -> int:
        return source.field(f"{_LLAMA}.{name}", int)

    def number(name: str) -> float:
        # Stored in 32 bits: 1e-5 comes as 9.999999747378752e-06.
        return float(str(np.float32(source.field(f"{_LLAMA}.{name}", float))))

    heads, width = size("attention.head_count"), size("embedding_length")
    return {
        "model_type": _LLAMA,
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(source.field("tokenizer.ggml.tokens", list)),
        "hidden_size": width,
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv"),
        "head_dim": size("rope.dimension_count"),
        "intermediate_size": size("feed_forward_length"),
        "hidden_act": "silu",
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base"),
        "tie_word_embeddings": _HEAD not in source.stored,
        "torch_dtype": "float32",
        "bos_token_id": source.field("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": source.field("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": source.field("tokenizer.ggml.padding_token_id", int),
    }


def _names_in_gguf(source: GGUFFile, config: Mapping[str, Any]) -> dict[str, str]:
    """Hugging Face's names of all weights → those in the file, which must be just these."""
    import gguf

    own_head = not config["tie_word_embeddings"]
    trunk = Qwen3(LlamaConfig.from_dict(config, str(source.path)), own_head=own_head)
    shapes = expected_shapes(table_of(_LLAMA), trunk)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    names = {name: f"{table.get_name(name, ('.weight',))}" for name in shapes}
    problems = [f"{each} is missing" for each in names.values() if each not in source.stored]
    problems += [
        f"{each} has no place" for each in source.stored if each not in set(names.values())
    ]
    problems += [
        f"{there} has shape {source.shape(there)}, expected {shapes[name]}"
        for name, there in names.items()
        if there in source.stored and source.shape(there) != shapes[name]
    ]
    if problems:
        raise InputError(
            f"{source.path}: the tensors do not fit the metadata: {problems[0]}"
            f"{f', and {len(problems) - 1} more' if problems[1:] else ''}."
        )
    return names


def _arrays(
    source: GGUFFile, names: Mapping[str, str], config: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    heads_of = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, there in names.items():
        array = source.tensor(there)
        heads = heads_of.get(name.split(".")[-2])
        yield name, array if heads is None else _halves_apart(array, heads)


def _halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows `[heads * 2 n, in]` whose pairs are neighbours → rows whose pairs are n apart."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(source: GGUFFile) -> tokenizers.Tokenizer:
    kind = source.field("tokenizer.ggml.model", str), source.field("tokenizer.ggml.pre", str)
    if kind[0] != "gpt2" or kind[1] not in _CUTS:
        raise InputError(
            f"{source.path}: has a tokenizer of the kind {kind}; only byte-level ones ('gpt2') "
            f"are read that cut texts as one of {', '.join(_CUTS)}."
        )
    tokens = source.field("tokenizer.ggml.tokens", list)
    merges = [tuple(each.split(" ")) for each in source.field("tokenizer.ggml.merges", list)]
    types = source.field("tokenizer.ggml.token_type", list)
    vocabulary = {token: id for id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise InputError(
            f"{source.path}: has {len(tokens)} tokens, {len(vocabulary)} different ones, and "
            f"{len(types)} types of tokens; the three numbers must be equal."
        )
    try:
        made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:  # the library's bindings raise the bare class
        raise InputError(f"{source.path}: its merges make no tokenizer ({error}).") from None
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*_CUTS[kind[1]], pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    for token, type_ in zip(tokens, types, strict=True):
        added = AddedToken(token, normalized=False, special=type_ == _SPECIAL)
        if type_ == _SPECIAL:
            made.add_special_tokens([added])
        elif type_ == _ADDED:
            made.add_tokens([added])
    return made


def _tokenizer_config(source: GGUFFile) -> dict[str, Any]:
    tokens = source.field("tokenizer.ggml.tokens", list)
    marks = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {
        name: source.fields.get(f"tokenizer.ggml.{there}_token_id") for name, there in marks.items()
    }
    wrong = [id for id in ids.values() if id is not None and not 0 <= id < len(tokens)]
    if wrong:
        raise InputError(f"{source.path}: marks token {wrong[0]}, but has {len(tokens)} tokens.")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[id] for name, id in ids.items() if id is not None},
        "model_max_length": source.field(f"{_LLAMA}.context_length", int),
        "clean_up_tokenization_spaces": False,
        "chat_template": source.field("tokenizer.chat_template", str),
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2) + "\n")

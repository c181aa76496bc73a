"""What sentence-transformers keeps beside a model: pooling, normalisation, prompts, longest row."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers.processors import TemplateProcessing

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.encoders.model_files import read_json
from qrag_jax.encoders.text_encoder import CLS, LAST, MEAN
from qrag_jax.errors import InputError

MODULES = "modules.json"
TRANSFORMER_CONFIG = "sentence_bert_config.json"
MODEL_CONFIG = "config_sentence_transformers.json"
POOLING_NAMES = {MEAN: "mean", LAST: "lasttoken", CLS: "cls"}  # ours → theirs
# The flags of folders written before there was the field `pooling_mode`.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
CLASSES = "sentence_transformers.models."  # read by every release of the library


@dataclasses.dataclass(frozen=True)
class Published:
    """How a model was published; what its folder does not say is as the library has it.

    Attributes:
        pooling: a name of `text_encoder.POOLINGS`.
        max_tokens: longest row, special tokens and prompt counted; None: not said.
        state_prefix, chunk_prefix: prompts of queries and of documents (passages).
    """

    pooling: str
    normalise: bool
    max_tokens: int | None
    state_prefix: str
    chunk_prefix: str


def read_published(folder: Path) -> Published | None:
    """Reads the folder's sentence-transformers files; None if it has no `modules.json`.

    Raises:
        InputError: a file is broken, or a module or a pooling is not one this package computes.
    """
    if not (folder / MODULES).is_file():
        return None
    modules: dict[str, str] = {}
    for entry in read_json(folder / MODULES, list):
        if not isinstance(entry, dict) or not {"type", "path"} <= entry.keys():
            raise InputError(f"{folder / MODULES}: not a list of objects with type and path.")
        modules[str(entry["type"]).rpartition(".")[2]] = str(entry["path"])
    unknown = modules.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise InputError(
            f"{folder / MODULES}: the module {', '.join(sorted(unknown))} is not computed here, "
            "only Transformer, Pooling and Normalize; set config.encoder.as_published to False and "
            "the pooling in config.encoder.pooling."
        )
    limits = _if_there(folder / TRANSFORMER_CONFIG)
    prompts = _if_there(folder / MODEL_CONFIG).get("prompts") or {}
    published = Published(
        pooling=MEAN,
        normalise="Normalize" in modules,
        max_tokens=limits.get("max_seq_length"),
        state_prefix=prompts.get("query") or "",
        chunk_prefix=prompts.get("document") or prompts.get("passage") or "",
    )
    if "Pooling" not in modules:
        return published
    where = folder / modules["Pooling"] / "config.json"
    config = read_json(where)
    prompted = published.state_prefix or published.chunk_prefix
    if prompted and not config.get("include_prompt", True):
        raise InputError(
            f"{where}: include_prompt is false, but prompts are always pooled here; set "
            "config.encoder.as_published to False and the pooling in config.encoder.pooling."
        )
    return dataclasses.replace(published, pooling=_pooling(config, where))


def _pooling(config: Mapping[str, Any], where: Path) -> str:
    """The pooling of a parsed `N_Pooling/config.json`, in either spelling."""
    modes = config.get("pooling_mode") or [name for flag, name in FLAGS.items() if config.get(flag)]
    modes = [modes] if isinstance(modes, str) else list(modes) or ["mean"]
    ours = {theirs: name for name, theirs in POOLING_NAMES.items()}
    if len(modes) != 1 or modes[0] not in ours:
        raise InputError(
            f"{where}: the pooling {' + '.join(map(str, modes))} is not computed here, only "
            f"{', '.join(ours)}; set config.encoder.as_published to False and the pooling in "
            "config.encoder.pooling."
        )
    return ours[modes[0]]


def _if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def write_modules(
    out: Path, *, pooling: str, normalise: bool, scale: float, width: int, max_tokens: int
) -> None:
    """Writes the files that make `out` compute what a `TextEncoder` computes.

    The library has no module for a factor: it becomes a Dense layer with scale·I, so that vectors,
    and with them Q-values, are the same. Similarity is the inner product.

    Args:
        pooling, normalise, scale, width: those of the encoder. max_tokens: longer rows are cut.
    """
    flags = {flag: name == POOLING_NAMES[pooling] for flag, name in FLAGS.items()}
    configs: dict[str, dict[str, Any]] = {
        "Pooling": {"word_embedding_dimension": width, **flags, "include_prompt": True}
    }
    if normalise:
        configs["Normalize"] = {}
    if scale != 1:
        configs["Dense"] = {
            "in_features": width,
            "out_features": width,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{CLASSES}Transformer"}]
    for i, (kind, config) in enumerate(configs.items(), start=1):
        path = f"{i}_{kind}"
        modules.append({"idx": i, "name": str(i), "path": path, "type": CLASSES + kind})
        (out / path).mkdir()
        _write_json(out / path / "config.json", config)
        if kind == "Dense":
            weight = np.float32(scale) * np.eye(width, dtype=np.float32)
            save_file({"linear.weight": weight}, out / path / "model.safetensors")
    _write_json(out / MODULES, modules)
    _write_json(out / TRANSFORMER_CONFIG, {"max_seq_length": max_tokens, "do_lower_case": False})
    _write_json(out / MODEL_CONFIG, {"prompts": {}, "similarity_fn_name": "dot"})


def write_tokenizer(
    out: Path, tokenizer: TextTokenizer, opening: tuple[int, ...], *, max_tokens: int, plain: bool
) -> None:
    """Writes a tokenizer that makes a tower's rows of texts: `opening text [SEP]`.

    A prefix is part of `opening`, token by token as in training, so it needs no prompt.

    Args:
        opening: `state_opening` or `chunk_opening` of the encoder.
        plain: special tokens written in a text are text; else they are themselves, with which a
            state's parts are joined.
    """
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    pieces = {"opening": list(opening), "end": [tokenizer.sep_id]}
    special = [
        {"id": name, "ids": ids, "tokens": [backend.id_to_token(i) for i in ids]}
        for name, ids in pieces.items()
        if ids
    ]
    template = [*(["opening"] if opening else []), "$A", "end"]
    backend.post_processor = TemplateProcessing(
        single=template, pair=[*template, "$B", "end"], special_tokens=special
    )
    backend.save(str(out / "tokenizer.json"))
    named = {"sep_token": tokenizer.sep_id, "pad_token": tokenizer.pad_id}
    named |= {} if tokenizer.cls_id is None else {"cls_token": tokenizer.cls_id}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_tokens,
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": plain,
    }
    tokens = {name: backend.id_to_token(index) for name, index in named.items()}
    _write_json(out / "tokenizer_config.json", config | tokens)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

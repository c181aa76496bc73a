"""Reads and writes files of sentence-transformers: pooling, prompts, tokenizers of towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers.processors import TemplateProcessing

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.errors import InputError
from qrag_jax.models.embedding import CLS, LAST, MEAN, TextEncoder
from qrag_jax.models.files import model_folder
from qrag_jax.models.files.model_folder import MODULES, read_json, read_modules, trunk_folder
from qrag_jax.runtime.config_fields import check_value
from qrag_jax.runtime.pretrained_files import auto_tokenizer
from qrag_jax.runtime.whole_files import inside, write_json

POOLING_NAMES = {MEAN: "mean", LAST: "lasttoken", CLS: "cls"}  # ours → theirs
# The flags in folders that are older than the field `pooling_mode`.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
CLASSES = "sentence_transformers.models."  # every release of the library knows this prefix
_LONGEST, _NO_LIMIT = "model_max_length", 2**31
POOLING, NORMALIZE, DENSE = "Pooling", "Normalize", "Dense"
# A field of `config.json`: the factor on pooled vectors that is not in the weights. An exported
# tower has it, and transformers keeps it when it saves the model again.
VECTOR_SCALE = "qrag_jax_vector_scale"
# Texts for comparing a written tokenizer with the one of training.
PROBES = ("Who wrote it, in 1984?", " Two  spaces\nand a new line. ", "Zürich, naïve; 東京 → ½", "")
LONG = "the moth is a thing of the night " * 40


def read_published(folder: Path) -> tuple[str | None, bool] | None:
    """How a model turns hidden states into vectors; None if the folder has no `modules.json`.

    The pooling (a name of `embedding.POOLINGS`; None: the folder names none), and whether vectors
    are scaled to length 1. A Dense layer is that of `write_modules`, whose factor `config.json` has
    as well; no other is computed.
    """
    entries = read_modules(folder)
    if not entries:
        return None
    modules = dict(entries)
    unknown = modules.keys() - {"Transformer", POOLING, NORMALIZE, DENSE}
    if DENSE in modules and VECTOR_SCALE not in model_folder.read_config(trunk_folder(folder)):
        unknown.add(DENSE)
    if unknown:
        raise _not_computed(folder / MODULES, f"the module {', '.join(sorted(unknown))}")
    if len(modules) < len(entries):
        raise _not_computed(folder / MODULES, "a module that is there twice")
    if modules.get(POOLING) == "":  # the root's files of the same names belong to the trunk
        raise InputError(f"{folder / MODULES}: the module {POOLING} has no folder of its own.")
    pooling = None
    if POOLING in modules:
        pooling = _pooling(inside(folder, modules[POOLING], "config.json"))
    return pooling, NORMALIZE in modules


def print_unused_prompts(folder: Path, fix: str) -> None:
    """Says which prompts the model has, texts that preceded inputs in its training, if any."""
    path = inside(folder, model_folder.MODEL_CONFIG)
    prompts_of_model = read_json(path).get("prompts") if path.is_file() else None
    prompts = check_value(dict[str, str | None], prompts_of_model or {}, f"{path}: prompts")
    texts = ", ".join(f"{name} {text!r}" for name, text in prompts.items() if text)
    if texts:
        print(f"The model's prompts are not used ({texts}); {fix}.")


def read_inputs(folder: Path) -> tuple[bool, int | None]:
    """How a model reads texts, by sentence-transformers' own file, else the tokenizer's config.

    Whether texts are made lower case before the tokenizer's own normaliser, and the tokens that
    rows are cut to (None: the folder does not say). A folder with `modules.json` always says the
    latter: without a number, rows are as long as the model has positions.
    """
    trunk = trunk_folder(folder)
    files = (inside(trunk, name) for name in model_folder.TRANSFORMER_CONFIGS)
    config: dict[str, Any] = next((read_json(file) for file in files if file.is_file()), {})
    tokenizer = inside(trunk, "tokenizer_config.json")
    further = config.get("processor_kwargs") or config.get("tokenizer_args") or {}
    limits = [further.get(_LONGEST), config.get("max_seq_length")]
    limits += [read_json(tokenizer).get(_LONGEST)] if tokenizer.is_file() else []
    # transformers writes 1e30 where there is none.
    known = (int(n) for n in limits if isinstance(n, int | float) and 0 < n < _NO_LIMIT)
    otherwise = _NO_LIMIT if read_modules(folder) else None
    return bool(config.get("do_lower_case")), next(known, otherwise)


def _pooling(where: Path) -> str:
    """The pooling that a `N_Pooling/config.json` names, in either spelling."""
    config = read_json(where)
    modes = config.get("pooling_mode") or [name for flag, name in FLAGS.items() if config.get(flag)]
    modes = [modes] if isinstance(modes, str) else list(modes) or [POOLING_NAMES[MEAN]]
    ours = {theirs: name for name, theirs in POOLING_NAMES.items()}
    if len(modes) != 1 or modes[0] not in ours:
        raise _not_computed(where, f"the pooling {' + '.join(map(str, modes))}")
    if not config.get("include_prompt", True):
        raise _not_computed(where, "a pooling that leaves the prompt out (include_prompt)")
    return ours[modes[0]]


def _not_computed(where: Path, what: str) -> InputError:
    return InputError(
        f"{where}: {what} is not computed here, only the poolings "
        f"{', '.join(POOLING_NAMES.values())} and Normalize; set both config.encoder.pooling and "
        "config.encoder.normalise, which are then used in place of the folder's own."
    )


def write_modules(
    out: Path, encoder: TextEncoder, *, scale: float, max_tokens: int, pooler: bool
) -> None:
    """Writes the files that make `out` compute what an encoder computes.

    The library has no module for a factor. So a scale that the weights do not hold is written as a
    Dense layer with the matrix scale·I. Some servers of embeddings skip this module. Similarity is
    the inner product.

    Args:
        scale: the factor on the vectors that is not in the weights.
        pooler: whether transformers would add a pooler, untrained and unused, to a model of this
            family; the pooler is then switched off.
    """
    width, pooling = encoder.width, POOLING_NAMES[encoder.pooling]
    flags = {flag: name == pooling for flag, name in FLAGS.items()}
    configs: dict[str, dict[str, Any]] = {
        POOLING: {"word_embedding_dimension": width, **flags, "include_prompt": True}
    }
    if encoder.normalise:
        configs[NORMALIZE] = {}
    if scale != 1:
        configs[DENSE] = {
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
        write_json(out / path / "config.json", config)
        if kind == DENSE:
            weight = np.float32(scale) * np.eye(width, dtype=np.float32)
            save_file({"linear.weight": weight}, out / path / "model.safetensors")
    write_json(out / MODULES, modules)
    limits: dict[str, Any] = {"max_seq_length": max_tokens, "do_lower_case": False}
    if pooler:
        limits["model_args"] = {"add_pooling_layer": False}
    write_json(out / model_folder.TRANSFORMER_CONFIGS[0], limits)
    write_json(out / model_folder.MODEL_CONFIG, {"prompts": {}, "similarity_fn_name": "dot"})


def write_tokenizer(
    out: Path, tokenizer: TextTokenizer, opening: tuple[int, ...], *, max_tokens: int, plain: bool
) -> None:
    """Writes a tokenizer that turns texts into a tower's rows: `opening text [SEP]`.

    The tower's prefix is part of `opening`, token by token as in training, so it needs no prompt.
    What is written is read again, and refused if it gives other rows than those of training.

    Args:
        opening: `state_opening` or `chunk_opening` of the encoder.
        plain: whether special tokens in a text are read as plain text. If not, they are read as
            special tokens, which join the parts of a state.
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
    write_json(out / "tokenizer_config.json", config | tokens)
    written = auto_tokenizer().from_pretrained(
        out, local_files_only=True, trust_remote_code=False, model_max_length=10**9
    )
    separator = str(backend.id_to_token(tokenizer.sep_id))
    rows: list[tuple[str, ...]] = [*((text,) for text in PROBES), (LONG,)]
    rows.append((f"a {separator} b",) if plain else PROBES)
    for row in rows:
        text, whole = separator.join(row), list(opening)
        for ids in tokenizer.encode(row):
            whole += [*ids, tokenizer.sep_id]
        cut = whole if len(whole) <= max_tokens else [*whole[: max_tokens - 1], tokenizer.sep_id]
        whole_ids = written(text)["input_ids"]
        found_cut = written(text, truncation=True, max_length=max_tokens)["input_ids"]
        for there, here in ((whole_ids, whole), (found_cut, cut)):
            if there != here:
                raise InputError(
                    f"{out.name}: exported, the run's tokenizer would read texts such as "
                    f"{text[:60]!r} otherwise than in training; embed with qrag_jax instead."
                )

"""What the suite gpu compiles and runs: recipes of configs/, at the full size of their models.

A program depends on shapes alone, so no weights are downloaded: a model's folder has its real
`config.json` and weights that are a hole in the file (or, to be run, repeated random numbers), and
the tokenizer of a small model. The search over a corpus has no model: its vectors are shapes.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from benchmarks import DATA, INVENTED
from benchmarks.report import ROOT
from qrag_jax.errors import InputError
from qrag_jax.models.compute.precision import precision
from qrag_jax.models.files.model_folder import GENERATION, TOKENIZER_FILES, WHOLE_FILE, copy_files
from qrag_jax.models.files.weight_names import expected_shapes
from qrag_jax.models.first_encoder import ScratchConfig, make_scratch_folder
from qrag_jax.models.first_language_model import TinyLMConfig, write_tiny_lm
from qrag_jax.models.trunks import families
from qrag_jax.models.trunks.transformer import Transformer
from qrag_jax.retrieval.exact import (
    BFLOAT16,
    INT8,
    STORAGES,
    Layout,
    Part,
    make_search,
    plan_of,
    rows_of,
)
from qrag_jax.runtime.aot import Program
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.pretrained_files import find_minilm

CPU, REFUSED = "cpu", 2  # a target; a child's status if packages are missing
WORDS = "Who wrote the book that the film of the same name was made from ?"
_DRAWN = 1_000_003  # a prime, so that no two rows of a matrix are alike


def _bert(model_type: str, vocab: int, hidden: int, layers: int, **more: Any) -> dict[str, Any]:
    sizes = {"model_type": model_type, "vocab_size": vocab, "hidden_size": hidden}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": hidden // 64}
    sizes |= {"intermediate_size": 4 * hidden, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
    return sizes | more


def _decoder(
    model_type: str, vocab: int, hidden: int, layers: int, heads: tuple[int, int], inner: int
) -> dict[str, Any]:
    query, key = heads
    width = 128 if model_type == "qwen3" else hidden // query
    sizes = {"model_type": model_type, "vocab_size": vocab, "hidden_size": hidden}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": query, "head_dim": width}
    sizes |= {"num_key_value_heads": key, "intermediate_size": inner, "hidden_act": "silu"}
    sizes |= {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000}
    # Of the language models here, the small ones' heads are their word tables.
    return sizes | {"tie_word_embeddings": hidden < 3000, "eos_token_id": 0}


# The sizes in each model's config.json, by its name on the hub.
MODELS: dict[str, dict[str, Any]] = {
    "facebook/contriever": _bert(
        "bert", 30522, 768, 12, max_position_embeddings=512, type_vocab_size=2
    ),
    "intfloat/multilingual-e5-large": _bert(
        *("xlm-roberta", 250002, 1024, 24),
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        pad_token_id=1,
    ),
    "Alibaba-NLP/gte-multilingual-base": _bert(
        *("new", 250048, 768, 12),
        max_position_embeddings=8192,
        type_vocab_size=1,
        layer_norm_type="layer_norm",
        pad_token_id=1,
        pack_qkv=True,
        position_embedding_type="rope",
        rope_theta=20000,
        rope_scaling={"type": "ntk", "factor": 8.0},
        logn_attention_scale=False,
    ),
    "Qwen/Qwen3-Embedding-0.6B": _decoder("qwen3", 151669, 1024, 28, (16, 8), 3072),
    "Qwen/Qwen3-Embedding-4B": _decoder("qwen3", 151665, 2560, 36, (32, 8), 9728),
    "Qwen/Qwen3-Embedding-8B": _decoder("qwen3", 151665, 4096, 36, (32, 8), 12288),
    "Qwen/Qwen3-1.7B": _decoder("qwen3", 151936, 2048, 28, (16, 8), 6144),
    "Qwen/Qwen2.5-3B-Instruct": _decoder("qwen2", 151936, 2048, 36, (16, 2), 11008),
    "Qwen/Qwen2.5-7B-Instruct": _decoder("qwen2", 152064, 3584, 28, (28, 4), 18944),
    "meta-llama/Meta-Llama-3-8B-Instruct": _decoder("llama", 128256, 4096, 32, (32, 8), 14336),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A config and the fields that it is opened with.

    Attributes:
        config: such as "hotpotqa:contriever".
        model: a key of `MODELS`, in place of the config's own; "": the config's own.
        data: a folder of `DATA`; "": invented questions.
        fields: of the config, by their dotted names.
        meshes: sizes along data, fsdp and tensor; those that hold it.
    """

    config: str
    model: str = ""
    data: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    meshes: tuple[tuple[int, int, int], ...] = ((1, 1, 1), (1, 8, 1))


_EIGHT = ((1, 8, 1),)
_LORA = {"encoder.lora.rank": 16, "encoder.remat": "layers"}
_BRIDGE = {"questions.train": "bridge", "questions.dev": "bridge", "questions.bridge_train": 64}
_RLVR = _BRIDGE | {"search.engine": "bm25", "tasks.easy_first": False}
# A small tokenizer's prompts are longer.
_TALKATIVE = {"queries.train": "talkative", "queries.test": "talkative", "sampling.room": 2048}
SMALL = ((1, 2, 1),)
RECIPES: dict[str, Recipe] = {
    "q_rag/contriever": Recipe("hotpotqa:contriever", data="hotpotqa"),
    "q_rag/e5": Recipe("hotpotqa:e5", data="hotpotqa"),
    "q_rag/e5-float32": Recipe("published:e5-hotpotqa", data="hotpotqa"),
    "q_rag/gte": Recipe("hotpotqa:gte", data="hotpotqa"),
    "q_rag/qwen3-0.6b": Recipe("hotpotqa:qwen3", data="hotpotqa"),
    "q_rag/qwen3-4b": Recipe("hotpotqa:qwen3", "Qwen/Qwen3-Embedding-4B", "hotpotqa", _LORA),
    "q_rag/qwen3-8b": Recipe("hotpotqa:qwen3", "Qwen/Qwen3-Embedding-8B", "hotpotqa", _LORA),
    "harr/grpo-0.6b": Recipe("harr_grpo:synthetic-scripted-0.6b"),
    "harr/grpo-4b": Recipe("harr_grpo:synthetic-scripted-4b"),
    "harr/ppo-0.6b": Recipe("harr_ppo:synthetic-scripted-0.6b"),
    "rlvr/qwen3-1.7b": Recipe("rlvr:qwen3", fields=_RLVR),
    "rlvr/qwen2.5-7b": Recipe("rlvr:qwen25", fields=_RLVR),
    "leret/qwen3-1.7b": Recipe("leret:qwen3", fields=_BRIDGE),
    "leret/llama3-8b": Recipe("leret:llama3", fields=_BRIDGE, meshes=_EIGHT),
    "deepretrieval/qwen2.5-3b": Recipe("deepretrieval:beir", fields=_TALKATIVE, meshes=_EIGHT),
}
QUICK = {"harr/tiny": Recipe("harr_grpo:tiny", meshes=SMALL)}
TPUS = ("v5e", "v6e")  # for the first recipe alone


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus of vectors; `queries` of a batch, `k` passages wanted of each."""

    passages: int
    width: int
    queries: int
    k: int
    storage: str = BFLOAT16  # of the vectors on the devices


CORPORA = {
    "search/wikipedia": Corpus(21_015_324, 1024, 1024, 100),  # DPR's passages
    "search/wikipedia-int8": Corpus(21_015_324, 1024, 1024, 100, INT8),
    "search/tiny": Corpus(100_003, 64, 64, 10),
}
SMALL_CORPORA = ("search/tiny",)


def row_names(quick: bool, target: str) -> list[str]:
    """The rows: TARGET/SYSTEM/RECIPE/MESH, each of all programs of a recipe on one mesh."""
    if quick:
        small = [f"{target}/{name}/{shown(mesh)}" for name in QUICK for mesh in SMALL]
        return [*small, f"{target}/search/tiny/{shown(SMALL[0])}"]
    names = [f"{target}/{name}/{shown(m)}" for name, r in RECIPES.items() for m in r.meshes]
    corpora = [name for name in CORPORA if name not in SMALL_CORPORA]
    names += [f"{target}/{name}/{shown(m)}" for name in corpora for m in Recipe("").meshes]
    first = next(iter(RECIPES))
    return names + [f"{tpu}/{first}/1x8x1" for tpu in TPUS]


def chosen(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names in which one of the regular expressions is found; without any, all.

    Raises:
        InputError: a pattern is no regular expression, or no row has it.
    """
    for pattern in patterns:
        try:
            matched = any(re.search(pattern, name) for name in names)
        except re.error as error:
            raise InputError(f"--only is {pattern!r}, no regular expression ({error}).") from None
        if not matched:
            raise InputError(f"--only is {pattern!r}; the rows are {', '.join(names)}.")
    return [n for n in names if not patterns or any(re.search(pattern, n) for pattern in patterns)]


def shown(mesh: Sequence[int]) -> str:
    """A mesh in a row's name."""
    return "x".join(map(str, mesh))


def config_of(recipe: Recipe, mesh: Sequence[int], models: Path, *, drawn: bool) -> ConfigDict:
    """The config of a recipe on a mesh; its model's folder is written if it is missing.

    Args:
        models: the folder of the models' folders.
        drawn: weights are random numbers, to be run; else zeros.
    """
    file, _, variant = recipe.config.partition(":")
    config = importlib.import_module(f"configs.{file}").get_config(variant)
    with config.unlocked():
        config.update_from_flattened_dict(dict(recipe.fields))
        section = config.encoder if "encoder" in config else config.model
        name = recipe.model or section.path
        if name in MODELS:
            section.path = str(model_folder(name, models, drawn=drawn).absolute())
        if config.system == "q_rag" and recipe.data:
            folder = DATA / recipe.data
            config.data.path = str(folder.absolute()) if folder.exists() else INVENTED
        if "data" in config and "cache" in config.data:
            config.data.cache = str((models / "cache").absolute())
        config.runtime.mesh = tuple(mesh)
        count, train = math.prod(mesh), config.train
        if count > 1 and "accumulation" in train:  # a batch of all devices has more room
            train.update(accumulation=1, batch_size=-(-train.batch_size // count) * count)
        if "batch_size" in config.eval:
            config.eval.batch_size = -(-config.eval.batch_size // count) * count
    return config


def model_folder(name: str, models: Path, *, drawn: bool) -> Path:
    """The folder of a model of the hub: real sizes, and weights that are zeros or random.

    Another process writes it: XLA's options and described devices come before JAX's first use here.
    """
    folder = models / f"{name.replace('/', '--')}{'-drawn' if drawn else ''}"
    if not (folder / WHOLE_FILE).exists():
        where = f"Path({str(folder.absolute())!r})"
        code = (
            f"from benchmarks.gpu.recipes import *; write_model({name!r}, {where}, drawn={drawn})"
        )
        subprocess.run(  # noqa: S603
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
    return folder


def write_model(name: str, folder: Path, *, drawn: bool) -> None:
    """Writes the folder of `model_folder`."""
    sizes, of_text = MODELS[name], precision("float32", Platform.of())
    is_encoder = "Embedding" in name or sizes["model_type"] not in families.DECODERS
    family = (families.FAMILIES if is_encoder else families.DECODERS)[sizes["model_type"]]
    config = family.config.from_dict(sizes, name)
    if is_encoder:
        trunk = Transformer(config, of_text)
        _encoder_tokenizer(folder)
    else:
        trunk = Transformer(config, of_text, own_head=not sizes["tie_word_embeddings"])
        write_tiny_lm(folder, [WORDS], TinyLMConfig(positions=32768), seed=0)
        (folder / GENERATION).unlink()
    (folder / "config.json").write_text(json.dumps(sizes))
    (_write_drawn if drawn else _write_zeros)(expected_shapes(family, trunk), folder / WHOLE_FILE)


def _encoder_tokenizer(folder: Path) -> None:
    """MiniLM's tokenizer if MiniLM is here, else one of few words; both have fewer tokens."""
    source = find_minilm()
    if source is None:
        source = folder.parent / f".{folder.name}.tokenizer"
        make_scratch_folder(source, [WORDS], ScratchConfig(1, 32, 2, 8000, 512), 0)
    folder.mkdir(parents=True, exist_ok=True)
    files = [source / file for file in TOKENIZER_FILES if (source / file).exists()]
    copy_files({file.name: file for file in files}, folder)


def _write_zeros(shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """A safetensors file whose float32 zeros take no room on the disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _write_drawn(shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Random weights, the same million numbers again and again: more would take minutes."""
    drawn = 0.02 * np.random.default_rng(0).standard_normal(_DRAWN, np.float32)
    tensors = {
        name: np.ones(shape, np.float32)
        if name.lower().endswith("norm.weight")
        else np.resize(drawn, shape)
        for name, shape in shapes.items()
    }
    save_file(tensors, path)


def search_program(corpus: Corpus, mesh: Mesh, *, on_cpu: bool) -> Program:
    """The exact search of one batch of queries, from shapes alone."""
    storage, scaled = corpus.storage, corpus.storage == INT8
    layout = Layout(corpus.passages, corpus.width, rows_of(corpus.passages, mesh.size), storage)
    # The files hold bfloat16, too, so the host scores again what int8 finds, and nothing else.
    plan = plan_of(layout, corpus.queries, corpus.k, again=scaled, on_cpu=on_cpu)
    rows = layout.rows * mesh.size
    vectors: Any = jax.ShapeDtypeStruct((rows, corpus.width), STORAGES[storage])
    allowed: Any = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    scales: Any = jax.ShapeDtypeStruct((rows,), jnp.float32) if scaled else None
    queries = jax.ShapeDtypeStruct((corpus.queries, corpus.width), jnp.float32)
    arguments = queries, Part(vectors, scales, allowed)
    flops = 2.0 * corpus.queries * rows * corpus.width
    return Program("search", make_search(mesh, plan, scaled), arguments, flops, "bfloat16")

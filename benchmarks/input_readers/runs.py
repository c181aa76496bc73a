"""Readers of what a run keeps: configs, digests, retriever.json, prompts, embeddings, caches."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from benchmarks.tried_inputs import FileReader
from qrag_jax.data.generators import book_record
from qrag_jax.data.generators.noise import NoiseConfig
from qrag_jax.data.tokens import BrokenStore, open_store
from qrag_jax.environments.query_writing import few_shot_file
from qrag_jax.environments.query_writing.few_shot import Candidate, Ranked, Solved
from qrag_jax.environments.query_writing.prompt import Example
from qrag_jax.errors import InputError
from qrag_jax.llm.client.cache import AnswerCache
from qrag_jax.llm.outcomes import Answer, Usage
from qrag_jax.llm.text import prompts
from qrag_jax.runtime import digests, retriever_config
from qrag_jax.runtime.embedding_files import EmbeddingFiles
from qrag_jax.runtime.retriever_config import Positions, RetrieverConfig, Search, Tower
from qrag_jax.runtime.saved_config import CONFIG_NAME, save_config
from qrag_jax.systems import mined_negatives, q_rag_config, scoring
from qrag_jax.systems.deepretrieval_config import RewriteConfig
from qrag_jax.systems.deepretrieval_config import load_config as load_deepretrieval
from qrag_jax.systems.harr_config import HarrConfig
from qrag_jax.systems.harr_config import load_config as load_harr
from qrag_jax.systems.leret_config import LeretConfig
from qrag_jax.systems.leret_config import load_config as load_leret
from qrag_jax.systems.q_rag_config import QRagConfig
from qrag_jax.systems.rlvr_config import RlvrConfig
from qrag_jax.systems.rlvr_config import load_config as load_rlvr

_KEYS = (b"k" * 32, b"m" * 32)

ConfigReader = tuple[str, Callable[[Path], ConfigDict], Callable[[ConfigDict], Any]]
CONFIGS: dict[str, ConfigReader] = {
    "Q-RAG": ("quickstart", q_rag_config.load_config, lambda c: QRagConfig.of(c, scoring=True)),
    "HARR": ("harr_grpo:tiny", load_harr, HarrConfig.of),
    "LeReT": ("leret:tiny", load_leret, LeretConfig.of),
    "RLVR": ("rlvr:tiny", load_rlvr, RlvrConfig.of),
    "DeepRetrieval": ("deepretrieval:tiny", load_deepretrieval, RewriteConfig.of),
}


def _config(system: str) -> FileReader:
    name, load, of = CONFIGS[system]

    def write(folder: Path) -> Sequence[Path]:
        module, _, variant = name.partition(":")
        config = importlib.import_module(f"configs.{module}").get_config(variant)
        save_config(config, folder / CONFIG_NAME)
        return [folder / CONFIG_NAME]

    return FileReader(
        f"config of a run, {system}", write, lambda folder: of(load(folder / CONFIG_NAME))
    )


def _step(folder: Path) -> Sequence[Path]:
    (folder / "params").write_bytes(bytes(range(100)))
    digests.write_digests(folder)
    step: dict[str, Any] = {"item_handlers": {}}
    (folder / digests.STEP_METADATA).write_text(json.dumps(step))
    return [folder / name for name in ("params", digests.NAME, digests.STEP_METADATA)]


def _check_step(folder: Path) -> None:
    if told := digests.damage(folder):
        raise InputError(told)  # checkpoints then fall back to the step before


def _retriever(folder: Path) -> Sequence[Path]:
    weights = {}
    for name in ("state", "chunk"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(name.encode())
        weights[name] = {"model.safetensors": digests.sha256(folder / name / "model.safetensors")}
    state, chunk = (
        Tower(folder=n, prefix="", max_tokens=64, width=8, scale=1, weights=weights[n])
        for n in ("state", "chunk")
    )
    RetrieverConfig(
        format=retriever_config.FORMAT,
        library_version="0.1.0",
        base_model="",
        state=state,
        chunk=chunk,
        title_separator=" ",
        separator="[SEP]",
        separator_id=3,
        max_question_tokens=9,
        max_chunk_tokens_in_state=12,
        sort_by_index=False,
        positions=Positions(
            kind="relative", theta=1e4, step=20, span=18, parts=5, most_chunks=2000
        ),
        search=Search(
            max_steps=2,
            beam=4,
            beam_score="policy",
            gamma=1.0,
            alpha=0.1,
            top_k_actions=8,
            stop_action=False,
            stop_threshold=0.5,
        ),
    ).write(folder)
    return [folder / retriever_config.NAME]


def _few_shot(folder: Path) -> Sequence[Path]:
    solved = Solved("q1", 1, 0.5, Example("Where?", ("Oslo | It lies.",), "oslo"))
    ranked = Ranked(Candidate("1-0", (solved,)), 0.5, 3, 1)
    path = folder / few_shot_file.NAME
    few_shot_file.write_few_shot(path, few_shot_file.FewShotPrompts("abc", ((ranked,),), ("1-0",)))
    return [path]


def _prompt(folder: Path) -> Sequence[Path]:
    path = folder / "own.txt"
    path.write_text("[system]\nBe brief.\n[user]\nAnswer {question} from {chunks}.\n")
    return [path]


def _books(folder: Path) -> Sequence[Path]:
    (folder / "books").mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        text = f"This is the book {name}. It has two sentences.\n"
        (folder / "books" / name).write_text(text)
    book_record.write_books(folder, _backgrounds(folder))
    return [folder / book_record.NAME]


def _backgrounds(folder: Path) -> list[NoiseConfig]:
    return [NoiseConfig(str(folder / "books"), "", 1, 0, 1, source="babilong")]


def _embeddings(folder: Path) -> Sequence[Path]:
    EmbeddingFiles(folder / "kept", 4).add([b"a" * 16, b"b" * 16], np.ones((2, 4), np.float32))
    return [*(folder / "kept").iterdir()]


def _read_embeddings(folder: Path) -> Any:
    return [rows.sum() for _, rows in EmbeddingFiles(folder / "kept", 4).load()]


def _answers(folder: Path) -> Sequence[Path]:
    cache = AnswerCache(folder / "answers.sqlite", lambda line: None)
    cache.put(_KEYS[0], Answer("Oslo", "v1", usage=Usage(3, 1), log_probs=(-0.5,)))
    cache.put(_KEYS[1], Answer("Bergen", "v1"))
    cache.close()
    return [folder / "answers.sqlite"]


def _read_answers(folder: Path) -> Any:
    cache = AnswerCache(folder / "answers.sqlite", lambda line: None)
    try:
        found = cache.get(_KEYS)
        return [answer.text.strip() + str(sum(answer.log_probs)) for answer in found.values()]
    finally:
        cache.close()


def _negatives(folder: Path) -> Sequence[Path]:
    np.savez(
        folder / "negatives.npz",
        numbers=np.arange(6).reshape(3, 2),
        about=np.array(["corpus", "questions"]),
    )
    return [folder / "negatives.npz"]


def _tokens(folder: Path) -> Sequence[Path]:
    arrays = {
        "tokens": np.arange(6, dtype=np.int32),
        "text_starts": np.array([0, 2, 4, 6]),
        "sample_starts": np.array([0, 3]),
        "support": np.array([0], np.int32),
        "support_starts": np.array([0, 1]),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    (folder / "meta.json").write_text('{"truncated_questions": 0, "truncated_chunks": 1}')
    return [*sorted(folder.iterdir())]


def _read_tokens(folder: Path) -> Any:
    store = open_store(folder)
    return len(store) + store.truncated_chunks + int(store.tokens.sum())


def _seconds(folder: Path) -> Sequence[Path]:
    (folder / "training.json").write_text('{"seconds": 12.5}\n')
    return [folder / "training.json"]


def readers() -> list[FileReader]:
    """The readers of this module."""
    return [
        *map(_config, CONFIGS),
        FileReader("digests of a checkpoint", _step, _check_step),
        FileReader(
            "retriever.json",
            _retriever,
            lambda folder: RetrieverConfig.read(folder).check_weights(folder),
        ),
        FileReader(
            "few-shot prompts",
            _few_shot,
            lambda folder: few_shot_file.read_few_shot(folder / few_shot_file.NAME, "abc").variants,
        ),
        FileReader(
            "a prompt",
            _prompt,
            lambda folder: prompts.load(str(folder / "own.txt")),
        ),
        FileReader(
            "books that were trained on",
            _books,
            lambda folder: book_record.check_unseen(folder, _backgrounds(folder)),
        ),
        FileReader("kept embeddings", _embeddings, _read_embeddings),
        FileReader("kept answers", _answers, _read_answers),
        FileReader(
            "mined negatives",
            _negatives,
            lambda folder: mined_negatives.read_found(folder / "negatives.npz"),
        ),
        FileReader("a store of tokens", _tokens, _read_tokens, (BrokenStore,)),
        FileReader("seconds of a training", _seconds, scoring.training_seconds),
    ]

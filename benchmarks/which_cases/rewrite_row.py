"""The rows of DeepRetrieval, and of a pseudo-document by the untrained SmolLM2.

A model rewrites each question once, and BM25 finds passages by what it wrote; the trained one's
queries are also compared with passages by MiniLM's vectors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import metrics
from benchmarks.which_cases import course, single, writers
from benchmarks.which_cases.found import MOST, Asking, Found, read_list
from benchmarks.which_cases.measured import once
from benchmarks.which_cases.pseudo_document import PROMPT, PassageAgent
from benchmarks.which_cases.row import TRAINED, UNTRAINED, Place, Result, training_of
from benchmarks.which_cases.settings import Setting
from configs.deepretrieval import get_config
from qrag_jax.environments.query_rewriting.prompt import RewritePrompt
from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.evaluators import rewrite_log
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.evaluators.rewrite_rows import played_row
from qrag_jax.llm.text import prompts
from qrag_jax.models.first_language_model import FOLDER
from qrag_jax.retrieval.opening import BM25, EXACT
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.minilm import MINILM
from qrag_jax.systems.deepretrieval import DeepRetrieval
from qrag_jax.systems.deepretrieval_config import RewriteConfig
from qrag_jax.systems.deepretrieval_inputs import load_inputs
from qrag_jax.systems.saved_token_run import mesh_of_run
from qrag_jax.systems.token_system import EVALUATED

# BM25 as the index of a setting has it, which is the package's default.
WORDS = {"k1": 1.5, "b": 0.75, "stemmer": "english", "stop_words": "english"}
PASSAGE_TOKENS = 96  # of a pseudo-document


def deepretrieval(place: Place, variant: str) -> Result:
    """DeepRetrieval with `:smol`, or with `:ir`, a decoder of 1.8 million weights."""
    workdir, given = place.folder / "run", place.setting
    words = [f"--config=configs/deepretrieval.py:{variant}", f"--workdir={workdir}"]
    words += [f"--config.search.{name}={value}" for name, value in WORDS.items()]
    words += [f"--config.queries.{part}={given.folder},{part}" for part in ("train", "dev", "test")]
    words.append(f"--config.seed={place.seed}")
    cost = once(place.folder, "train", "qrag_jax.train", *words, *place.flags)
    model = (writers.smollm2(), "rewrite_plain") if variant == "smol" else _made(workdir)
    rows, each = _rewritten(place, workdir, given, "best")
    found = _found(given, rows, each, model)
    ways = {TRAINED: {given.name: found}, writers.DENSE: {given.name: _dense(given, rows, found)}}
    if place.every_way:
        rows, each = _rewritten(place, workdir, given, "first")
        ways[UNTRAINED] = {given.name: _found(given, rows, each, model)}
    for other in place.others:
        rows, each = _rewritten(place, workdir, other, "best")
        ways[TRAINED][other.name] = _found(other, rows, each, model)
    searches = metrics(workdir, "searches")
    tokens = writers.learned_tokens(workdir)
    training = training_of(
        cost,
        course=course.of_run(workdir, cost),
        tokens=tokens,
        searches=searches[-1] if searches else None,
    )
    best = writers.checkpoint_of(place.folder / "predictions" / f"best-{given.name}.jsonl")
    return Result(ways, training, f"{best}, by nDCG@10 on the questions for choices")


def _rewritten(
    place: Place, workdir: Path, given: Setting, checkpoint: str
) -> tuple[list[RewriteRow], float | None]:
    """The rows of a setting's test, and the milliseconds of a question."""
    words: tuple[Any, ...] = ("qrag_jax.predict", f"--workdir={workdir}")
    words += (f"--checkpoint={checkpoint}", f"--config.queries.test={given.folder},test")
    samples = 0 if given is place.setting else place.transfer_questions
    asked = min(samples or len(given.test), len(given.test))
    out, each = writers.predicted(place.folder, f"{checkpoint}-{given.name}", words, samples, asked)
    return rewrite_log.read(out), each


def _made(workdir: Path) -> tuple[Path, str]:
    """The model that a run made, and its prompt."""
    return workdir / FOLDER, "bare_rewrite"


def _found(
    given: Setting,
    rows: Sequence[RewriteRow],
    milliseconds: float | None,
    model: tuple[Path, str],
) -> Found:
    lists = {row.id: read_list(row.ranking) for row in rows}
    asking = Asking(
        milliseconds,
        read_tokens=_read_tokens(rows, model),
        written_tokens=sum(row.sampled for row in rows) / len(rows),
    )
    return Found(lists, asking, single.size(single.index_of(given, (BM25,)), BM25))


def _read_tokens(rows: Sequence[RewriteRow], model: tuple[Path, str]) -> float:
    folder, name = model
    prompt = RewritePrompt(prompts.load(name))
    tasks = [RewriteTask.judged(row.id, row.original, {}) for row in rows]
    return writers.prompt_tokens(folder, [list(prompt.messages(task)) for task in tasks])


def _dense(given: Setting, rows: Sequence[RewriteRow], by_words: Found) -> Found:
    """What the same queries find by MiniLM's vectors."""
    folder = single.index_of(given, (EXACT,))
    search = single.search_of(folder, EXACT)
    queries = [row.query or row.original for row in rows]
    began = time.perf_counter()
    hits = search.search(queries, MOST)
    own = 1e3 * (time.perf_counter() - began) / len(rows)
    lists = {
        row.id: read_list(hit.id for hit in found) if row.query else ()
        for row, found in zip(rows, hits, strict=True)
    }
    writing = by_words.asking
    asking = Asking(
        None if writing.milliseconds is None else writing.milliseconds + own,
        encoder_tokens=single.tokens_of(queries, MINILM),
        read_tokens=writing.read_tokens,
        written_tokens=writing.written_tokens,
    )
    return Found(lists, asking, single.size(folder, EXACT))


def pseudo_document(place: Place, model: str = writers.SMOL, room: int = 256) -> Result:
    """An untrained chat model writes a passage; BM25 searches for it together with the question.

    Args:
        model: its folder or name.
        room: tokens of a prompt and a passage, at most.
    """
    given = place.setting
    config = get_config("smol").copy_and_resolve_references().unlock()
    config.model.path = model
    config.sampling.room = room
    config.search.update(WORDS)
    config.queries.train = config.queries.test = f"{given.folder},test"
    config.writing.query_tokens = config.grpo.longest = PASSAGE_TOKENS
    read = RewriteConfig.of(config)
    place.folder.mkdir(parents=True, exist_ok=True)
    mesh = mesh_of_run(read, place.folder)
    with StopSignal() as stop:
        inputs = load_inputs(read, place.folder, mesh, test=read.queries.test, trains=False)
        system = DeepRetrieval(read, mesh, inputs, place.folder)
        agent = PassageAgent(RewritePrompt(prompts.load(PROMPT)), MOST)

        def play(tasks: Sequence[RewriteTask]) -> list[RewriteRow]:
            starts = system.player.starts(tasks, 1, EVALUATED)
            episodes = system.player.on_device(
                system.untrained, starts, stop, greedy=read.eval.greedy, agent=agent
            )
            return [played_row(t, e, inputs.speech) for t, e in zip(tasks, episodes, strict=True)]

        play(inputs.test[: writers.WARM])
        began = time.perf_counter()
        rows = play(inputs.test)
        each = 1e3 * (time.perf_counter() - began) / len(rows)
        scaffold = inputs.speech.scaffold
        opened = [len(scaffold.opening(agent.prompt.messages(task))) for task in inputs.test]
    lists = {row.id: read_list(row.ranking) for row in rows}
    written = sum(row.sampled for row in rows) / len(rows)
    asking = Asking(each, read_tokens=sum(opened) / len(opened), written_tokens=written)
    size = single.size(single.index_of(given, (BM25,)), BM25)
    return Result({UNTRAINED: {given.name: Found(lists, asking, size)}})

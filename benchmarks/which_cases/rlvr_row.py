"""The row of RLVR: SmolLM2 searches with tools, and learns by the rewards of its episodes.

Untrained it calls no tool, and demonstrations are of the invented world alone. So it imitates these
first; its model is exported, and learns from there by GRPO on the setting's questions and corpus.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import metrics
from benchmarks.which_cases import course, single, writers
from benchmarks.which_cases.found import Asking, Found, read_list
from benchmarks.which_cases.measured import once
from benchmarks.which_cases.row import TRAINED, UNTRAINED, Place, Result, training_of
from benchmarks.which_cases.settings import TESTING, Setting
from qrag_jax.metrics import predictions
from qrag_jax.retrieval.opening import BM25, EXACT
from qrag_jax.runtime.minilm import MINILM
from qrag_jax.runtime.saved_config import CONFIG_NAME

IMITATED = "after imitation of the invented world"
CONFIG = "--config=configs/rlvr.py:smol"
# Genuine passages are longer than those of the invented world, for which the config has 768.
ROOM = "--config.sampling.room=1280"
_NOTE = "a search finds one passage, and it has four turns: it reads 3 or 4 at most"


def rlvr(place: Place, imitation: tuple[str, ...] = ()) -> Result:
    """RLVR with `:smol`.

    Args:
        imitation: further fields of the first training, and of the untrained model.
    """
    writers.smollm2()
    first, workdir, given = place.folder / "imitation", place.folder / "run", place.setting
    model, seed = place.folder / "model", f"--config.seed={place.seed}"
    index = single.index_of(given, (BM25,))
    words: tuple[str, ...] = (CONFIG, f"--workdir={first}", "--config.stages=sft", seed, *imitation)
    begun = once(place.folder, "imitate", "qrag_jax.train", *words)
    words = (f"--workdir={first}", "--checkpoint=last", f"--out={model}")
    once(place.folder, "export", "qrag_jax.export", *words)
    on: tuple[str, ...] = (f"--config.model.path={model}", "--config.stages=grpo")
    on += (
        ROOM,
        f"--config.questions.train={writers.questions(given, split='train')}",
    )
    on += (f"--config.questions.dev={writers.questions(given)}", f"--config.tools.corpus={index}")
    # All questions for choices; the test's are others.
    on += (f"--workdir={workdir}", "--config.eval.best_by=recall", "--config.eval.part=all", seed)
    learned = once(place.folder, "train", "qrag_jax.train", CONFIG, *on, *place.flags)
    run = (f"--workdir={workdir}",)
    best = (*run, "--checkpoint=best")
    ways = {TRAINED: {given.name: _found(place, given, "best", best)}}
    # Of every seed, since each imitates by itself.
    begin = (*run, "--checkpoint=first")
    ways[IMITATED] = {given.name: _found(place, given, "first", begin)}
    if place.every_way:
        untrained = (CONFIG, *imitation, *on[1:3], seed)
        ways[UNTRAINED] = {given.name: _found(place, given, "untrained", untrained)}
        ways[writers.DENSE] = {given.name: _found(place, given, "dense", best, dense=True)}
    for other in place.others:
        ways[TRAINED][other.name] = _found(place, other, "best", best)
    counted = [writers.learned_tokens(each) for each in (first, workdir)]
    training = training_of(
        begun,
        learned,
        course=course.of_run(workdir, learned, begun),
        tokens=sum(each or 0.0 for each in counted),
        searches=searches_of(workdir),
    )
    told = writers.checkpoint_of(place.folder / "predictions" / f"best-{given.name}.jsonl")
    return Result(ways, training, f"{told}, by the recall on the questions for choices")


def searches_of(workdir: Path) -> float | None:
    """Searches of a training and its evaluations; the imitation before it has none of the corpus.

    Those of the updates are estimated: an episode has as many as the mean of the evaluations.
    """
    each = metrics(workdir, "eval/searches")
    config = json.loads((workdir / CONFIG_NAME).read_text())
    if not each or not config["eval"]["samples"]:  # 0: all questions, whose number is not there
        return None
    steps = metrics(workdir, "step")[-1]
    played = steps * config["train"]["batch_size"] * config["grpo"]["members"]
    return played * sum(each) / len(each) + config["eval"]["samples"] * sum(each)


def _found(
    place: Place, given: Setting, name: str, weights: tuple[str, ...], *, dense: bool = False
) -> Found:
    index = single.index_of(given, (BM25, EXACT) if dense else (BM25,))
    words: tuple[Any, ...] = ("qrag_jax.predict", *weights, f"--config.tools.corpus={index}")
    words += (f"--questions={writers.questions(given, TESTING)}",)
    if dense:
        words += ("--retriever=semantic", f"--config.tools.encoder={MINILM}")
    # A minute for some ten questions, so that not all are asked by vectors, too.
    samples = place.transfer_questions if dense or given is not place.setting else 0
    asked = min(samples or len(given.test), len(given.test))
    out, each = writers.predicted(place.folder, f"{name}-{given.name}", words, samples, asked)
    if weights[0] == CONFIG:
        each = None  # no run, which would keep what it compiles
    return _of_file(out, each, single.size(index, EXACT if dense else BM25))


def _of_file(out: Path, milliseconds: float | None, index_bytes: int) -> Found:
    lists, read, written, searches = {}, 0, 0, 0.0
    for scored in predictions.read_scores(out):
        row = predictions.read_at(out, scored.offset)
        lists[row.id] = read_list(row.trajectory["facts"].get("seen", ()))
        read += sum(len(turn["observed_tokens"]) for turn in row.turns)
        written += sum(len(turn["sampled_tokens"]) for turn in row.turns)
        searches += float(scored.tally["searches"])
    count = len(lists)
    asking = Asking(
        milliseconds,
        read_tokens=read / count,
        written_tokens=written / count,
        searches=searches / count,
    )
    return Found(lists, asking, index_bytes, _NOTE)

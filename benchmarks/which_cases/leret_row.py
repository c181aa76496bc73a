"""The row of LeReT: SmolLM2 writes the query of each of two hops, and learns from its own tries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.which_cases import course, single, writers
from benchmarks.which_cases.found import Asking, Found, by_turns
from benchmarks.which_cases.measured import once
from benchmarks.which_cases.row import TRAINED, UNTRAINED, Place, Result, training_of
from benchmarks.which_cases.settings import TESTING, Setting
from qrag_jax.metrics import hop_log
from qrag_jax.retrieval.opening import BM25, EXACT
from qrag_jax.runtime.minilm import MINILM

_HOPS = 2  # of its config
_NOTE = "two hops of 3 passages: it reads 6 at most"


def leret(place: Place) -> Result:
    """LeReT with `:smol`."""
    writers.smollm2()
    workdir, given = place.folder / "run", place.setting
    index = single.index_of(given, (BM25,))
    words = ["--config=configs/leret.py:smol", f"--workdir={workdir}"]
    words.append(f"--config.questions.train={writers.questions(given, split='train')}")
    words.append(f"--config.questions.dev={writers.questions(given)}")
    words += [f"--config.search.index={index}", f"--config.seed={place.seed}"]
    words.append("--config.eval.part=all")  # of the questions for choices; the test's are others
    cost = once(place.folder, "train", "qrag_jax.train", *words, *place.flags)
    ways = {TRAINED: {given.name: _found(place, workdir, given, "best")}}
    # Of every seed, since each draws its own few-shot prompt.
    ways[UNTRAINED] = {given.name: _found(place, workdir, given, "first")}
    if place.every_way:
        ways[writers.DENSE] = {given.name: _found(place, workdir, given, "best", dense=True)}
    for other in place.others:
        ways[TRAINED][other.name] = _found(place, workdir, other, "best")
    tries = sum(
        len(path.read_text().splitlines()) for path in (workdir / "tries").glob("*/hop-*.jsonl")
    )
    training = training_of(
        cost,
        course=course.of_run(workdir, cost, part=f"hop{_HOPS}/"),
        tokens=writers.learned_tokens(workdir),
        searches=float(tries),
    )
    best = writers.checkpoint_of(place.folder / "predictions" / f"best-{given.name}.jsonl")
    return Result(ways, training, f"{best}, by the share with all gold passages found")


def _found(
    place: Place, workdir: Path, given: Setting, checkpoint: str, *, dense: bool = False
) -> Found:
    index = single.index_of(given, (BM25, EXACT) if dense else (BM25,))
    words: tuple[Any, ...] = ("qrag_jax.predict", f"--workdir={workdir}")
    words += (f"--checkpoint={checkpoint}", f"--questions={writers.questions(given, TESTING)}")
    words += (f"--config.search.index={index}",)
    if dense:
        words += ("--config.search.engine=semantic", f"--config.search.encoder={MINILM}")
    samples = 0 if given is place.setting else place.transfer_questions
    asked = min(samples or len(given.test), len(given.test))
    name = f"{checkpoint}-{given.name}" + "-dense" * dense
    out, each = writers.predicted(place.folder, name, words, samples, asked)
    rows = hop_log.read(out)
    hops = [hop for row in rows for hop in row.hops]
    asking = Asking(
        each,
        encoder_tokens=single.tokens_of([h.query for h in hops], MINILM) * 2 if dense else 0.0,
        read_tokens=sum(hop.read for hop in hops) / len(rows),
        written_tokens=sum(hop.sampled for hop in hops) / len(rows),
        searches=sum(bool(hop.query) for hop in hops) / len(rows),
    )
    lists = {row.id: by_turns([[id for id, _ in h.found] for h in row.hops]) for row in rows}
    return Found(lists, asking, single.size(index, EXACT if dense else BM25), _NOTE)

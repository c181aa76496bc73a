"""The rows of Q-RAG: trained on each question's own passages, it searches the corpus in steps.

With mined negatives it is trained once more, from MiniLM: each training question also has passages
of the corpus that the first training takes for good (docs/search.md, "Train with negatives").
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import metrics
from benchmarks.which_cases import course, single
from benchmarks.which_cases.found import MOST, Asking, Found, Training, read_list
from benchmarks.which_cases.measured import Cost, once
from benchmarks.which_cases.row import (
    TRAINED,
    UNTRAINED,
    WITH_WORDS,
    Place,
    Result,
    Tests,
    training_of,
)
from benchmarks.which_cases.settings import HOTPOTQA, TRAIN, TWO_WIKI, Setting
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.exported import rules_of
from qrag_jax.retrieval.multi_step import Hit, MultiStepSearch
from qrag_jax.retrieval.opening import BM25, EXACT
from qrag_jax.retrieval.tower_rows import Rows
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.systems.indexing import CORPUS, index_corpus
from qrag_jax.systems.jax_retriever import run_towers
from qrag_jax.systems.mined_negatives import by_rank
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.q_rag_config import load_config
from qrag_jax.systems.saved_run import SavedRun
from qrag_jax.systems.towers_export import retriever_config, towers

CONFIGS = {TWO_WIKI: "two_wiki", HOTPOTQA: "hotpotqa"}
RUN = "run"  # folder of the training, in that of the row
NEGATIVES = 10  # mined passages of a training question, as many as its own


class _Counted:
    """A tower that counts what it reads."""

    def __init__(self, tower: Any) -> None:
        self.tower, self.tokens = tower, 0

    def __call__(self, rows: Rows) -> Any:
        self.tokens += sum(map(len, rows))
        return self.tower(rows)


def q_rag(place: Place, variant: str = "minilm") -> Result:
    """The trained towers on the test, and on those of other settings; the untrained on the test."""
    cost = _train(place, place.folder, variant)
    result = _result(place, untrained=True)
    return dataclasses.replace(result, training=_training(place, result, [cost], [place.folder]))


def q_rag_mined(place: Place, variant: str = "minilm") -> Result:
    """The same, trained with negatives that the row `q_rag` of the same seed finds.

    That row's training is done first if it is not there; its cost is counted here, too.
    """
    given, index = place.setting, place.folder / "index"
    first = place.folder.with_name(f"q_rag-{place.seed}")
    costs = [_train(place, first, variant)]
    words = (f"--corpus={given.folder / 'corpus.jsonl'}", f"--index={index}")
    costs.append(once(place.folder, "index", "qrag_jax.index", *words, f"--workdir={first / RUN}"))
    mined = {"index": index, "search": first / RUN, "count": NEGATIVES}
    fields = tuple(f"--config.data.negatives.{name}={value}" for name, value in mined.items())
    costs.append(_train(place, place.folder, variant, fields))
    result = _result(place)
    training = _training(place, result, costs, [first, place.folder])
    return dataclasses.replace(result, training=training)


def _train(place: Place, folder: Path, variant: str, fields: Sequence[str] = ()) -> Cost:
    config = f"{CONFIGS[place.setting.name]}.py:{variant}"
    data = f"--config.data.path={place.setting.choosing}"
    words = [f"--config=configs/{config}", f"--workdir={folder / RUN}", data]
    words.append(f"--config.seed={place.seed}")
    return once(folder, "train", "qrag_jax.train", *words, *fields, *place.flags)


def _training(
    place: Place, result: Result, costs: Sequence[Cost], folders: Sequence[Path]
) -> Training:
    """The costs of one training, or of that without negatives and that with them.

    Tokens are estimated, those of a question by the mean: of its passages, and of its states as the
    trained towers read them in the test.
    """
    given = place.setting
    states = result.ways[TRAINED][given.name].asking.encoder_tokens
    tokens = []
    for folder, more in zip(folders, (0, NEGATIVES), strict=False):
        run = SavedRun.open(folder / RUN, load_config(folder / RUN / CONFIG_NAME))
        played = metrics(folder / RUN, "train/env_steps")  # [] if it ended before it told any
        own, one = _passage_tokens(given, run)
        for transitions in played[-1:]:
            each = states + own + more * one
            tokens.append(transitions / run.config.env.max_steps * each)
    searches = float(len(given.questions[TRAIN])) * (len(folders) - 1)
    known = sum(tokens) if len(tokens) == len(folders) else None
    went = course.of_run(folders[-1] / RUN, costs[-1], *costs[:-1])
    return training_of(*costs, course=went, tokens=known, searches=searches)


def _passage_tokens(given: Setting, run: SavedRun) -> tuple[float, float]:
    """Mean tokens of all passages of a training question, and of one of them, as they are cut."""
    encoder, most = PassageEncoder.of_run(run), run.config.data.max_chunk_tokens
    texts = {passage.name: passage.whole for passage in given.corpus}
    names = [name for asked in given.questions[TRAIN] for name in asked.own]
    ids = encoder.tokenizer.encode([texts[name] for name in names])
    total = float(sum(min(len(own), most) for own in ids))
    return total / len(given.questions[TRAIN]), total / len(names)


def _result(place: Place, *, untrained: bool = False) -> Result:
    workdir, given = place.folder / RUN, place.setting
    run = SavedRun.open(workdir, load_config(workdir / CONFIG_NAME))
    params, step = run.trained("best")
    tests = {
        each.name: _in_steps(each, run, params, single.index_of(each, (BM25,)))
        for each in (given, *place.others)
    }
    ways: dict[str, Tests] = {TRAINED: tests}
    ways[WITH_WORDS] = {given.name: single.with_words(given, tests[given.name])}
    if untrained:
        folder = single.index_of(given, (BM25,))
        ways[UNTRAINED] = {given.name: _in_steps(given, run, run.untrained(), folder)}
    played = metrics(workdir, "train/env_steps")
    told = f"best checkpoint, step {step}; {played[-1]:.0f} transitions" if played else ""
    return Result(ways, about=told)


def _vectors_of(folder: Path, encoder: PassageEncoder) -> ExactIndex:
    """The index of the corpus in `folder / CORPUS`; built if it is not there."""
    digest = encoder.digest()
    out = folder / digest[:12]
    if not out.exists():
        out.mkdir()
        (out / CORPUS).symlink_to((folder / CORPUS).absolute())
    indexed = index_corpus(None, out, encoder)
    return ExactIndex.open(indexed.folder, indexed.corpus, encoder=digest)


def _in_steps(given: Setting, run: SavedRun, params: Any, folder: Path) -> Found:
    """As many steps as in training; each finds several, and its best goes into the state."""
    encoder = dataclasses.replace(PassageEncoder.of_run(run), params=params)
    index = _vectors_of(folder, encoder)
    config = retriever_config(run, towers(run.loaded, run.config), folder, None)
    both, rules = run_towers(run, params, config), rules_of(config)
    counted = _Counted(both.state)
    wide = dataclasses.replace(rules, per_step=-(-MOST // rules.max_steps))
    search = MultiStepSearch(index, dataclasses.replace(both, state=counted), wide)
    texts = [asked.text for asked in given.test]
    # Both have the same states. A passage that a step takes may have been found by an earlier one.
    taken = MultiStepSearch(index, both, rules).search(texts)
    found = search.search(texts)
    read, times = counted.tokens / len(texts), []
    for _ in range(single.REPEATS):
        began = time.perf_counter()
        search.search(texts)
        times.append(1e3 * (time.perf_counter() - began) / len(texts))
    lists = {
        asked.id: in_order(path, more)
        for asked, path, more in zip(given.test, taken, found, strict=True)
    }
    size = single.size(folder / encoder.digest()[:12], EXACT)
    asking = Asking(min(times), encoder_tokens=read, searches=float(rules.max_steps))
    return Found(lists, asking, size)


def in_order(taken: Sequence[Hit], found: Sequence[Hit]) -> tuple[str, ...]:
    """The passages taken, as the retriever's own search reads them, and those found beside them.

    Args:
        taken: one of each step.
        found: several of each step, which no step before had found. A passage that is taken may
            be among the further ones of an earlier step, so `found` alone would put it behind.
    """
    return read_list(hit.id for hit in (*taken, *by_rank(found)))

"""A LeReT run in LeReT's own files: records of how questions were searched, and preferences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.data.files.leret import (
    HopRecord,
    Preference,
    Retrieved,
    TryRecord,
    long_text,
    write_preferences,
)
from qrag_jax.environments.query_writing.state import QueryState
from qrag_jax.errors import InputError
from qrag_jax.evaluators.hop_pools import passages_of
from qrag_jax.feedback.later_credit import credited
from qrag_jax.feedback.preference_pairs import pairs_of
from qrag_jax.feedback.tries import StateKey, Try
from qrag_jax.metrics.hop_log import Hop, Searched
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.locks import run_lock
from qrag_jax.runtime.saved_config import read_fields
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_tries import FOLDER

_START = "start.json"  # in an iteration's folder: what made its tries
_BARE = 0  # number of the prompt


class Written(NamedTuple):
    """What became of the states of an iteration.

    Attributes:
        states: in the file.
        pairs: of all of these.
        left_out: without a query to imitate: all tries are worth the same, or have no reward.
        equal: left out, because an earlier state has the same prompt.
    """

    states: int
    pairs: int
    left_out: int
    equal: int


def records_of(
    rows: Sequence[Searched], states: Sequence[QueryState], corpus: StoredCorpus
) -> list[TryRecord]:
    """LeReT's records of questions that a model has searched for by the bare prompt.

    A hop without a query, since the search had ended or the query was empty, too long or failed,
    has the query "" and found nothing.

    Args:
        rows: of the log, with what the queries found.
        states: the questions, in the same order.
        corpus: what was searched.

    Raises:
        InputError: the corpus lacks a passage of the log.
    """
    names = {name for row in rows for hop in row.hops for name in (*hop.pool, *_found(hop))}
    names |= {name for state in states for name in state.gold}
    known = {name: each.passage for name, each in passages_of(corpus, names).items()}
    titles = {name: each.title or name for name, each in known.items()}
    return [
        _record(row, tuple(dict.fromkeys(titles[name] for name in state.gold)), known)
        for row, state in zip(rows, states, strict=True)
    ]


def _record(row: Searched, answer: tuple[str, ...], known: Mapping[str, Passage]) -> TryRecord:
    texts = {name: long_text(each.title, each.text) for name, each in known.items()}
    scores: dict[str, float] = {}
    hops: dict[int, HopRecord] = {}
    context: tuple[Retrieved, ...] = ()
    full = context
    for number, hop in enumerate(row.hops, start=1):
        scores = dict(hop.found) | scores  # a passage keeps that with which it joined the pool
        found = tuple(Retrieved(texts[name], score) for name, score in hop.found)
        context, full = full, tuple(Retrieved(texts[n], scores[n]) for n in hop.pool)
        hops[number] = HopRecord(hop.query, hop.scores["recall"], hop.scores["ap"], found)
    return TryRecord(row.id, row.question, answer, hops, full, model=_BARE, context=context)


def write_iteration_preferences(system: Leret, iteration: int, path: Path) -> Written:
    """Writes what an iteration's tries teach, by the text of the bare prompt, as LeReT has it.

    The tries are read from the run's folder, in which nobody may train meanwhile, and the pairs are
    made again, as the run makes them. Weights of pairs are not in the file.

    Args:
        system: with the training questions.
        iteration: from 1.
        path: the file.

    Raises:
        InputError: the run has no such iteration, its tries are not finished or of other settings,
            or another process trains in the folder.
        OSError: the file cannot be written.
    """
    config = system.config
    if not 1 <= iteration <= config.iterations:
        raise InputError(
            f"--iteration={iteration}: the run has the iterations 1 to {config.iterations}."
        )
    started = system.workdir / FOLDER / f"iteration-{iteration}" / _START

    def refused(*_: Any) -> list[TokenEpisode]:
        raise InputError(
            f"the tries of iteration {iteration} in {started.parent} are not finished; train on "
            "first."
        )

    with run_lock(system.workdir):
        if not all(map(Path.exists, (started, started.with_name("hop-1.jsonl")))):
            refused()
        prompt = system.prompt(None)
        weights = str(read_fields(started).get("weights"))
        found = system.tries.iteration(iteration, refused, weights, StopSignal())
    by_state: dict[StateKey, list[Try]] = {}
    for each in credited(found.tries, found.grown_from, config.reward):
        by_state.setdefault(each.at, []).append(each)
    speech = system.inputs.speech
    preferences: dict[str, Preference] = {}
    left_out = equal = 0
    for at, tries in by_state.items():
        preference = pairs_of(tries, config.pairs, (config.seed, iteration)).preference
        if preference is None:
            left_out += 1
            continue
        ids = speech.scaffold.opening(prompt.messages(found.states[at].asked_by(_BARE)))
        text = speech.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        equal += text in preferences
        preferences.setdefault(text, preference)
    write_preferences(path, preferences)
    pairs = sum(len(each.pairs) for each in preferences.values())
    return Written(len(preferences), pairs, left_out, equal)


def _found(hop: Hop) -> list[str]:
    return [name for name, _ in hop.found]

"""Reads and checks the questions, the corpus and the model of a LeReT run, before it plays."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from qrag_jax.data.dataset_parts import read_query_questions, unseen
from qrag_jax.data.sample import Page, QueryQuestion
from qrag_jax.data.scripted import BridgeQuestion, bridge_questions
from qrag_jax.environments.query_writing.agent import QueryAgent
from qrag_jax.environments.query_writing.prompt import QueryPrompt
from qrag_jax.environments.query_writing.state import QueryState
from qrag_jax.environments.query_writing.styles import (
    style_variants,
)
from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import Drawn, drawn
from qrag_jax.llm.server.model_digest import model_digest
from qrag_jax.llm.text import prompts
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.rollouts.libraries import CorpusLibrary
from qrag_jax.rollouts.query_tries import states_on
from qrag_jax.rollouts.token_episodes import Speech
from qrag_jax.runtime.run import DEV, log
from qrag_jax.runtime.saved_config import has_begun
from qrag_jax.runtime.whole_files import default_cache
from qrag_jax.systems.leret_config import SCRIPT, STYLED, LeretConfig
from qrag_jax.systems.leret_experience import Script, script_of
from qrag_jax.systems.query_search import open_query_search
from qrag_jax.systems.token_config import BRIDGE
from qrag_jax.systems.token_system import model_of

OF_QUESTIONS = ("questions.", "search.")  # fields that say what is asked
CORPUS = "search"  # of pooled passages, in the run's folder


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run reads.

    Attributes:
        model: what is trained.
        agent: the environment, with the bare prompt and those of the styles.
        library: what is searched.
        speech: between text and ids.
        train, dev: the questions, as states of the first hop.
        script: what is demonstrated; None: nothing is.
        data: content keys.
    """

    model: FirstLanguageModel
    agent: QueryAgent
    library: CorpusLibrary
    speech: Speech
    train: Sequence[QueryState]
    dev: Sequence[QueryState]
    drawn: Drawn
    script: Script | None
    data: dict[str, str]


def load_inputs(
    config: LeretConfig,
    workdir: Path,
    mesh: Mesh,
    *,
    trains: bool = True,
    pool: Path | None = None,
) -> Inputs:
    """Reads the questions, writes or opens the corpus, prepares the model.

    Args:
        trains: else there are no training questions.
        pool: a folder for the pooled passages of the config's questions; None: the run's, which is
            written by what trains.
    """
    asked = config.questions
    is_made, dev = asked.train == BRIDGE, _dev(config)
    made: list[BridgeQuestion] = []
    train: list[QueryQuestion] = []
    pages: Iterable[Page] | None = None
    if trains or pool is not None:
        if is_made:
            made = bridge_questions(asked.bridge_seed, "train", range(asked.bridge_corpus))
        few = made[: asked.bridge_train]
        tried = [each.query for each in few] if is_made else _read(asked.train)
        train = unseen(tried, dev)
        train = train[: asked.most] if asked.most else train
        pages = None if config.search.index else _pages(config, train, dev)
    begun = pool is not None or has_begun(workdir)
    library = open_query_search(config.search, pages, pool or workdir / CORPUS, begun=begun)
    states = _states(config, train, library) if trains else []
    script = script_of(config, made, library) if is_made and trains else None
    agent = QueryAgent(_prompt(config), config.writing.k, config.writing.stop)

    texts = partial(script.texts, config) if script else None
    model, speech = model_of(config, workdir, mesh, texts, config.writing.query_tokens)
    dev_states = _states(config, dev, library)
    _check_prompts(config, agent, speech, (*states, *dev_states))
    shown = drawn([state.id for state in dev_states], config.eval)
    return Inputs(
        model=model,
        agent=agent,
        library=library,
        speech=speech,
        train=states,
        dev=[dev_states[number] for number in shown.places],
        drawn=shown,
        script=script if SCRIPT in config.stages else None,
        data={
            "questions": fingerprint(states),
            DEV: fingerprint(dev_states),
            "model": model_digest(model.folder, default_cache(), log),
            "prompt": agent.prompt.prompt.fingerprint,
            "corpus": library.corpus.digest,
        },
    )


def _dev(config: LeretConfig) -> list[QueryQuestion]:
    asked = config.questions
    if asked.dev != BRIDGE:
        return _read(asked.dev)
    made = bridge_questions(asked.bridge_seed, "dev", range(asked.bridge_dev))
    return [each.query for each in made]


def _read(text: str) -> list[QueryQuestion]:
    found, reports = read_query_questions(text)
    for report in reports:
        log(report.summary())
    return found


def _pages(
    config: LeretConfig, train: Sequence[QueryQuestion], dev: Sequence[QueryQuestion]
) -> Iterable[Page]:
    """The passages of all questions; of the made world, of more questions than are asked."""
    yield from (page for each in (*train, *dev) for page in each.passages)
    asked = config.questions
    if asked.train == BRIDGE:
        more = range(asked.bridge_train, asked.bridge_corpus)
        for each in bridge_questions(asked.bridge_seed, "train", more):
            yield from each.query.passages


def _states(
    config: LeretConfig, questions: Sequence[QueryQuestion], library: CorpusLibrary
) -> list[QueryState]:
    search = config.search
    found = states_on(
        questions,
        library.corpus,
        search.gold_by,
        max_missing_share=search.max_missing_share,
    )
    if found.lacking:
        log(found.summary)
    return list(found.states)


def _prompt(config: LeretConfig) -> QueryPrompt:
    tries = config.tries
    variants = style_variants() if tries.ways == STYLED else ()
    return QueryPrompt(prompts.load(config.writing.prompt), variants, config.writing.passage_words)


def _check_prompts(
    config: LeretConfig, agent: QueryAgent, speech: Speech, states: Sequence[QueryState]
) -> None:
    longest = max(states, key=lambda state: len(state.question))
    for variant, name in enumerate(agent.prompt.names):
        messages = agent.prompt.messages(longest.asked_by(variant))
        tokens = len(speech.scaffold.opening(messages))
        if tokens + config.writing.query_tokens > config.sampling.room:
            raise InputError(
                f"the prompt {name!r} of question {longest.id!r} has {tokens} tokens before any "
                f"passage, a query may have {config.writing.query_tokens}, and "
                f"config.sampling.room is {config.sampling.room}; raise the room."
            )


def fingerprint(states: Sequence[QueryState]) -> str:
    """A digest of the questions and their gold pages."""
    digest = hashlib.sha256()
    for state in states:
        digest.update(f"{state.id}\0{state.question}\0{state.pages}".encode())
    return digest.hexdigest()[:16]

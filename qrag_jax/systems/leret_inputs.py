"""Reads and checks the questions, the corpus and the model of a LeReT run, before it plays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from qrag_jax.data.reading import without_asked
from qrag_jax.data.sample import Page, Sample
from qrag_jax.data.scripted import BridgeQuestion, bridge_questions
from qrag_jax.environments.demonstrations import (
    Start,
    Written,
    draw_styles,
    play_styled,
    style_variants,
)
from qrag_jax.environments.episode import Look
from qrag_jax.environments.queries import Pool, QueryAgent, QueryPrompt, QueryState
from qrag_jax.evaluators.eval_config import Drawn, drawn
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text import prompts
from qrag_jax.retrieval.judged_queries import pooled
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.rollouts.libraries import CorpusLibrary
from qrag_jax.rollouts.query_tries import states_on
from qrag_jax.runtime.run import DEV, log
from qrag_jax.runtime.saved_config import has_begun
from qrag_jax.systems.leret_config import SCRIPT, STYLED, LeretConfig
from qrag_jax.systems.search import open_search
from qrag_jax.systems.token_config import BRIDGE
from qrag_jax.systems.token_system import (
    TokenInputs,
    check_room,
    fingerprint,
    model_of,
    read_samples,
)

OF_QUESTIONS = ("questions.", "search.")  # fields that say what is asked
CORPUS = "search"  # of pooled passages, in the run's folder


_READ_FOR_TOKENIZER = 300  # demonstrations on which a tiny model's tokenizer is trained


@dataclasses.dataclass(frozen=True)
class Script:
    """Demonstrations before they are drawn."""

    library: CorpusLibrary  # what their queries search
    # The questions, and what the script knows of them: all of the corpus, so more than those that
    # are tried, because a model that sees few names often learns them by heart, and not to copy.
    # (To see none twice was worse: names were copied later.)
    demonstrated: Sequence[tuple[QueryState, BridgeQuestion]]
    # The bare one and those with the marks of the styles, whatever tries are asked by
    prompt: QueryPrompt

    def played(
        self, config: LeretConfig, numbers: Sequence[int], first: int
    ) -> list[tuple[Written, ...]]:
        """The hops of demonstrations `first`, `first` + 1 and so on, of these questions."""
        state, writing = self.demonstrated[0][0], config.writing  # any question's state will do

        def search(queries: Sequence[str]) -> list[Pool | Failure]:
            return self.library.look([(state, Look(query, writing.k)) for query in queries])

        starts = [
            Start(
                *self.demonstrated[each],
                draw_styles(config.styles, config.seed, draw, writing.hops),
            )
            for draw, each in enumerate(numbers, first)
        ]
        return play_styled(search, starts, writing.order, config.styles.most_words)

    def texts(self, config: LeretConfig) -> Iterator[str]:
        """The texts of the first demonstrations, prompts included."""
        for hops in self.played(config, range(min(_READ_FOR_TOKENIZER, len(self.demonstrated))), 0):
            for hop in hops:
                yield from (text for _, text in self.prompt.messages(hop.state))
                yield hop.query


def script_of(
    config: LeretConfig, made: Sequence[BridgeQuestion], library: CorpusLibrary
) -> Script:
    """Demonstrations of these questions, whose passages `library` has."""
    by_id = {each.id: each for each in made}
    states, _ = states_on([each.query for each in made], library.corpus, config.search.gold_by)
    words = config.writing.passage_words
    prompt = QueryPrompt(prompts.load(config.writing.prompt), style_variants(), words)
    return Script(library, [(state, by_id[state.id]) for state in states], prompt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs(TokenInputs):
    """What a run reads."""

    agent: QueryAgent  # has the bare prompt and those of the styles
    library: CorpusLibrary
    train: Sequence[QueryState]  # train, dev: the questions, as states of the first hop
    dev: Sequence[QueryState]
    drawn: Drawn  # of all evaluation questions, those of `dev`
    script: Script | None  # what is demonstrated; None: nothing is


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
    train: list[Sample] = []
    passages: Callable[[], Iterable[Passage]] | None = None
    if trains or pool is not None:
        if is_made:
            made = bridge_questions(asked.bridge_seed, "train", range(asked.bridge_corpus))
        few = made[: asked.bridge_train]
        tried = (
            [each.query for each in few] if is_made else read_samples(asked.train, from_corpus=True)
        )
        train = without_asked(tried, dev)
        train = train[: asked.most] if asked.most else train
        passages = partial(_passages, config, train, dev)
    begun = pool is not None or has_begun(workdir)
    library = open_search(config.search, passages, pool or workdir / CORPUS, begun=begun)
    states = _states(config, train, library) if trains else []
    script = script_of(config, made, library) if is_made and trains else None
    writing, variants = config.writing, style_variants() if config.tries.ways == STYLED else ()
    prompt = QueryPrompt(prompts.load(writing.prompt), variants, writing.passage_words)
    agent = QueryAgent(prompt, writing.k, writing.stop)

    texts = partial(script.texts, config) if script else None
    model, speech, digest = model_of(config, workdir, mesh, texts, config.writing.query_tokens)
    dev_states = _states(config, dev, library)
    longest = max((*states, *dev_states), key=lambda state: len(state.question))
    for variant in range(len(agent.prompt.names)):
        messages = agent.prompt.messages(longest.asked_by(variant))
        check_room(config, speech, longest.id, messages, config.writing.query_tokens)
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
            "questions": digest_of(states),
            DEV: digest_of(dev_states),
            "model": digest,
            "prompt": agent.prompt.prompt.fingerprint,
            "corpus": library.corpus.digest,
        },
    )


def _dev(config: LeretConfig) -> list[Sample]:
    asked = config.questions
    if asked.dev != BRIDGE:
        return read_samples(asked.dev, from_corpus=True)
    made = bridge_questions(asked.bridge_seed, "dev", range(asked.bridge_dev))
    return [each.query for each in made]


def _passages(config: LeretConfig, train: Sequence[Sample], dev: Sequence[Sample]) -> list[Passage]:
    return pooled(_pages(config, train, dev))


def _pages(config: LeretConfig, train: Sequence[Sample], dev: Sequence[Sample]) -> Iterable[Page]:
    """The passages of all questions; of the made world, of more questions than are asked."""
    yield from (page for each in (*train, *dev) for page in each.passages)
    asked = config.questions
    if asked.train == BRIDGE:
        more = range(asked.bridge_train, asked.bridge_corpus)
        for each in bridge_questions(asked.bridge_seed, "train", more):
            yield from each.query.passages


def _states(
    config: LeretConfig, questions: Sequence[Sample], library: CorpusLibrary
) -> list[QueryState]:
    search = config.search
    states, left_out = states_on(
        questions, library.corpus, search.gold_by, max_missing_share=search.max_missing_share
    )
    if left_out:
        log(left_out)
    return states


def digest_of(states: Sequence[QueryState]) -> str:
    """A digest of the questions and their gold pages."""
    return fingerprint((state.id, state.question, state.pages) for state in states)

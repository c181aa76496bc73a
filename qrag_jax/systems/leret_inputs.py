"""Reads and checks the questions, the corpus and the model of a LeReT run, before it plays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from qrag_jax.data.reading import without_asked
from qrag_jax.data.sample import Sample
from qrag_jax.data.scripted import BridgeQuestion, bridge_questions
from qrag_jax.environments.demonstrations import scripts, style_variants
from qrag_jax.environments.episode import Look
from qrag_jax.environments.queries import Pool, QueryAgent, QueryPrompt, QueryState
from qrag_jax.evaluators.eval_config import drawn
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
    ) -> list[tuple[Any, ...]]:
        """The hops of demonstrations `first`, `first` + 1 and so on, of these questions."""
        state, writing = self.demonstrated[0][0], config.writing  # any question's state will do

        def search(queries: Sequence[str]) -> list[Pool | Failure]:
            return self.library.look([(state, Look(query, writing.k)) for query in queries])

        of, drawn = scripts(), config.styles
        starts = [
            of.Start(
                *self.demonstrated[each], of.draw_styles(drawn, config.seed, draw, writing.hops)
            )
            for draw, each in enumerate(numbers, first)
        ]
        return of.play_styled(search, starts, writing.order, drawn.most_words)

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
    states = states_on([each.query for each in made], library.corpus, config.search.gold_by).states
    words = config.writing.passage_words
    prompt = QueryPrompt(prompts.load(config.writing.prompt), style_variants(), words)
    return Script(library, [(state, by_id[state.id]) for state in states], prompt)


def load_inputs(
    config: LeretConfig,
    workdir: Path,
    mesh: Mesh,
    *,
    trains: bool = True,
    pool: Path | None = None,
) -> TokenInputs:
    """Reads the questions, writes or opens the corpus, prepares the model.

    Args:
        trains: else there are no training questions.
        pool: a folder for the pooled passages of the config's questions; None: the run's, which is
            written by what trains.
    """
    asked, search, writing = config.questions, config.search, config.writing
    is_made, seed = asked.train == BRIDGE, asked.bridge_seed
    if asked.dev == BRIDGE:
        every_dev = [e.query for e in bridge_questions(seed, "dev", range(asked.bridge_dev))]
    else:
        every_dev = read_samples(asked.dev, from_corpus=True)
    made: list[BridgeQuestion] = []
    train: list[Sample] = []
    passages: Callable[[], Iterable[Passage]] | None = None
    if trains or pool is not None:
        if is_made:
            made = bridge_questions(seed, "train", range(asked.bridge_corpus))
            tried = [each.query for each in made[: asked.bridge_train]]
        else:
            tried = read_samples(asked.train, from_corpus=True)
        train = without_asked(tried, every_dev)
        train = train[: asked.most or len(train)]

        def passages() -> Iterable[Passage]:
            more = (each.query for each in made[asked.bridge_train :])
            return pooled(page for e in (*train, *every_dev, *more) for page in e.passages)

    begun = pool is not None or has_begun(workdir)
    library = open_search(search, passages, pool or workdir / CORPUS, begun=begun)

    def states_of(questions: Sequence[Sample]) -> list[QueryState]:
        found = states_on(
            questions, library.corpus, search.gold_by, max_missing_share=search.max_missing_share
        )
        if found.lacking:
            log(found.summary)
        return found.states

    states = states_of(train) if trains else []
    script = script_of(config, made, library) if is_made and trains else None
    variants = style_variants() if config.tries.ways == STYLED else ()
    prompt = QueryPrompt(prompts.load(writing.prompt), variants, writing.passage_words)
    texts = partial(script.texts, config) if script else None
    model, speech, digest = model_of(config, workdir, mesh, texts, writing.query_tokens)
    dev = states_of(every_dev)
    longest = max((*states, *dev), key=lambda state: len(state.question))
    for variant in range(len(prompt.names)):
        messages = prompt.messages(longest.asked_by(variant))
        check_room(config, speech, longest.id, messages, writing.query_tokens)
    shown = drawn([state.id for state in dev], config.eval)
    return TokenInputs(
        model=model,
        agent=QueryAgent(prompt, writing.k, writing.stop),
        library=library,
        speech=speech,
        train=states,
        dev=[dev[number] for number in shown.places],
        drawn=shown,
        script=script if SCRIPT in config.stages else None,
        data={
            "questions": digest_of(states),
            DEV: digest_of(dev),
            "model": digest,
            "prompt": prompt.prompt.fingerprint,
            "corpus": library.corpus.digest,
        },
    )


def digest_of(states: Sequence[QueryState]) -> str:
    """A digest of the questions and their gold pages."""
    return fingerprint((state.id, state.question, state.pages) for state in states)

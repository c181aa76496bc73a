"""Played hops of a query writer as tries, and the states that the next hop begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from qrag_jax.data.sample import Page, Sample
from qrag_jax.environments.episode import Document, Failed
from qrag_jax.environments.queries import (
    BY_PASSAGE,
    BY_TITLE,
    SEARCHED,
    STOPPED,
    Pool,
    QueryState,
    Searched,
    grown,
    key_of,
    normalised_title,
)
from qrag_jax.errors import InputError
from qrag_jax.feedback.pairs import StateKey, Try, pool_scores
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.judged_queries import names_of
from qrag_jax.retrieval.protocol import NONE
from qrag_jax.rollouts.token_episodes import TokenEpisode


@dataclasses.dataclass(frozen=True)
class Scoring:
    k: int  # passages that a query finds
    measure: str  # of the pool after the hop, which is learned from
    order: str  # of the pool, one of `queries.ORDERS`
    gold_by: str  # what a page is known by, one of `queries.KEYS`

    def pool_scores(self, state: QueryState, pool: Pool) -> dict[str, float]:
        pages = [key_of(each, self.gold_by) for each in pool]
        return pool_scores(pages, state.pages, state.hop, self.k)


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    at: StateKey  # which state
    state: QueryState  # the state, with the number of the prompt that asks
    draw: int  # number of the draw among those of this prompt


def try_of(asked: Asked, episode: TokenEpisode, scoring: Scoring) -> Try:
    """What a played hop came to; a failure has no reward."""
    state, ended = asked.state, episode.ended
    turns = [turn for segment in episode.segments for turn in segment]
    last = turns[-1] if turns else None
    pool, scores, reward = state.pool, dict[str, float](), None
    found: tuple[tuple[str, float], ...] = ()
    if isinstance(ended, Failed):
        outcome, query = ended.cause, ""
    else:
        assert isinstance(ended, Searched)
        outcome, query = ended.outcome, ended.answer
        found = tuple((each.id, each.score) for each in ended.found)
        pool = grown(state.pool, ended.found, scoring.order)
        if outcome in (SEARCHED, STOPPED):
            scores = scoring.pool_scores(state, pool)
            reward = scores[scoring.measure]
    return Try(
        **asked.at._asdict(),
        variant=state.variant,
        draw=asked.draw,
        query=query,
        sampled=tuple(last.sampled.tolist()) if last else (),
        log_probs=tuple(last.log_probs.tolist()) if last else (),
        finish=last.finish if last else "",
        outcome=outcome,
        found=found,
        pool=tuple(each.id for each in pool),
        scores=scores,
        reward=reward,
        version=last.version if last else "",
    )


Opened = Callable[[QueryState, Sequence[str]], Sequence[Document]]  # (state, ids) → passages


def state_after(state: QueryState, each: Try, opened: Opened) -> QueryState:
    """The state that the next hop begins with, if this try goes on."""
    known = {document.id: document for document in state.pool}
    scores = dict(each.found)
    new = [name for name in each.pool if name not in known]
    for document in opened(state, new):
        known[document.id] = document._replace(score=scores[document.id])
    return state.after(tuple(known[name] for name in each.pool))


# ---------------------------------------------------------------- questions on a corpus


def states_on(
    questions: Sequence[Sample],
    corpus: StoredCorpus,
    by: str,
    max_missing_share: float = 0.0,
) -> tuple[list[QueryState], str]:
    """The states before the first hop, and one line on what the corpus lacks; "": nothing.

    States are those of the questions all of whose gold pages are in the corpus, in their order; the
    others no search could solve. Gold pages are keyed as `environments.queries.key_of` keys what is
    found. By title, all passages of a page are its gold passages, and pages of one title are one
    page. By passage, each gold passage is a page: the one with its id if the data name that, or
    else with its text.

    Args:
        by: one of `queries.KEYS`.
        max_missing_share: of the questions, those of which the corpus may lack a gold page.
    """
    if not questions:
        raise InputError(
            "there is no question to search for; name parts of data that have some in "
            "config.questions."
        )
    for question in questions:
        for page in question.gold:
            if by == BY_TITLE and not page.title:
                raise InputError(
                    f"a gold page of question {question.id} has no title; set "
                    f"config.search.gold_by to {BY_PASSAGE!r}."
                )
            if by == BY_PASSAGE and not (page.text or page.id):
                raise InputError(
                    f"the gold page {page.title!r} of question {question.id} is known by its title "
                    f"only; set config.search.gold_by to {BY_TITLE!r}."
                )
    pages = [page for question in questions for page in question.gold]
    names = _by_title(pages, corpus) if by == BY_TITLE else _by_passage(pages, corpus)
    states: list[QueryState] = []
    lacking: list[str] = []
    for question in questions:
        missing = next((page for page in question.gold if page not in names), None)
        if missing is not None:
            lacking.append(f"{missing.title or missing.whole!r} of {question.id}")
            continue
        gold = tuple(dict.fromkeys(name for page in question.gold for name in names[page]))
        titles = dict.fromkeys(normalised_title(page.title) for page in question.gold)
        states.append(
            QueryState(
                question.id,
                question.question,
                question.answers,
                hops=len(titles if by == BY_TITLE else gold),
                gold_ids=gold,
                pages=tuple(titles) if by == BY_TITLE else gold,
                source=question.source,
            )
        )
    first = f"the first is {lacking[0]}" if lacking else ""
    if not states or len(lacking) > max_missing_share * len(questions):
        raising = f", or raise config.search.max_missing_share, {max_missing_share}"
        raise InputError(
            f"the corpus lacks a gold page of {len(lacking)} of {len(questions)} questions "
            f"({first}); give the corpus that they are about in config.search.index"
            f"{raising if states else ''}."
        )
    left_out = f"{len(lacking)} of {len(questions)} questions left out, of which the corpus lacks a"
    return states, f"{left_out} gold page; {first}" if lacking else ""


def _by_title(pages: Iterable[Page], corpus: StoredCorpus) -> dict[Page, tuple[str, ...]]:
    """The ids of the passages of each page; all passages are read."""
    wanted = {page: normalised_title(page.title) for page in pages}
    names: dict[str, list[str]] = {key: [] for key in wanted.values() if key}
    for passage in corpus:
        key = normalised_title(passage.title)
        if key in names:
            names[key].append(passage.name)
    return {page: tuple(names[key]) for page, key in wanted.items() if names.get(key)}


def _by_passage(pages: Iterable[Page], corpus: StoredCorpus) -> dict[Page, tuple[str, ...]]:
    wanted = dict.fromkeys(pages)
    named = [page.id for page in wanted if page.id]
    numbers = corpus.numbers(named)
    there = {name for name, number in zip(named, numbers, strict=True) if number != NONE}
    by_text = names_of(corpus, (page.whole for page in wanted if not page.id))
    found: dict[Page, tuple[str, ...]] = {}
    for page in wanted:
        name = page.id if page.id in there else by_text.get(page.whole)
        if name is not None:
            found[page] = (name,)
    return found

"""What LeReT learns from: prompts → tries, hop after hop → lessons; kept in the run's folder.

Every draw depends on the seed, the iteration, the hop, the question, the state, the prompt and the
number of the draw alone, so a play that was killed goes on to the same tries.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from qrag_jax.environments import few_shot, queries
from qrag_jax.environments.episode import Failed, Look
from qrag_jax.environments.few_shot import Tried
from qrag_jax.environments.queries import Pool, QueryAgent, QueryPrompt, QueryState, Variant
from qrag_jax.errors import InputError
from qrag_jax.feedback import pairs
from qrag_jax.feedback.pairs import AP, StateKey, StatePairs, Try, choose, pairs_of
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics.row_log import Hop, RowLog
from qrag_jax.metrics.row_log import Searched as SearchedRow
from qrag_jax.rollouts.libraries import CorpusLibrary
from qrag_jax.rollouts.token_episodes import Episode, Speech, Start, draw_keys
from qrag_jax.rollouts.trajectories import STOP, Segment, Turn
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.systems.leret.config import FEW_SHOT, PREFERENCE, SFT, LeretConfig

Play = Callable[[Sequence[Start]], list[Episode]]
PlayBy = Callable[[QueryPrompt, Sequence[Start]], list[Episode]]

# ---------------------------------------------------------------- a hop, and all of a question


class Asked(NamedTuple):
    at: StateKey  # which state
    state: QueryState  # the state, with the number of the prompt that asks
    draw: int  # number of the draw among those of this prompt


def pool_scores(config: LeretConfig, state: QueryState, pool: Pool) -> dict[str, float]:
    """What a pool is worth after the hop of this state."""
    pages = [queries.key_of(passage, config.search.gold_by) for passage in pool]
    return pairs.pool_scores(pages, state.pages, state.hop, config.writing.k)


def try_of(config: LeretConfig, asked: Asked, episode: Episode) -> Try:
    """What a played hop came to; a failure has no reward."""
    state, ended, turns = asked.state, episode.ended, [*itertools.chain(*episode.segments)]
    pool, scores, reward = state.pool, dict[str, float](), None
    hits: tuple[tuple[str, float], ...] = ()
    if isinstance(ended, Failed):
        outcome, query = ended.cause, ""
    else:
        assert isinstance(ended, queries.Searched)
        outcome, query = ended.outcome, ended.answer
        hits = tuple((passage.id, passage.score) for passage in ended.found)
        pool = queries.grown(state.pool, ended.found, config.writing.order)
        if outcome in (queries.SEARCHED, queries.STOPPED):
            scores = pool_scores(config, state, pool)
            reward = scores[config.reward.measure]
    return Try(
        **asked.at._asdict(),
        variant=state.variant,
        draw=asked.draw,
        query=query,
        sampled=tuple(turns[-1].sampled.tolist()) if turns else (),
        outcome=outcome,
        found=hits,
        pool=tuple(passage.id for passage in pool),
        scores=scores,
        reward=reward,
    )


def state_after(state: QueryState, tried: Try, library: CorpusLibrary) -> QueryState:
    """The state that the next hop begins with, if this try goes on."""
    known = {passage.id: passage for passage in state.pool}
    scores = dict(tried.found)
    new = [name for name in tried.pool if name not in known]
    for passage in library.named(new):
        known[passage.id] = passage._replace(score=scores[passage.id])
    return state.after(tuple(known[name] for name in tried.pool))


def search_hops(
    config: LeretConfig,
    library: CorpusLibrary,
    states: Sequence[QueryState],
    play: Play,
    stream: int,
    *,
    variant: int = 0,
) -> tuple[list[SearchedRow], list[Tried]]:
    """Plays all hops of questions side by side: a row for each question, and all tries by hop.

    A query that is empty, too long or failed finds nothing, and the next hop asks again. Each
    stream has other draws. `variant`: number of the prompt that asks.
    """
    now, going, tried = [*states], [*range(len(states))], list[Tried]()
    hops: list[list[Hop]] = [[] for _ in states]
    of_stream = jax.random.fold_in(jax.random.key(config.seed), stream)
    for hop in range(1, config.writing.hops + 1):
        key = jax.random.fold_in(of_stream, hop)
        keys = np.asarray(draw_keys(key, np.array(going, np.uint32), 1))[:, 0]
        asked = {p: Asked(StateKey(p, hop), now[p].asked_by(variant), 0) for p in going}
        starts = [Start(a.state, key) for a, key in zip(asked.values(), keys, strict=True)]
        episodes = dict(zip(going, play(starts) if starts else [], strict=True))
        for place, before in enumerate(now):
            wrote: dict[str, Any] = {"query": "", "outcome": ""}
            now[place] = before.after(before.pool)
            if place in asked:
                episode = episodes[place]
                attempt = try_of(config, asked[place], episode)
                if attempt.outcome == queries.SEARCHED:
                    now[place] = state_after(before, attempt, library)
                reward = attempt.scores[AP] if attempt.scored else None
                tried.append(Tried(before, attempt.query, now[place].pool, reward))
                wrote = {
                    "query": attempt.query,
                    "outcome": attempt.outcome,
                    "read": sum(len(turn.observed) for turn in itertools.chain(*episode.segments)),
                    "sampled": len(attempt.sampled),
                    "found": attempt.found,
                }
            pool = now[place].pool
            scores = pool_scores(config, before, pool)
            hops[place].append(Hop(**wrote, pool=tuple(p.id for p in pool), scores=scores))
        going = [place for place in going if hops[place][-1].outcome != queries.STOPPED]
    rows = [
        searched_row(config, library, state, last.pool, question_hops)
        for state, last, question_hops in zip(states, now, hops, strict=True)
    ]
    return rows, tried


def searched_row(
    config: LeretConfig, library: CorpusLibrary, state: QueryState, pool: Pool, hops: Sequence[Hop]
) -> SearchedRow:
    """How a question was searched for, with the texts of the last pool, and of the gold pages."""
    known = {queries.key_of(p, config.search.gold_by): p for p in library.named(state.gold_ids)}
    known |= {queries.key_of(p, config.search.gold_by): p for p in reversed(pool)}  # first wins
    gold = [known[page] for page in state.pages if page in known]
    return SearchedRow(
        *(state.id, state.question, state.answers, state.pages, tuple(hops), state.source),
        gold=tuple(passage.id for passage in gold),
        texts={passage.id: passage.text for passage in (*pool, *gold)},
    )


def by_rule(library: CorpusLibrary, k: int, write: Callable[[QueryState], str]) -> Play:
    """Tries whose queries a rule writes, of which each finds k passages."""

    def play(starts: Sequence[Start]) -> list[Episode]:
        tasks: list[Any] = [start.task for start in starts]
        looks = [(task, Look(write(task), k)) for task in tasks]
        ends = (
            Failed(result.cause, result.message)
            if isinstance(result, Failure)
            else queries.Searched(look.query, found=result)
            for (_, look), result in zip(looks, library.look(looks), strict=True)
        )
        return [Episode(ended, (), 1) for ended in ends]

    return play


# ---------------------------------------------------------------- the tries of an iteration

FOLDER, PAIRS = "tries", "pairs.jsonl"  # in the run's folder, and in those of iterations there
TRIES = RowLog("tries", Try)
_SPREAD = 256  # keys of questions lie so far apart
_HOPS = 64  # most hops, likewise
_STREAM = 2**31 - 10_000  # of the draws of examples; each list of tries has the next


@dataclasses.dataclass(frozen=True)
class Trying:
    """The prompts and the tries of a run; what is in its folder is not made again.

    `play` has the weights that make what is missing; None: these are gone, and all must be there.
    """

    config: LeretConfig
    agent: QueryAgent  # with the bare prompt, and those of the styles
    questions: Sequence[QueryState]  # of the training, before the first hop
    library: CorpusLibrary
    workdir: Path

    @cached_property
    def split(self) -> few_shot.Split | None:
        """Questions of examples, of their ranking, and all others; None: there are no examples."""
        if self.config.tries.ways != FEW_SHOT:
            return None
        return few_shot.split_questions(len(self.questions), self.config.few_shot)

    @property
    def asked(self) -> Sequence[int]:
        """The questions that are tried: those that no example is of."""
        return range(len(self.questions)) if self.split is None else self.split.training

    def prompt(self, play: PlayBy | None = None) -> QueryPrompt:
        """All ways to ask; `play` has the first weights."""
        bare = self.agent.prompt
        if self.split is None:
            return bare
        config, path = self.config.few_shot, self.workdir / few_shot.NAME
        prompts = few_shot.FewShotPrompts(bare.prompt.fingerprint)
        if path.exists():
            prompts = few_shot.read_few_shot(path, prompts.template)
        for number in range(len(prompts.rounds) + 1, config.rounds + 1):
            if play is None:
                raise InputError(f"{path} is unfinished, its weights gone; begin a new --workdir.")
            log(
                f"examples, round {number}: {config.bootstrap_questions} questions, then "
                f"{config.candidates} prompts on {config.rank_questions} others"
            )
            ranked = self._round(prompts, number, self.split, play)
            prompts = dataclasses.replace(prompts, rounds=(*prompts.rounds, ranked))
            # A round that leaves no prompt is refused here, before it is kept: it can be mended.
            kept = few_shot.kept_variants(prompts.rounds, bare, config.kept)
            hosts.first_does(partial(few_shot.write_few_shot, path, prompts))
            scores = {prompt.name: prompt.score for ranked in prompts.rounds for prompt in ranked}
            listed = ", ".join(f"{variant.name} ({scores[variant.name]:.3f})" for variant in kept)
            log(f"prompts with examples by mean AP on questions held out: {listed}")
        variants = few_shot.kept_variants(prompts.rounds, bare, config.kept)
        return dataclasses.replace(bare, variants=variants)

    def _round(
        self, prompts: few_shot.FewShotPrompts, number: int, split: few_shot.Split, play: PlayBy
    ) -> tuple[few_shot.Candidate, ...]:
        config, stream = self.config, _STREAM + 100 * number

        def tried(places: Sequence[int], variants: tuple[Variant, ...], stream: int) -> list[Tried]:
            """The tries of questions at all hops, by the bare prompt or by one other."""
            by = partial(play, dataclasses.replace(self.agent.prompt, variants=variants))
            states = [self.questions[place] for place in places]
            return search_hops(config, self.library, states, by, stream, variant=len(variants))[1]

        best = () if not prompts.rounds else (prompts.rounds[-1][0].variant,)
        shown = tried(split.bootstrap, best, stream)
        solved = few_shot.full_credit(shown, config.writing.hops, config.search.gold_by)
        candidates = few_shot.drawn_candidates(solved, config.few_shot, number)
        rewards = [
            [one.reward for one in tried(split.rank, (candidate.variant,), stream + n)]
            for n, candidate in enumerate(candidates, start=1)
        ]
        return few_shot.ranked(candidates, rewards)

    def variants(self, prompt: QueryPrompt) -> tuple[int, ...]:
        """Numbers of the prompts that try; there may be fewer than the config asks for."""
        there = range(len(prompt.names))
        return tuple(number for number in self.config.tries.variants if number in there)

    # ---------------------------------------------------------------- tries

    def folder(self, number: int) -> Path:
        return self.workdir / FOLDER / f"iteration-{number}"

    def iteration(
        self, number: int, play: PlayBy | None, stop: StopSignal
    ) -> tuple[list[Try], dict[StateKey, QueryState]]:
        """The tries of iteration `number`, by the weights of its start, and all states of them.

        Prompts are made by the weights of the first iteration.
        """
        prompt = self.prompt(play if number == 1 else None)
        every, states, variants = list[Try](), dict[StateKey, QueryState](), self.variants(prompt)
        now = {StateKey(n, 1): self.questions[place] for n, place in enumerate(self.asked)}
        for hop in range(1, self.config.writing.hops + 1):
            states |= now
            parts, path = self._parts(now, variants), self.folder(number) / f"hop-{hop}.jsonl"
            tries, ends = TRIES.read_partial(path), [0, *itertools.accumulate(map(len, parts))]
            # What is sampled side by side may depend on all of a part, in the last bits: the tries
            # of whole parts are kept, and what is behind them is dropped.
            whole = sum(end <= len(tries) for end in ends) - 1
            del tries[ends[whole] :]
            if missing := parts[whole:]:
                if play is None:
                    raise InputError(f"{path} lacks tries; bring it back, or give a new --workdir.")
                kept = f", {len(tries)} are kept" if tries else ""
                log(f"iteration {number}, hop {hop}: {ends[-1]} tries at {len(now)} states{kept}")
                hosts.first_does(partial(TRIES.rewrite, path, tries))
            for part in missing:
                assert play is not None
                stop.check()
                episodes = play(prompt, self._starts(number, hop, part))
                batch = [try_of(self.config, a, e) for a, e in zip(part, episodes, strict=True)]
                hosts.first_does(partial(TRIES.append, path, batch))
                tries += batch
            every += tries
            now = self._next(number, hop, tries, states)
        return every, states

    def _parts(
        self, states: dict[StateKey, QueryState], variants: Sequence[int]
    ) -> list[list[Asked]]:
        """What is tried at once: all tries of a few questions."""
        config, by_part = self.config.tries, dict[int, list[Asked]]()
        for at, state in states.items():
            part = by_part.setdefault(at.question // config.questions, [])
            part += [
                Asked(at, state.asked_by(variant), draw)
                for variant in variants
                for draw in range(config.samples)
            ]
        return [by_part[number] for number in sorted(by_part)]

    def _starts(self, number: int, hop: int, part: Sequence[Asked]) -> list[Start]:
        key = jax.random.fold_in(jax.random.key(self.config.seed), number * _HOPS + hop)
        numbers = [a.at.question * _SPREAD for a in part]
        draws = [a.state.variant * self.config.tries.samples + a.draw for a in part]
        keys = np.asarray(draw_keys(key, np.array(numbers, np.uint32), max(draws) + 1))
        return [Start(a.state, keys[n, draws[n]]) for n, a in enumerate(part)]

    def _next(
        self, number: int, hop: int, tries: Sequence[Try], states: Mapping[StateKey, QueryState]
    ) -> dict[StateKey, QueryState]:
        """The states of the next hop: of each question that goes on, behind one of its tries."""
        by_question: dict[int, list[Try]] = {}
        for attempt in tries:
            by_question.setdefault(attempt.question, []).append(attempt)
        following = {}
        for question, attempts in sorted(by_question.items()):
            seed = (self.config.seed, number, hop, question)
            if best := choose(attempts, seed):
                at = StateKey(question, hop + 1)
                following[at] = state_after(states[best.at], best, self.library)
        return following


# ---------------------------------------------------------------- what is learned from tries

_MEASURED = 8  # states whose prompts are measured for the longest


def states_of(config: LeretConfig, tries: Sequence[Try]) -> list[StatePairs]:
    """What is learned at each state that was tried in an iteration."""
    by_state: dict[StateKey, list[Try]] = {}
    for attempt in tries:
        by_state.setdefault(attempt.at, []).append(attempt)
    return [pairs_of(tries, config.pairs) for tries in by_state.values()]


class Lesson(NamedTuple):
    """A query to imitate; or a pair of them behind one prompt, the better one first."""

    queries: tuple[Segment, ...]
    question: int  # its place among those that are tried; of a file of pairs, that of its pair


class Lessons(NamedTuple):
    of: dict[str, list[Lesson]]  # by stage: the best query of each state, and the pairs
    # The longest rows that the tries might have given. The shape of blocks is chosen with them, so
    # that iterations whose lessons differ share a program.
    longest: list[Segment]
    too_long: int  # states that were left out, because prompt and query have more tokens than fit
    texts: Sequence[tuple[str, str, str]]  # the pairs as files of them have them


def lessons_of(
    states: Sequence[StatePairs],
    shown: Mapping[StateKey, QueryState],
    prompt: QueryPrompt,
    speech: Speech,
) -> Lessons:
    """What the tries teach by the bare prompt."""
    imitated, pairs, too_long = list[Lesson](), list[Lesson](), 0
    asked, longest, texts = [], list[Segment](), []  # prompts of states with queries
    for state in states:
        if not state.queries:
            continue
        asked.append(messages := prompt.messages(shown[state.at].asked_by(0)))
        if state.target is None and not state.pairs:
            continue
        opening = speech.scaffold.opening(messages)
        text = speech.tokenizer.decode(opening.tolist(), skip_special_tokens=False)
        wrote = [query.query for query in state.queries]
        texts += [(text, wrote[winner], wrote[loser]) for winner, loser in state.pairs]
        if len(opening) + max(len(query.sampled) for query in state.queries) > speech.room:
            too_long += 1
            continue
        turns, question = [(_turn(opening, query),) for query in state.queries], state.at.question
        if state.target is not None:
            imitated.append(Lesson((turns[state.target],), question))
        pairs += [Lesson((turns[win], turns[lose]), question) for win, lose in state.pairs]
    if asked:
        every = (query for state in states for query in state.queries)
        query = max(every, key=lambda query: len(query.sampled))
        # Texts of more characters have more tokens, or nearly so many.
        asked.sort(key=lambda messages: sum(len(text) for _, text in messages))
        for opening in map(speech.scaffold.opening, asked[-_MEASURED:]):
            if len(opening) + len(query.sampled) <= speech.room:
                longest.append((_turn(opening, query),))
    return Lessons({SFT: imitated, PREFERENCE: pairs}, longest, too_long, texts)


def _turn(opening: np.ndarray, query: Try) -> Turn:
    ids = np.array(query.sampled, np.int32)
    return Turn(opening, ids, np.zeros(len(ids), np.float32), STOP)


def lessons_in(texts: Sequence[tuple[str, str, str]], speech: Speech) -> Lessons:
    """What pairs of a file teach; imitated is what no pair of its prompt rejects."""
    imitated, pairs, too_long = dict[tuple[str, str], Lesson](), list[Lesson](), 0
    worse = {(prompt, rejected) for prompt, _, rejected in texts}
    for place, (prompt, *both) in enumerate(texts):
        opening = speech.scaffold.ids(prompt)
        turns = [speech.turn_of(opening, text) for text in both]
        if len(opening) + max(len(turn.sampled) for turn in turns) > speech.room:
            too_long += 1
            continue
        pairs.append(Lesson(tuple((turn,) for turn in turns), place))
        if (best := (prompt, both[0])) not in worse:
            imitated.setdefault(best, Lesson(((turns[0],),), place))
    return Lessons({SFT: [*imitated.values()], PREFERENCE: pairs}, [], too_long, texts)

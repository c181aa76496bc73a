"""A trained retriever over a corpus: search in several steps, each step by an engine.

A state is the question and the passages taken so far; the Q-value of a passage is the inner product
of the two vectors (Q-RAG, arXiv 2511.07328), so the passage to take next is a nearest neighbour of
the state. This module needs no jax. On a corpus that is one document it plays as the trainer's
evaluations do (`rollouts.chunks.rollout`, `rollouts.beam_search.BeamSearch`).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.boolean_search import BooleanIndex, parse_boolean
from qrag_jax.retrieval.protocol import NONE, Index, Passage, Queries, VectorIndex, Where, row_of
from qrag_jax.retrieval.towers import Towers
from qrag_jax.retrieval.vectors import scan
from qrag_jax.runtime import retriever_config

_STATES = 1024  # encoded and searched for side by side, at most


class Hit(NamedTuple):
    step: int  # the step that found it, from 1
    score: float  # its Q-value in the state of that step
    id: str
    title: str
    text: str
    metadata: Mapping[str, Any]


def hit_of(step: int, score: float, passage: Passage) -> Hit:
    return Hit(step, score, passage.name, passage.title, passage.text, passage.metadata)


_Found = tuple[int, int, float]  # step, passage, Q


@dataclasses.dataclass(frozen=True)
class Rules:
    """How a retriever searches.

    Attributes:
        sort_by_index: states list passages in the order of the corpus, else in the order taken.
        placement: of passages; None: vectors are not rotated.
        per_step: passages found at each step; more than one only if the beam is 1. The best one
            goes into the state, as in training, the others are further results.
    """

    search: retriever_config.Search
    sort_by_index: bool = False
    placement: retriever_config.Positions | None = None
    per_step: int = 1
    title_separator: str = retriever_config.TITLE_SEPARATOR

    def __post_init__(self) -> None:
        if self.placement is not None and self.placement.kind == "random_published":
            raise InputError(
                "the positions random_published differ for every question, so no index can be "
                "searched with them; train with config.env.positions=none, relative or absolute."
            )
        for name, value in (("beam", self.search.beam), ("per_step", self.per_step)):
            if value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1.")
        if self.per_step > 1 and self.search.beam > 1:
            raise InputError(f"per_step is {self.per_step}, beam {self.search.beam}; set one to 1.")

    @classmethod
    def of(cls, config: retriever_config.RetrieverConfig, per_step: int = 1) -> Rules:
        """Those of an exported retriever."""
        placement = (
            None if config.positions.kind == retriever_config.NO_POSITIONS else config.positions
        )
        further = per_step, config.title_separator
        return cls(config.search, config.sort_by_index, placement, *further)

    def changed(
        self, *, topk: int | None = None, beam: int | None = None, threshold: float | None = None
    ) -> Rules:
        """The rules of a search with settings of its own; None: as here.

        If `topk` passages are more than the steps, and `beam` does not forbid it, each step finds
        several, without a beam.
        """
        per_step = self.per_step
        if topk is not None and beam in (None, 1):
            per_step = max(per_step, -(-topk // self.search.max_steps))
            beam = 1 if per_step > self.per_step else beam
        settings = {"beam": beam, "stop_threshold": threshold}
        changes: dict[str, Any] = {name: x for name, x in settings.items() if x is not None}
        changed = dataclasses.replace(self.search, **changes)
        return dataclasses.replace(self, search=changed, per_step=per_step)

    def steps_for(self, topk: int | None) -> int:
        """The steps that find so many passages, or the most there are; None: all steps."""
        most = self.search.max_steps
        return most if topk is None else min(most, -(-topk // self.per_step))


# ---------------------------------------------------------------------- paths of a beam
# Which paths through passages, the chunks of a document or a corpus, stay at each step ("Plan
# Q-RAG"), by Q-values of whatever source.


@dataclasses.dataclass(frozen=True)
class Path:
    taken: tuple[int, ...] = ()  # passages
    q: tuple[float, ...] = ()  # theirs
    score: float = 0.0  # that paths are ranked by
    ended: bool = False

    def longer(self, action: int, q: float, score: float) -> Path:
        return Path((*self.taken, action), (*self.q, q), score)


# The best actions that a path may take next, each once: their Q, float32 `[n]`; and they, int [n].
Choices = tuple[np.ndarray, np.ndarray]


def best_first(values: np.ndarray, actions: np.ndarray) -> Choices:
    """In order of Q; of equal ones the first stays first, as with argmax."""
    order = np.argsort(-values, kind="stable")
    return values[order], actions[order]


def best_paths(
    beam: Sequence[Path],
    choices: Sequence[Choices | None],
    config: retriever_config.Search,
    stop: int,
    support: Sequence[int] = (),
) -> list[Path]:
    """The W best continuations of the paths of one question, best first.

    Of several paths that took the same passages, in any order, only the best one stays.

    Args:
        choices: of each path; those of a path that has ended are not read.
        stop: the action that ends a path, and is no passage.
        support: passages that end a path that has taken them all; (): none do.
    """
    paths = [path for path in beam if path.ended]
    for path, choice in zip(beam, choices, strict=True):
        if path.ended or choice is None:
            continue
        values, actions = best_first(*choice)
        if not len(values) or values[0] <= config.threshold:
            paths.append(dataclasses.replace(path, ended=True))
            continue
        scores = _scores(config, path, values.astype(np.float64))
        for action, q, score in zip(actions, values, scores, strict=True):
            if action == stop and q > config.threshold:
                paths.append(dataclasses.replace(path, score=float(score), ended=True))
            elif q > config.threshold:
                longer = path.longer(int(action), float(q), float(score))
                ended = bool(support) and {*support} <= {*longer.taken}
                paths.append(dataclasses.replace(longer, ended=ended))
    paths.sort(key=lambda path: -path.score)
    distinct: dict[tuple[frozenset[int], bool], Path] = {}
    for path in paths:
        distinct.setdefault((frozenset(path.taken), path.ended), path)
    return list(distinct.values())[: config.beam]


def _scores(config: retriever_config.Search, path: Path, q: np.ndarray) -> np.ndarray:
    """Ranking scores `[n]` of the path with one more action, from the actions' Q `[n]`."""
    if config.beam_score == retriever_config.LAST:
        return q
    if config.beam_score == retriever_config.SUM:
        return path.score + config.gamma ** len(path.taken) * q
    logits = q / config.alpha
    return path.score + logits - np.logaddexp.reduce(logits)


# ---------------------------------------------------------------------- several steps


class MultiStepSearch:
    """Searches an index with a trained retriever.

    The index has the vectors of the chunk tower, before any rotation. Where passages stand at
    positions, every step reads all of them (`scan`).
    """

    def __init__(self, index: VectorIndex, towers: Towers, rules: Rules) -> None:
        self.index, self.towers, self.rules = index, towers, rules
        self._stop = towers.chunks([""])[0] if rules.search.stop_action else None

    def search(
        self,
        questions: Sequence[str],
        steps: int | Sequence[int] | None = None,
        where: Where | None = None,
    ) -> list[list[Hit]]:
        """The passages found for each question, step by step, the best of a step first.

        Longer questions than in training are cut as there (`Towers.cut`). A search ends early when
        STOP is taken, when no Q is above the threshold or when no passage is left. `steps` is the
        most, of all questions or of each; None: as many as in training.
        """
        most, count = self.rules.search.max_steps, len(questions)
        steps = most if steps is None else steps
        limits = [steps] * count if isinstance(steps, int) else [*map(int, steps)]
        if len(limits) != count or not all(1 <= limit <= most for limit in limits):
            raise InputError(f"steps is {steps}; give 1 to {most}, for all or for each.")
        size = max(_STATES // self.rules.search.beam, 1)
        hits = []
        for first in range(0, len(questions), size):
            part = slice(first, first + size)
            hits += self._search(questions[part], limits[part], where)
        return hits

    def cut(self, questions: Sequence[str]) -> list[int]:
        return self.towers.cut(questions)

    def with_rules(self, rules: Rules) -> MultiStepSearch:
        """The search over the same index by other rules, which may leave STOP out."""
        other = copy.copy(self)
        other.rules, other._stop = rules, self._stop if rules.search.stop_action else None
        return other

    def _search(
        self, questions: Sequence[str], limits: Sequence[int], where: Where | None
    ) -> list[list[Hit]]:
        passages: dict[int, Passage] = {}
        stop = len(self.index.corpus)
        beams = [[Path()] for _ in questions]
        listed: list[list[_Found]] = [[] for _ in questions]  # with several passages a step
        for step in range(max(limits)):
            live = [
                (i, j)
                for i, beam in enumerate(beams)
                for j, path in enumerate(beam)
                if step < limits[i] and not path.ended
            ]
            if not live:
                break
            paths = [beams[i][j] for i, j in live]
            asked = [questions[i] for i, _ in live]
            choices = dict(zip(live, self._choices(asked, paths, passages, where), strict=True))
            for i in {i for i, _ in live}:
                if self.rules.per_step > 1:
                    beams[i] = [self._listing(beams[i][0], choices[i, 0], listed[i])]
                else:
                    of_paths = [choices.get((i, j)) for j in range(len(beams[i]))]
                    beams[i] = best_paths(beams[i], of_paths, self.rules.search, stop)
            self._read({n for beam in beams for path in beam for n in path.taken}, passages)
        if self.rules.per_step == 1:
            best = [beam[0] for beam in beams]
            listed = [[*zip(itertools.count(1), path.taken, path.q)] for path in best]
        self._read({number for hits in listed for _, number, _ in hits}, passages)
        return [[hit_of(step, q, passages[n]) for step, n, q in hits] for hits in listed]

    def _read(self, numbers: set[int], passages: dict[int, Passage]) -> None:
        new = sorted(numbers - passages.keys())
        passages |= zip(new, self.index.corpus.passages(new), strict=True)

    def _choices(
        self,
        questions: Sequence[str],
        paths: Sequence[Path],
        passages: Mapping[int, Passage],
        where: Where | None,
    ) -> list[Choices]:
        """The best actions of each path, STOP as the number behind the last passage.

        With several passages a step there are as many more as may have been found before.
        """
        order = sorted if self.rules.sort_by_index else tuple
        texts = {
            number: retriever_config.passage_text(p.title, p.text, self.rules.title_separator)
            for number, p in passages.items()
        }
        read = (tuple(texts[number] for number in order(path.taken)) for path in paths)
        states = self.towers.states([*zip(questions, read, strict=True)])
        most = self.rules.search.max_steps
        # As many at every step, so that engines which compile for a number do so once.
        k = max(self.rules.search.actions, (self.rules.per_step - 1) * most + 1)
        taken = [path.taken for path in paths]
        if self.rules.placement is not None:
            hits = scan(self.index, states, taken, self.rules.placement, k, where=where)
        else:  # those taken fall out
            asked = min(k + most - 1, len(self.index.corpus))
            hits = self.index.search(Queries(list(questions), states), asked, where)
        choices = []
        for path, state, numbers, scores in zip(paths, states, *hits, strict=True):
            able = (numbers != NONE) & ~np.isin(numbers, path.taken)
            values, actions = scores[able][:k], numbers[able][:k]
            if self._stop is not None:
                values = np.append(values, np.float32(state @ self._stop))
                actions = np.append(actions, len(self.index.corpus))
            choices.append((values, actions))
        return choices

    def _listing(self, path: Path, choices: Choices, listed: list[_Found]) -> Path:
        """The path after a step, which found its best few passages that no step had found.

        The state takes the best passage that it does not hold, also one that was found before.
        Nothing behind STOP or not above the threshold is found.
        """
        known, step = {number for _, number, _ in listed}, len(path.taken) + 1
        best: Path | None = None
        for q, action in zip(*best_first(*choices), strict=True):
            if q <= self.rules.search.threshold or action == len(self.index.corpus):
                break
            best = best or path.longer(int(action), float(q), float(q))
            if action not in known and len(listed) - len(known) < self.rules.per_step:
                listed.append((step, int(action), float(q)))
        return best or dataclasses.replace(path, ended=True)


def by_turns(hits: Sequence[Hit]) -> list[Hit]:
    """The best hit of every step, then the second of every step, and so on."""
    steps = [[hit for hit in hits if hit.step == step] for step in sorted({h.step for h in hits})]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*steps))
    return [hit for hit in turns if hit is not None]


# ---------------------------------------------------------------------- one step


class SingleStepSearch:
    """Searches an index once for each question."""

    def __init__(self, index: Index, encoder: Any = None) -> None:
        """`encoder`: a `systems.passage_encoder.PassageEncoder`; None: words are compared."""
        self.index, self.encoder = index, encoder

    def cut(self, questions: Sequence[str]) -> list[int]:
        return self.encoder.cut(questions) if self.encoder else []

    def check(self, question: str) -> None:
        """Refuses a question that the engine cannot read, for which a search would find nothing."""
        if isinstance(self.index, BooleanIndex):
            parse_boolean(question)

    def search(
        self, questions: Sequence[str], k: int, where: Where | None = None
    ) -> list[list[Hit]]:
        """The k best passages of each question, best first; each has the step 1."""
        vectors = self.encoder(questions) if self.encoder else None
        hits = self.index.search(Queries(list(questions), vectors), k, where)
        rows = (row_of(hits, query) for query in range(len(questions)))
        read = self.index.corpus.passages
        return [
            [hit_of(1, float(score), p) for p, score in zip(read(row.numbers), row.scores)]
            for row in rows
        ]

"""Peers in PyTorch: sentence-transformers as its users train it, on the same questions.

`contrastive` is what one would try first: MiniLM learns from pairs of a question and a gold passage
to search once. `multi_step_peer` is the shortest program that searches in several steps.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.quality.corpora import CHOICE, TRAIN, Asked, Setting
from benchmarks.quality.logs import MOST, Lists, by_turns
from qrag_jax.errors import InputError
from qrag_jax.runtime.pretrained_files import find_minilm

_TRAINED_TOKENS, _SEARCHED_TOKENS = 128, 256  # of a passage, as Q-RAG's :minilm and MiniLM's folder


@dataclasses.dataclass(frozen=True)
class Grid:
    """What contrastive training tries; the recall on the questions for choices decides.

    Attributes:
        rates: peak learning rates; each falls linearly to 0 over the most steps.
        steps: numbers of steps after which the model is tried.
        batch: questions of a step.
        cut: passages found, whose recall decides.
    """

    rates: tuple[float, ...] = (2e-5, 5e-5, 1e-4)
    steps: tuple[int, ...] = (40, 80, 160)
    batch: int = 16
    cut: int = 4


GRID = Grid()


class Pair(NamedTuple):
    """A question, a gold passage, and one of its context that is not gold; names of passages."""

    question: str
    gold: str
    negative: str


def _minilm() -> Any:
    """MiniLM as sentence-transformers has it.

    Raises:
        InputError: sentence-transformers or MiniLM are not there.
    """
    if importlib.util.find_spec("sentence_transformers") is None:
        raise InputError("run pip install 'sentence-transformers>=6.0', which trains these rows.")
    if (folder := find_minilm()) is None:
        raise InputError("MiniLM was found nowhere; name its folder in QRAG_MINILM.")
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def multi_step_peer(setting: Setting, seed: int, *, trained: bool = True) -> Lists:
    """One MiniLM learns from "question + gold passages so far" → next gold passage, then searches.

    Batches of 16 at a rate of 5e-5, one pass (14 minutes on two idle cores), with gold passages in
    the data's own order; then four greedy steps, each of which appends its passage to the query.
    """
    model = _minilm()
    import torch
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    texts, questions = {p.name: p.whole for p in setting.corpus}, setting.questions[TRAIN]
    pairs = [
        (" ".join([q.text, *(texts[name] for name in q.gold[:step])]), texts[q.gold[step]])
        for q in questions
        for step in range(len(q.gold))
    ]
    random.Random(seed).shuffle(pairs)
    torch.manual_seed(seed)
    loss = MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model.train()
    for start in range(0, len(pairs) if trained else 0, 16):
        columns = zip(*pairs[start : start + 16], strict=True)
        loss([model.preprocess(list(column)) for column in columns], torch.empty(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    names, vectors = [*texts], model.eval().encode([*texts.values()], normalize_embeddings=True)
    states, steps = (
        [asked.text for asked in setting.test],
        [list[list[str]]() for _ in setting.test],
    )
    for _ in range(4):
        scores = model.encode(states, normalize_embeddings=True) @ vectors.T
        for place, row in enumerate(np.argsort(-scores, kind="stable")):
            taken = {step[0] for step in steps[place]}
            best = [name for n in row[: MOST + 4] if (name := names[n]) not in taken][:MOST]
            steps[place].append(best)
            states[place] += f" {texts[best[0]]}"
    return {asked.id: by_turns(turns) for asked, turns in zip(setting.test, steps, strict=True)}


# ---------------------------------------------------------------- contrastive


def contrastive(setting: Setting, out: Path, seed: int, grid: Grid = GRID) -> tuple[float, int]:
    """Trains by each learning rate and keeps the best model in `out`.

    Returns:
        its rate and number of steps.
    """
    texts = {passage.name: passage.whole for passage in setting.corpus}
    best, kept = -1.0, (0.0, 0)
    for rate in grid.rates:
        for model, steps in _trained(setting, texts, (seed, rate), grid):
            recall = _choice_recall(model, setting.questions[CHOICE], texts, grid.cut)
            print(f"contrastive, seed {seed}: {rate:g}, {steps} steps: {recall:.3f}", flush=True)
            if recall > best:
                best, kept = recall, (rate, steps)
                shutil.rmtree(out, ignore_errors=True)
                model.save(str(out))
    return kept


def _trained(
    setting: Setting, texts: Mapping[str, str], how: tuple[int, float], grid: Grid
) -> Iterator[tuple[Any, int]]:
    """The model after each number of steps that is tried, and this number."""
    model = _minilm()
    import torch
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    (seed, rate), last = how, max(grid.steps)
    texts_of = {asked.id: asked.text for asked in setting.questions[TRAIN]}
    torch.manual_seed(seed)
    loss = MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / last, 0.0))
    plan = _endless(setting.questions[TRAIN], grid.batch, np.random.default_rng(seed))
    for step, batch in enumerate(itertools.islice(plan, last), 1):
        model.train()
        model.max_seq_length = _TRAINED_TOKENS
        columns = (
            [texts_of[pair.question] for pair in batch],
            [texts[pair.gold] for pair in batch],
            [texts[pair.negative] for pair in batch],
        )
        optimizer.zero_grad()
        loss([model.preprocess(column) for column in columns], torch.empty(0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        falling.step()
        model.max_seq_length = _SEARCHED_TOKENS
        if step in grid.steps:
            yield model, step


def _endless(
    questions: Sequence[Asked], size: int, rng: np.random.Generator
) -> Iterator[list[Pair]]:
    """The batches of one epoch after the other; none if there are no pairs."""
    while epoch := batches(questions, size, rng):
        yield from epoch


def batches(questions: Sequence[Asked], size: int, rng: np.random.Generator) -> list[list[Pair]]:
    """The pairs of an epoch in batches, in which no passage is a negative by mistake.

    A batch has a question once at most, and no passage that is gold for another of its questions.
    Each pair has a negative of the question's context; questions without one are left out.
    """
    gold = {asked.id: frozenset(asked.gold) for asked in questions}
    pairs = []
    for asked in questions:
        if others := [name for name in asked.context if name not in asked.gold]:
            pairs += [Pair(asked.id, g, others[rng.integers(len(others))]) for g in asked.gold]
    full, unfilled = list[list[Pair]](), list[list[Pair]]()
    for place in rng.permutation(len(pairs)):
        pair = pairs[place]
        fitting = next((batch for batch in unfilled if _fits(pair, batch, gold)), None)
        if fitting is None:
            unfilled.append([pair])
            continue
        fitting.append(pair)
        if len(fitting) == size:
            unfilled.remove(fitting)
            full.append(fitting)
    # A batch of one pair has a single negative.
    return full + [batch for batch in unfilled if len(batch) > 1]


def _fits(pair: Pair, batch: Sequence[Pair], gold: Mapping[str, frozenset[str]]) -> bool:
    """Whether no passage of the batch is gold for another one's question."""
    needed = gold[pair.question]
    return not any(
        {other.gold, other.negative} & needed or {pair.gold, pair.negative} & gold[other.question]
        for other in batch
    )


def _choice_recall(
    model: Any, questions: Sequence[Asked], texts: Mapping[str, str], cut: int
) -> float:
    """Mean share of the gold passages among the first, of the contexts of all questions."""
    model.eval()
    names = list(dict.fromkeys(itertools.chain.from_iterable(asked.context for asked in questions)))
    passages = model.encode([texts[name] for name in names], normalize_embeddings=True)
    queries = model.encode([asked.text for asked in questions], normalize_embeddings=True)
    best = np.argsort(-(queries @ passages.T), axis=1, kind="stable")[:, :cut]
    shares = [
        len({names[place] for place in row} & {*asked.gold}) / len(asked.gold)
        for row, asked in zip(best, questions, strict=True)
    ]
    return float(np.mean(shares))

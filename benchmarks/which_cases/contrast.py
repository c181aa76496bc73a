"""Contrastive training of MiniLM on the gold pairs: the simple thing that one would try first.

A pair is a training question and one of its gold passages; the negatives of a question are the
passages of the others in its batch, and of its own passages one that is no gold one, drawn anew in
every epoch. The loss, the model and its file format are those of sentence-transformers (Reimers and
Gurevych, 2019: `MultipleNegativesRankingLoss`). Learning rate and number of steps are chosen by
the recall on the questions for choices, among the own passages of all of these.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.which_cases.found import Course
from benchmarks.which_cases.settings import CHOICE, TRAIN, Asked, Setting
from qrag_jax.errors import InputError
from qrag_jax.runtime.minilm import find_minilm

INSTALL = "sentence-transformers is not installed; run pip install 'sentence-transformers>=6.0'"
NAME = "contrastive.json"
_TRAINED_TOKENS = 128  # of a passage, as Q-RAG's config :minilm has it
_ROW_TOKENS = 256  # in search, as MiniLM's folder says


@dataclasses.dataclass(frozen=True)
class ContrastConfig:
    """How it is trained.

    Attributes:
        rates: peak learning rates that are tried; each falls linearly to 0 over the most steps.
        steps: numbers of steps after which the model is tried; they are the same for all data, so
            that the costs are, too. 80 are two epochs of 2WikiMultihopQA's training questions.
        batch: questions of a step.
        cut: passages found, whose recall chooses.
    """

    rates: tuple[float, ...] = (2e-5, 5e-5, 1e-4)
    steps: tuple[int, ...] = (40, 80, 160)
    batch: int = 16
    cut: int = 4


class Pair(NamedTuple):
    """A question, a gold passage of it, and one of its own that is none; names of passages."""

    question: str
    gold: str
    negative: str


class Tried(NamedTuple):
    """A model that was tried, its recall on the questions for choices, and tokens it has read."""

    rate: float
    steps: int
    recall: float
    tokens: int


def course(tried: Sequence[Tried], minutes: float) -> Course:
    """How the training went on, by the share of the steps of all rates, the lowest of them first.

    Args:
        minutes: of the processors, of the whole training.
    """
    rates, last = sorted({each.rate for each in tried}), max(each.steps for each in tried)
    points = [
        (minutes * (rates.index(each.rate) * last + each.steps) / (len(rates) * last), each.recall)
        for each in tried
    ]
    return Course("recall", tuple(sorted(points)))


def is_installed() -> bool:
    """Whether sentence-transformers is there."""
    return importlib.util.find_spec("sentence_transformers") is not None


def batches(questions: Sequence[Asked], size: int, rng: np.random.Generator) -> list[list[Pair]]:
    """The pairs of an epoch in batches, in which no passage is gold or negative by mistake.

    A batch has a question once at most, and no passage of another question that is gold for it.
    Questions whose own passages are all gold are left out.
    """
    pairs = []
    for asked in questions:
        others = [name for name in asked.own if name not in asked.gold]
        if others:
            pairs += [
                Pair(asked.id, gold, others[rng.integers(len(others))]) for gold in asked.gold
            ]
    gold = {asked.id: frozenset(asked.gold) for asked in questions}
    made: list[list[Pair]] = []
    open_ones: list[list[Pair]] = []
    for place in rng.permutation(len(pairs)):
        pair = pairs[place]
        for batch in open_ones:
            if _fits(pair, batch, gold):
                batch.append(pair)
                if len(batch) == size:
                    open_ones.remove(batch)
                    made.append(batch)
                break
        else:
            open_ones.append([pair])
    # A batch of one pair has no other negatives than its own.
    return made + [batch for batch in open_ones if len(batch) > 1]


def _fits(pair: Pair, batch: Sequence[Pair], gold: Mapping[str, frozenset[str]]) -> bool:
    """Whether no passage of the batch is gold for another one's question."""
    own = gold[pair.question]
    return not any(
        {other.gold, other.negative} & own or {pair.gold, pair.negative} & gold[other.question]
        for other in batch
    )


def train(given: Setting, out: Path, seed: int, config: ContrastConfig) -> list[Tried]:
    """Trains by each learning rate, tries the model now and then, and keeps the best in `out`.

    Returns:
        what was tried, the best one first.

    Raises:
        InputError: sentence-transformers or MiniLM are not there.
    """
    if not is_installed():
        raise InputError(f"{INSTALL}.")
    folder = find_minilm()
    if folder is None:
        raise InputError("MiniLM was found nowhere; name its folder in QRAG_MINILM.")
    texts = {passage.name: passage.whole for passage in given.corpus}
    tried: list[Tried] = []
    for rate in config.rates:
        for model, steps, tokens in _trained(given, folder, texts, (seed, rate), config):
            recall = choice_recall(model, given.questions[CHOICE], texts, config)
            now = Tried(rate, steps, recall, tokens)
            print(f"contrastive, seed {seed}: {now}", flush=True)
            if now.recall > max((each.recall for each in tried), default=-1.0):
                shutil.rmtree(out, ignore_errors=True)
                model.save(str(out))
            tried.append(now)
    return sorted(tried, key=lambda each: -each.recall)


def _trained(
    given: Setting,
    folder: Path,
    texts: Mapping[str, str],
    how: tuple[int, float],
    config: ContrastConfig,
) -> Iterator[tuple[Any, int, int]]:
    """The model after each number of steps that is tried, this number, and tokens read so far."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    (seed, rate), questions = how, given.questions[TRAIN]
    asked = {each.id: each.text for each in questions}
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    loss = MultipleNegativesRankingLoss(model)
    last, tokens = max(config.steps), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / last, 0.0))
    plan = _endless(questions, config.batch, rng)
    for step, batch in enumerate(itertools.islice(plan, last), 1):
        model.train()
        model.max_seq_length = _TRAINED_TOKENS
        columns = (
            [asked[pair.question] for pair in batch],
            [texts[pair.gold] for pair in batch],
            [texts[pair.negative] for pair in batch],
        )
        rows = [model.preprocess(column) for column in columns]
        tokens += sum(int(each["attention_mask"].sum()) for each in rows)
        value = loss(rows, torch.empty(0))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        falling.step()
        model.max_seq_length = _ROW_TOKENS
        if step in config.steps:
            yield model, step, tokens


def _endless(
    questions: Sequence[Asked], size: int, rng: np.random.Generator
) -> Iterator[list[Pair]]:
    """The batches of one epoch after the other; none if there are no pairs."""
    while made := batches(questions, size, rng):
        yield from made


def choice_recall(
    model: Any, questions: Sequence[Asked], texts: Mapping[str, str], config: ContrastConfig
) -> float:
    """Mean share of the gold passages among the first found, of the own ones of all questions."""
    model.eval()
    names = list(dict.fromkeys(itertools.chain.from_iterable(each.own for each in questions)))
    passages = model.encode([texts[name] for name in names], normalize_embeddings=True)
    queries = model.encode([each.text for each in questions], normalize_embeddings=True)
    best = np.argsort(-(queries @ passages.T), axis=1, kind="stable")[:, : config.cut]
    found = [
        len({names[place] for place in row} & {*each.gold}) / len(each.gold)
        for row, each in zip(best, questions, strict=True)
    ]
    return float(np.mean(found))

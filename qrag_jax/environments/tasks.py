"""Questions of data sets as tasks with tools, each with documents of its own.

The number of a document is its place among the question's passages: "0", "1" and so on. It stays
the same if others are left out. What is done to texts and answers is what RLVR does
(github.com/bdsaglam/rlvr), with one difference: its random choice of documents had no seed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable
from typing import Any

from qrag_jax.data.sample import Sample
from qrag_jax.environments.episode import Document, ToolTask
from qrag_jax.errors import Count, InputError, Natural, Share

_QUOTED = re.compile(r"(\s*)``\s*(.*?)\s*''(?=([\w(]?))", re.DOTALL)
_LEFT_OVER = re.compile(r"\s*(?:``|'')")
_NUMBERS = "zero one two three four five six seven eight nine ten"
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS.split())}
_ORDERS = "zeroth first second third fourth fifth sixth seventh eighth ninth"
_ENDS = {1: "st", 2: "nd", 3: "rd"}
_ORDINALS = {word: f"{n}{_ENDS.get(n, 'th')}" for n, word in enumerate(_ORDERS.split())}


@dataclasses.dataclass(frozen=True)
class TasksConfig:
    """Section `tasks`: what becomes of a data set's questions."""

    noise_rate: Share = 1.0  # chance of each document that is not needed to stay
    noise_seed: int = 0  # of that choice, with the question's id
    clean: bool = True  # ``TeX'' quotes in documents become "straight" ones
    number_forms: bool = True  # answers count with digits, too: "three" as "3", "first" as "1st"
    min_hops: Count = 1  # questions that need fewer documents are left out
    max_hops: Natural = 0  # and those that need more; 0: no limit
    # The first epoch has the questions of fewer hops first, otherwise in the order of the data; the
    # later ones are shuffled. False: all are
    easy_first: bool = False

    def __post_init__(self) -> None:
        if 0 < self.max_hops < self.min_hops:
            raise InputError("config.tasks.max_hops is below min_hops; raise it.")


def tasks_of(samples: Iterable[Sample], config: TasksConfig) -> list[ToolTask]:
    """The tasks of all questions within the limits of hops."""
    every = [task_of(s, config) for s in samples]
    fewest, most = config.min_hops, config.max_hops or math.inf
    tasks = [task for task in every if fewest <= task.hops <= most]
    if not tasks:
        hops = sorted(task.hops for task in every) or [0]
        raise InputError(
            f"no question has config.tasks.min_hops to max_hops; they have {hops[0]} to {hops[-1]}."
        )
    return tasks


def task_of(sample: Sample, config: TasksConfig) -> ToolTask:
    """One question as a task; its hops are its supporting documents."""
    if not sample.answers:
        raise InputError(f"the question {sample.id!r} has no answer; leave it out.")
    documents = []
    for place in range(len(sample.chunks)):
        if (needed := place in sample.support) or _stays(sample.id, place, config):
            page = sample.passage(place)
            text = document_text(page.title, page.text, config.clean)
            documents.append(Document(str(place), page.title, text, needed))
    answers = (", ".join(sample.answers),) if sample.needs_all else sample.answers
    answers = with_number_forms(answers) if config.number_forms else answers
    return ToolTask(sample.id, sample.question, answers, tuple(documents), len(sample.support))


def document_text(title: str, body: str, clean: bool) -> str:
    """What a model reads of a document: its title as a heading, if it has one, and the rest."""
    body = cleaned(body) if clean else body
    return f"# {title}\n{body}" if title else body


def cleaned(text: str) -> str:
    """The text with straight quotes for TeX's, apart from the words around; single ones go away."""

    def straight(match: re.Match[str]) -> str:
        before = (match[1] or " ") if match.start() else ""
        return f'{before}"{match[2]}"' + (" " if match[3] else "")

    return _LEFT_OVER.sub("", _QUOTED.sub(straight, text))


def with_number_forms(answers: Iterable[str]) -> tuple[str, ...]:
    """The answers, then the forms of them in which numbers are digits, each once.

    An answer that is a word from "zero" to "ten" as a whole becomes the number. Words from "zeroth"
    to "ninth" become "0th" to "9th" wherever their letters stand, also inside of longer words.
    """
    known, new = tuple(answers), []
    for answer in known:
        form = plain = answer.lower().strip()
        for word, number in _ORDINALS.items():
            form = form.replace(word, number)
        form = _DIGITS.get(plain, form)
        new += [form] if form != plain else []
    return tuple(dict.fromkeys((*known, *new)))


def _stays(sample_id: str, place: int, config: TasksConfig) -> bool:
    """Whether the document stays: by a hash, so that all stay that stay at a lower rate."""
    key = f"{config.noise_seed}\0{sample_id}\0{place}"
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") < config.noise_rate * 2**64


_AS_THEY_ARE = TasksConfig(clean=False, number_forms=False)


def bridge_task(question: Any) -> ToolTask:
    """The task of a question of an invented world; its documents have the ids of the passages.

    A document begins with its title, although its first sentence names it, too: without titles, a
    search for the bridge's name finds its passage first in 40 % of questions, not in 92 %.
    """
    return task_of(question.sample, _AS_THEY_ARE)

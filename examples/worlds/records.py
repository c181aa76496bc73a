"""Records of the invented world for `config.data.path`, in each data set's own layout.

    qrag train --config=configs/own.py:minilm \\
      --config.data.path=examples/worlds/records.py:quickstart

Each function is called with the split, "train" or "dev". `sentences` is background text, for
`config.data.sources.babilong.noise`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from examples.worlds.world import Entity, Puzzle, puzzle_at
from qrag_jax.data.sample import Split

Record = dict[str, Any]


class Question(NamedTuple):
    """A question before it has a layout.

    Attributes:
        paragraphs: (title, sentences) in document order; titles are distinct.
        support: places in `paragraphs` of the supporting ones, sorted.
    """

    id: str
    question: str
    answer: str
    paragraphs: Sequence[tuple[str, Sequence[str]]]
    support: Sequence[int]


# ---------------------------------------------------------------- layouts


def hotpotqa(question: Question) -> Record:
    """As in the official files, every sentence but a paragraph's first begins with a space."""
    spaced = [
        (title, [" " * (place > 0) + sentence for place, sentence in enumerate(sentences)])
        for title, sentences in question.paragraphs
    ]
    return _titled(question._replace(paragraphs=spaced)) | {"type": "bridge", "level": "hard"}


def two_wiki(question: Question) -> Record:
    """The fields about Wikidata are empty; nothing here reads them."""
    wikidata: Record = {"entity_ids": "", "evidences": [], "evidences_id": [], "answer_id": None}
    return _titled(question) | {"type": "compositional"} | wikidata


def _titled(question: Question) -> Record:
    titles = [title for title, _ in question.paragraphs]
    return {
        "_id": question.id,
        "question": question.question,
        "answer": question.answer,
        "supporting_facts": [[titles[place], 0] for place in question.support],
        "context": [[title, list(sentences)] for title, sentences in question.paragraphs],
    }


def musique(question: Question) -> Record:
    """The decomposition has a step for each supporting paragraph, without its question."""
    return {
        "id": question.id,
        "paragraphs": [
            {
                "idx": place,
                "title": title,
                "paragraph_text": " ".join(sentence.strip() for sentence in sentences),
                "is_supporting": place in question.support,
            }
            for place, (title, sentences) in enumerate(question.paragraphs)
        ],
        "question": question.question,
        "question_decomposition": [
            {"id": step, "question": "", "answer": "", "paragraph_support_idx": place}
            for step, place in enumerate(question.support)
        ],
        "answer": question.answer,
        "answer_aliases": [],
        "answerable": True,
    }


def own(question: Question) -> Record:
    """The schema of one's own data (docs/own_data.md)."""
    record = {"id": question.id, "question": question.question, "chunks": _chunks(question)}
    known = {"support": list(question.support), "answers": [question.answer]}
    return record | {name: value for name, value in known.items() if any(map(str, value))}


def _chunks(question: Question) -> list[str]:
    return [" ".join([title, *sentences]).strip() for title, sentences in question.paragraphs]


LAYOUTS: dict[str, Callable[[Question], Record]] = {
    "hotpotqa": hotpotqa,
    "musique": musique,
    "two_wiki": two_wiki,
    "own": own,
}

# ---------------------------------------------------------------- data sets


def questions(
    split: Split, count: int, seed: int = 0, **world: Any
) -> Iterator[tuple[Puzzle, Question]]:
    """The first questions of a split; `world` are arguments of `puzzle_at`."""
    for index in range(count):
        puzzle = puzzle_at(split, index, seed=seed, **world)
        paragraphs = [(passage.entity.title, passage.sentences) for passage in puzzle.passages]
        name, support = f"synthetic-{split}-{seed}-{index}", sorted(puzzle.chain)
        yield puzzle, Question(name, puzzle.question, puzzle.answer, paragraphs, support)


def records(
    split: Split, layout: str = "own", train: int = 64, dev: int = 16, **world: Any
) -> Iterator[Record]:
    """The records of a split in a layout; one's own have `hops`, the question taken apart."""
    for puzzle, question in questions(split, train if split == "train" else dev, **world):
        record = LAYOUTS[layout](question)
        yield record | {"hops": hops(puzzle)} if layout == "own" else record


def hops(puzzle: Puzzle) -> list[Record]:
    """The question taken apart, in the world's own wording; `#1` is the answer of the first hop."""
    earlier: dict[Entity | int, str] = {}  # the answer of a hop → its number
    apart = []
    for hop, (place, relation) in enumerate(zip(puzzle.chain, puzzle.path), 1):
        passage = puzzle.passages[place]
        subject = earlier.get(passage.entity, passage.entity.mention)
        text = relation.questions[0].format(x=subject)
        value = passage.facts[relation]
        earlier.setdefault(value, f"#{hop}")
        answer = value.title if isinstance(value, Entity) else str(value)
        apart.append({"question": text[0].upper() + text[1:], "answers": [answer]})
    return apart


def sentences(split: Split, seed: int) -> Iterator[str]:
    """Sentences of passages, without end."""
    index = 0
    while True:
        for passage in puzzle_at(split, index, seed=seed).passages:
            yield from passage.sentences
        index += 1


quickstart = partial(records, train=4000, dev=300, hops=(2,))
other_world = partial(quickstart, seed=1)
# What the variants `:tiny` of configs/ train on.
_tiny = partial(records, hops=(2,), chunks=8)
tiny_own = partial(_tiny, layout="own")
tiny_hotpotqa = partial(_tiny, layout="hotpotqa")
tiny_musique = partial(_tiny, layout="musique")
tiny_two_wiki = partial(_tiny, layout="two_wiki")
large_hotpotqa = partial(records, layout="hotpotqa", train=20_000)
tiny_chains = partial(_tiny, comparison=0.0)  # of HARR, whose scripted agent follows `hops`

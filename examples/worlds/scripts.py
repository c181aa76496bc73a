"""Questions over the invented world with all that a script knows of them.

Bridge questions are of two hops among ten passages. Talkative ones ask for the first hop alone;
around it are clauses about somebody else, of whom another question of the same block of `BLOCK` has
a passage. So a search for all that was written finds those, and a search for the entity's name
finds the gold passage. The passages of the first n questions are complete if `BLOCK` divides n.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from examples.worlds.sentences import content_words
from examples.worlds.world import (
    GRAMMAR,
    KINDS,
    Entity,
    Puzzle,
    invented_syllables,
    invented_word,
    puzzle_at,
)
from examples.worlds.world import Passage as PuzzlePassage
from qrag_jax.data.sample import BLOCK, SPLITS, Draw, Passage, Sample, Split
from qrag_jax.errors import InputError

PASSAGES = 10  # of each question, if no other number is asked for

# ---------------------------------------------------------------- bridge questions

_WORD = re.compile(r"\w+")
# Words of the world's questions that tell nothing of the relation.
_IDLE = frozenset(
    re.findall(
        r"\w+",
        "are at by did does for has have how in into is its many near of on that the there to was "
        "what when where which who with",
    )
)


class BridgePassage(NamedTuple):
    """One passage of a question."""

    id: str  # its number in the question, from "0"
    title: str
    text: str  # its sentences; the first one begins with the name
    is_supporting: bool  # whether the question needs it
    said: tuple[str, str]  # for each hop's relation, the object that it gives; "" if none
    names: tuple[str, ...]  # all names in the passage without articles; the first is its title


@dataclasses.dataclass(frozen=True, slots=True)
class BridgeQuestion:
    """A question whose first passage names the bridge, and whose second passage has the answer.

    Attributes:
        relations: for each hop, the words by which the question asks for it, in their order and
            without function words, such as "company employs".
    """

    id: str
    question: str
    relations: tuple[str, str]
    answer: str  # a name or a number in the second supporting passage
    passages: tuple[BridgePassage, ...]  # in shuffled order
    chain: tuple[int, int]  # places of the two supporting ones, in the order of the hops

    @property
    def supporting(self) -> tuple[BridgePassage, BridgePassage]:
        """The two passages that the question needs, in the order of the hops."""
        first, second = self.chain
        return self.passages[first], self.passages[second]

    @property
    def entity(self) -> str:
        """The name of the entity that the question names."""
        return self.supporting[0].title

    @property
    def sample(self) -> Sample:
        """The question as the data sets have it; a chunk is a title, a blank and the text."""
        titles = tuple(passage.title for passage in self.passages)
        chunks = tuple(f"{passage.title} {passage.text}" for passage in self.passages)
        support = tuple(sorted(self.chain))
        return Sample(self.id, self.question, chunks, support, (self.answer,), "bridge", titles)

    @property
    def query(self) -> Sample:
        """The question as query writers have it; its gold pages are in the order of the hops."""
        return dataclasses.replace(self.sample, support=self.chain, source="")


def bridge_question(
    seed: int, split: Split, index: int, passages: int = PASSAGES
) -> BridgeQuestion:
    """The `index`-th question of a split; it depends on the arguments only."""
    puzzle = _puzzle(seed, split, index, passages)
    first, second = puzzle.chain
    name, relations = f"bridge-{split}-{seed}-{index}", _relation_words(puzzle)
    known = (puzzle.answer, _passages(puzzle), (first, second))
    return BridgeQuestion(name, puzzle.question, relations, *known)


def bridge_questions(seed: int, split: Split, numbers: Iterable[int]) -> list[BridgeQuestion]:
    """The questions of these numbers, from 0."""
    return [bridge_question(seed, split, number) for number in numbers]


@functools.lru_cache(maxsize=2 * BLOCK)
def _puzzle(seed: int, split: Split, index: int, passages: int = PASSAGES) -> Puzzle:
    return puzzle_at(split, index, seed=seed, hops=(2,), comparison=0.0, chunks=passages)


def _passages(puzzle: Puzzle) -> tuple[BridgePassage, ...]:
    return tuple(_passage(n, passage, puzzle) for n, passage in enumerate(puzzle.passages))


def _passage(number: int, passage: PuzzlePassage, puzzle: Puzzle) -> BridgePassage:
    first, second = (_name(passage.facts.get(relation, "")) for relation in puzzle.path)
    objects = [o.title for o in passage.facts.values() if isinstance(o, Entity)]
    return BridgePassage(
        id=str(number),
        title=passage.entity.title,
        text=" ".join(passage.sentences),
        is_supporting=number in puzzle.chain,
        said=(first, second),
        names=tuple(dict.fromkeys([passage.entity.title, *objects])),
    )


def _name(thing: Entity | int | str) -> str:
    return thing.title if isinstance(thing, Entity) else str(thing)


def _relation_words(puzzle: Puzzle) -> tuple[str, str]:
    """The words of the phrase and of the final question that were drawn for this puzzle."""
    mention, (first, second) = puzzle.passages[puzzle.chain[0]].entity.mention, puzzle.path
    return next(
        (_content(phrase), _content(final))
        for phrase in first.phrases
        for final in second.questions
        if final.format(x=phrase.format(x=mention)).lower() == puzzle.question.lower()
    )


def _content(wording: str) -> str:
    words = _WORD.findall(wording.replace("{x}", ""))
    return " ".join(word for word in words if word.lower() not in _IDLE)


# ---------------------------------------------------------------- talkative questions

_STREAM = 12  # of `Draw`, and the next one for dev; lower ones draw questions, stories and styles
# Shares, chosen with the wordings so that a search finds what the test says.
_BY_ONE_WORD = 0.5  # of the clauses that name a person by the first word of the name
_FACT = 0.2  # of the clauses that tell a fact with a name in it; the others tell an aside
_CALLED = ("cousin {x}", "young {x}", "dear {x}", "uncle {x}")
_ABOUT = (
    "My neighbour at the end of the street is {x}, who {said}.",
    "I am writing from the house of {x}, who {said}, as it happens.",
    "At dinner I sat next to {x}, who {said}, in case that matters.",
    "As to {x}, who {said}, there is no end of talk.",
    "In the queue at the baker I talked to {x}, who {said}.",
    "It was {x}, who {said}, that asked me to write to you.",
    "All of us at the club are fond of {x}, who {said}.",
    "Yesterday I shared a train with {x}, who {said}, and talked all the way.",
    "Between you and me, {x} {said}.",
    "You surely remember {x}, who {said}.",
)
# A question after a colon or a comma begins with a small letter.
_ASKED = (
    "{plain}",
    "{plain} That is all I ask of you.",
    "{plain} I would be glad of an answer.",
    "So what I am after is this: {inner}",
    "To come to the point, {inner}",
    "Be so kind as to tell me, {inner}",
    "And so to the question that I have for you: {inner}",
)


class Clause(NamedTuple):
    """What a talkative question says about somebody else."""

    text: str
    name: str  # of the person, as it stands in the sentence: the whole name or the first word of it
    words: str  # what the text says of the person, without function words


@dataclasses.dataclass(frozen=True, slots=True)
class TalkativeQuestion:
    """A question among clauses about others, whose gold passage has its answer."""

    id: str
    question: str
    relation: str  # the words by which it asks, without function words, such as "company owns"
    answer: str  # a name or a number in the gold passage
    clauses: tuple[Clause, ...]  # in the order in which they stand, before or after what is asked
    documents: tuple[Passage, ...]  # as a corpus has them; names are unique over splits and seeds
    gold: int  # place in `documents` of the one that is relevant

    @property
    def entity(self) -> str:
        """The name of the entity that it asks about."""
        return self.documents[self.gold].title

    @property
    def judged(self) -> Sample:
        """The question as a query."""
        name = self.documents[self.gold].name
        return Sample(self.id, self.question, answers=(self.answer,), grades=((name, 1),))


def talkative_question(seed: int, split: Split, index: int, clauses: int = 2) -> TalkativeQuestion:
    """The `index`-th question of a split with 1 to 4 clauses; it depends on the arguments only."""
    if clauses not in range(1, 5):
        raise InputError(f"talkative questions: clauses is {clauses}, give an integer from 1 to 4.")
    puzzle = _puzzle(seed, split, index)
    draw = Draw(seed, _STREAM + SPLITS.index(split), index)
    gold, relation = puzzle.chain[0], puzzle.path[0]
    passage = puzzle.passages[gold]
    wording = draw.choice(relation.questions)
    plain = wording.format(x=passage.entity.mention)
    persons = draw.shuffled(_persons(seed, split, index))[:clauses]
    about_others = [_clause(draw, *pair) for pair in zip(draw.shuffled(_ABOUT), persons)]
    before = draw.below(clauses + 1)
    inner = plain[0].lower() + plain[1:]
    sentences = [clause.text for clause in about_others]
    sentences.insert(before, draw.choice(_ASKED).format(plain=plain, inner=inner))
    name = f"talkative-{split}-{seed}-{index}"
    known = (Passage(f"{name}/{p.id}", p.text, p.title, {}) for p in _passages(puzzle))
    return TalkativeQuestion(
        id=name,
        question=" ".join(sentences),
        relation=" ".join(content_words(wording.format(x=""))),
        answer=_name(passage.facts[relation]),
        clauses=tuple(about_others),
        documents=tuple(known),
        gold=gold,
    )


def talkative_parts(
    config: Any,
) -> tuple[dict[str, list[Sample]], list[TalkativeQuestion], list[Passage]]:
    """Queries by part, all training questions, and the passages of all, by section `queries`.

    The queries of the test are of another world, as are those that choose the best checkpoint.
    """

    def questions(split: Split, count: int) -> list[TalkativeQuestion]:
        how = (config.made_seed, split)
        return [talkative_question(*how, number, config.clauses) for number in range(count)]

    test, count = config.made_test, config.made_test + config.held_out
    # Passages of more questions are searched, since these mention one another's persons.
    train = questions("train", config.made_corpus)
    others = questions("dev", count + -count % BLOCK)
    parts = {"train": train[: config.made_train], "test": others[:test]}
    parts["dev"] = others[test:count]
    queries = {name: [question.judged for question in part] for name, part in parts.items()}
    return queries, train, [one for question in (*train, *others) for one in question.documents]


def _persons(seed: int, split: Split, index: int) -> list[PuzzlePassage]:
    """The passages about persons that the other questions of the block have: 125 in the mean."""
    first = index - index % BLOCK
    others = (n for n in range(first, first + BLOCK) if n != index)
    passages = (passage for other in others for passage in _puzzle(seed, split, other).passages)
    return [passage for passage in passages if passage.entity.kind == "person"]


def _clause(draw: Draw, about: str, passage: PuzzlePassage) -> Clause:
    name = passage.entity.title
    shown = name
    if draw.chance(_BY_ONE_WORD):
        name = passage.entity.words[0]
        shown = draw.choice(_CALLED).format(x=name)
    said = draw.choice(KINDS["person"].asides)
    links = {r: entity for r, entity in passage.facts.items() if isinstance(entity, Entity)}
    if links and draw.chance(_FACT):
        relation = draw.choice(list(links))
        said = draw.choice(relation.predicates).format(o=links[relation].mention)
    text = about.format(x=shown, said=said)
    return Clause(text[0].upper() + text[1:], name, " ".join(content_words(said)))


# ---------------------------------------------------------------- other names

_CAPITALISED = re.compile(r"\b[A-Z][a-z]+\b")
# Those of the world's wording, such as "Lake", which are no invented ones.
_OF_GRAMMAR = frozenset(_CAPITALISED.findall(GRAMMAR))


def renaming(draw: Draw) -> Callable[[str], str]:
    """Gives invented words other spellings, of the train split, the same in all texts.

    The names mean nothing, so a text with other names is as true as before. What is read often
    under ever other names cannot be learned by heart; it can only be copied.
    """
    names: dict[str, str] = {}

    def fresh(syllables: int) -> str:
        taken = {*names.values()} | _OF_GRAMMAR
        while (word := invented_word(draw, 0, syllables)) in taken:
            pass
        return word

    def renamed(word: str) -> str:
        if word not in names:
            syllables = 0 if word in _OF_GRAMMAR else invented_syllables(word)
            names[word] = fresh(syllables) if syllables else word
        return names[word]

    return lambda text: _CAPITALISED.sub(lambda match: renamed(match[0]), text)

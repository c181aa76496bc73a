"""Questions about one fact of the invented world, as a talkative person writes them.

A question asks for one fact about one entity, whose own passage has it. Around it are clauses about
somebody else. Passages of other questions have their names and words, so a search for all that was
written finds these passages, too. A search for the entity's name finds the gold passage.

A clause is about a person of whom another question of the same block of `BLOCK` questions has a
passage. So a corpus of the passages of the first n questions has all of these if `BLOCK` divides n.
The train and dev splits share no invented word.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from qrag_jax.data.files.beir import Document
from qrag_jax.data.generators.bridge_world import BridgePassage, bridge_puzzle, told_passages
from qrag_jax.data.generators.dropped_words import content_words
from qrag_jax.data.generators.invented_names import Draw
from qrag_jax.data.generators.invented_puzzle import Entity, Passage, Puzzle
from qrag_jax.data.generators.invented_world import KINDS
from qrag_jax.data.generators.synthetic import SPLITS, Split
from qrag_jax.data.judged_query import JudgedQuery
from qrag_jax.errors import InputError

SOURCE = "talkative"
BLOCK = 25  # questions whose clauses are about persons in one another's passages
CLAUSES = range(1, 5)
_STREAM = 12  # of `Draw`, and the next one for dev; lower ones draw questions, stories and styles
_PERSON = "person"

# Shares. Each was chosen with the wordings, so that a search finds what the test says.
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
    """What a question says about somebody else.

    Attributes:
        text: the whole sentence.
        name: of the person, as it stands in the sentence: the whole name or the first word of it.
        words: what is told of the person, without function words.
        title: of the passage about the person, which is another question's; the whole name.
    """

    text: str
    name: str
    words: str
    title: str


@dataclasses.dataclass(frozen=True, slots=True)
class TalkativeQuestion:
    """A question whose gold passage has its answer.

    Attributes:
        id: unique over splits and seeds.
        question: all that is written.
        plain: the question without the clauses, such as "Which company owns Trarb Mills?".
        entity: name of the entity that it asks about, the title of the gold passage.
        relation: the words by which it asks, without function words, such as "company owns".
        answer: a name or a number in the gold passage.
        clauses: in the order in which they stand, before or after what is asked.
        passages: those of the bridge question of this number, in shuffled order.
        gold: position in `passages` of the one passage that is relevant.
    """

    id: str
    question: str
    plain: str
    entity: str
    relation: str
    answer: str
    clauses: tuple[Clause, ...]
    passages: tuple[BridgePassage, ...]
    gold: int

    @property
    def documents(self) -> tuple[Document, ...]:
        """The passages as a corpus has them; their names are unique over splits and seeds."""
        return tuple(
            Document(f"{self.id}/{each.id}", each.text, each.title, {}) for each in self.passages
        )

    @property
    def judged(self) -> JudgedQuery:
        """The question as a query; its one relevant document is among `documents`."""
        name = self.documents[self.gold].name
        return JudgedQuery(self.id, self.question, ((name, 1),), (self.answer,))


def talkative_question(seed: int, split: Split, index: int, clauses: int = 2) -> TalkativeQuestion:
    """The `index`-th question of a split. It depends on the arguments only.

    Args:
        seed: another seed gives other questions.
        split: "train" or "dev".
        index: from 0; any number of questions can be drawn.
        clauses: how many it has about somebody else, one of `CLAUSES`.
    """
    if clauses not in CLAUSES:
        raise InputError(
            f"talkative questions: clauses is {clauses}, give an integer from {CLAUSES[0]} to "
            f"{CLAUSES[-1]}."
        )
    puzzle = _puzzle(seed, split, index)
    draw = Draw(seed, _STREAM + SPLITS.index(split), index)
    gold, relation = puzzle.chain[0], puzzle.path[0]
    passage = puzzle.passages[gold]
    wording = draw.choice(relation.questions)
    plain = wording.format(x=passage.entity.mention)
    persons = draw.shuffled(_persons(seed, split, index))[:clauses]
    abouts = draw.shuffled(_ABOUT)
    told = [_clause(draw, about, each) for about, each in zip(abouts, persons)]
    before = draw.below(clauses + 1)
    inner = plain[0].lower() + plain[1:]
    asked = draw.choice(_ASKED).format(plain=plain, inner=inner)
    sentences = [*(each.text for each in told[:before]), asked]
    sentences += [each.text for each in told[before:]]
    return TalkativeQuestion(
        id=f"{SOURCE}-{split}-{seed}-{index}",
        question=" ".join(sentences),
        plain=plain,
        entity=passage.entity.title,
        relation=" ".join(content_words(wording.format(x=""))),
        answer=_name(passage.facts[relation]),
        clauses=tuple(told),
        passages=told_passages(puzzle),
        gold=gold,
    )


@functools.lru_cache(maxsize=2 * BLOCK)
def _puzzle(seed: int, split: Split, index: int) -> Puzzle:
    return bridge_puzzle(seed, split, index)


def _persons(seed: int, split: Split, index: int) -> list[Passage]:
    """The passages about persons that the other questions of the block have: 125 in the mean."""
    first = index - index % BLOCK
    others = (each for each in range(first, first + BLOCK) if each != index)
    passages = (each for other in others for each in _puzzle(seed, split, other).passages)
    return [each for each in passages if each.entity.kind == _PERSON]


def _clause(draw: Draw, about: str, passage: Passage) -> Clause:
    name = passage.entity.title
    shown = name
    if draw.chance(_BY_ONE_WORD):
        name = passage.entity.words[0]
        shown = draw.choice(_CALLED).format(x=name)
    said = draw.choice(KINDS[_PERSON].asides)
    links = {r: each for r, each in passage.facts.items() if isinstance(each, Entity)}
    if links and draw.chance(_FACT):
        relation = draw.choice(list(links))
        said = draw.choice(relation.predicates).format(o=links[relation].mention)
    text = about.format(x=shown, said=said)
    words = " ".join(content_words(said))
    return Clause(text[0].upper() + text[1:], name, words, passage.entity.title)


def _name(thing: Entity | int) -> str:
    return thing.title if isinstance(thing, Entity) else str(thing)

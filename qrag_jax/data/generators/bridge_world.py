"""Two-hop bridge questions over the invented world, with all that a scripted reader knows of them.

They are the questions of `synthetic` (two hops, no comparisons) with ten passages each. Two of them
are needed; the others share the relation, the kind or a word of a name. The train and dev splits
share no invented word. Here each question also says what its parts are: the names, the words of
both relations, and what each passage says.
"""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

from qrag_jax.data.generators.invented_puzzle import Entity, Passage, Puzzle
from qrag_jax.data.generators.invented_world import Relation
from qrag_jax.data.generators.synthetic import Split, SyntheticConfig, puzzle_at
from qrag_jax.data.sample import Sample

SOURCE = "bridge"
PASSAGES = 10  # of each question, if no other number is asked for
_WORD = re.compile(r"\w+")
# Words of the world's questions that tell nothing of the relation.
_IDLE = (
    "are at by did does for has have how in into is its many near of on that the there to was what "
    "when where which who with"
)


class BridgePassage(NamedTuple):
    """One passage of a question.

    Attributes:
        id: its number in the question, from "0".
        title: the name of what it is about.
        text: its sentences; the first one begins with the name.
        is_supporting: whether the question needs it.
        said: for each hop's relation, the object that the passage gives; "" if it gives none.
        names: all names in the passage without articles; the first is its title.
    """

    id: str
    title: str
    text: str
    is_supporting: bool
    said: tuple[str, str]
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BridgeQuestion:
    """A question whose first passage names the bridge, and whose second passage has the answer.

    Attributes:
        id: unique over splits and seeds.
        question: the question's text. It names `entity` only.
        entity: name of the first entity, the title of the first supporting passage.
        bridge: name of the second entity, the title of the second one.
        relations: for each hop, the words by which the question asks for it, in their order and
            without function words, such as "company employs".
        answer: a name or a number in the second supporting passage.
        passages: in shuffled order.
        chain: positions in `passages` of the two supporting ones, in the order of the hops.
    """

    id: str
    question: str
    entity: str
    bridge: str
    relations: tuple[str, str]
    answer: str
    passages: tuple[BridgePassage, ...]
    chain: tuple[int, int]

    @property
    def supporting(self) -> tuple[BridgePassage, BridgePassage]:
        """The two passages that the question needs, in the order of the hops."""
        first, second = self.chain
        return self.passages[first], self.passages[second]

    @property
    def sample(self) -> Sample:
        """The question as the data sets have it; a chunk is a title, a blank and the text."""
        return Sample(
            id=self.id,
            question=self.question,
            chunks=tuple(f"{passage.title} {passage.text}" for passage in self.passages),
            support=tuple(sorted(self.chain)),
            answers=(self.answer,),
            source=SOURCE,
        )


def bridge_question(
    seed: int, split: Split, index: int, passages: int = PASSAGES
) -> BridgeQuestion:
    """The `index`-th question of a split. It depends on the arguments only.

    Args:
        seed: another seed gives other questions.
        split: "train" or "dev".
        index: from 0; any number of questions can be drawn.
        passages: how many passages it has, at least 4.
    """
    puzzle = bridge_puzzle(seed, split, index, passages)
    first, second = puzzle.chain
    return BridgeQuestion(
        id=f"{SOURCE}-{split}-{seed}-{index}",
        question=puzzle.question,
        entity=puzzle.passages[first].entity.title,
        bridge=puzzle.passages[second].entity.title,
        relations=_relation_words(puzzle),
        answer=puzzle.answer,
        passages=told_passages(puzzle),
        chain=(first, second),
    )


def bridge_puzzle(seed: int, split: Split, index: int, passages: int = PASSAGES) -> Puzzle:
    """What `bridge_question` is made of; its arguments, and what it raises, are the same."""
    config = SyntheticConfig(hops=(2,), comparison=0.0, chunks=passages, seed=seed)
    return puzzle_at(config, split, index)


def told_passages(puzzle: Puzzle) -> tuple[BridgePassage, ...]:
    """The passages of a puzzle of two hops, in its order."""
    return tuple(_told(i, passage, puzzle) for i, passage in enumerate(puzzle.passages))


def _told(number: int, passage: Passage, puzzle: Puzzle) -> BridgePassage:
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
    mention = puzzle.passages[puzzle.chain[0]].entity.mention
    phrase, final = _wordings(puzzle.question, mention, *puzzle.path)
    return _content(phrase), _content(final)


def _wordings(question: str, mention: str, first: Relation, second: Relation) -> tuple[str, str]:
    for phrase in first.phrases:
        for final in second.questions:
            if final.format(x=phrase.format(x=mention)).lower() == question.lower():
                return phrase, final
    raise AssertionError(f"no wording of its relations gives {question!r}")


def _content(wording: str) -> str:
    words = _WORD.findall(wording.replace("{x}", ""))
    return " ".join(word for word in words if word.lower() not in _IDLE.split())

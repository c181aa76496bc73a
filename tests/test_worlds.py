"""Invented questions: reproducible, split without overlap, not answerable in one step."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from examples.worlds.records import records
from examples.worlds.world import Entity, Puzzle, puzzle_at
from qrag_jax.data.sample import Sample
from qrag_jax.data.sources import parse_own

MIXED: dict[str, Any] = {"comparison": 0.4}


def puzzles(count: int, split: Any = "train", **world: Any) -> list[Puzzle]:
    return [puzzle_at(split, i, **world) for i in range(count)]


def samples(split: Any, count: int, **world: Any) -> list[Sample]:
    made = map(parse_own, records(split, train=count, dev=count, **world))
    return [dataclasses.replace(each, source="synthetic") for each in made]


def invented_words(puzzle: Puzzle) -> set[str]:
    """All invented words of the entities that a puzzle's passages are about or mention."""
    told = [p.entity for p in puzzle.passages]
    told += [o for p in puzzle.passages for o in p.facts.values() if isinstance(o, Entity)]
    return {word for entity in told for word in entity.words}


def test_train_and_dev_share_no_invented_word() -> None:
    train, dev = (
        set().union(*(invented_words(p) for p in puzzles(150, split, **MIXED)))
        for split in ("train", "dev")
    )
    assert len(train) > 1000
    assert not train & dev
    every = " ".join(text for s in samples("dev", 150, **MIXED) for text in (*s.chunks, s.question))
    assert not {w.lower() for w in train} & set(re.findall(r"[a-z0-9]+", every.lower()))


def test_each_passage_of_a_chain_names_the_next_and_the_last_has_the_answer() -> None:
    for p in puzzles(150, comparison=0):
        links = [p.passages[k] for k in p.chain]
        assert links[0].entity.mention in p.question
        for here, after, relation in zip(links, links[1:], p.path):
            assert here.facts[relation] is after.entity
            assert after.entity.mention in " ".join(here.sentences)
        last = links[-1].facts[p.path[-1]]
        assert p.answer == (last.title if isinstance(last, Entity) else str(last))
        assert p.answer in " ".join(links[-1].sentences)
        assert p.answer not in p.question

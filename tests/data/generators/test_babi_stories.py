"""Generated stories against a slow reader that knows the sentences alone, not the simulation."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest

from qrag_jax.data.files.babi import Story
from qrag_jax.data.generators.babi_stories import TELLERS, generate
from qrag_jax.errors import InputError

MOVE = re.compile(r"(\w+) (?:walked to|went over to|headed for|hurried to) the (\w+)\.")
TAKE = re.compile(r"(\w+) (?:grabbed|picked up|took) the (\w+)\.")
DROP = re.compile(r"(\w+) (?:put down|left behind) the (\w+)\.")
GIVE = re.compile(r"(\w+) (?:gave|passed) the (\w+) to (\w+)\.")
SIDE = re.compile(r"The (\w+) is (\w+) of the (\w+)\.")
BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}


def told(facts: Sequence[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Where each person is at the end, and the rooms that each thing was in, one after another.

    Raises AssertionError where somebody does what they cannot.
    """
    room: dict[str, str] = {}
    carried: dict[str, str] = {}
    lies: dict[str, str] = {}
    rooms: dict[str, list[str]] = {}

    def seen(thing: str, place: str) -> None:
        if rooms.setdefault(thing, [])[-1:] != [place]:
            rooms[thing].append(place)

    for fact in facts:
        if found := MOVE.fullmatch(fact):
            person, place = found.groups()
            assert room.get(person) != place
            room[person] = place
            for thing in [t for t, who in carried.items() if who == person]:
                seen(thing, place)
        elif found := TAKE.fullmatch(fact):
            person, thing = found.groups()
            assert thing not in carried
            if person in room:
                assert lies.get(thing, room[person]) == room[person]
                seen(thing, room[person])
            carried[thing] = person
        elif found := DROP.fullmatch(fact):
            person, thing = found.groups()
            assert carried.pop(thing, person) == person
            if person in room:
                lies[thing] = room[person]
                seen(thing, room[person])
        else:
            person, thing, receiver = GIVE.fullmatch(fact).groups()
            assert carried.get(thing, person) == person
            if person in room and receiver in room:
                assert room[person] == room[receiver]
            carried[thing] = receiver
    return room, rooms


def answers(question: str, facts: Sequence[str]) -> set[str]:
    """What the facts alone answer; several where they leave it open."""
    words = question.rstrip("?").split()
    if words[:2] == ["Where", "is"] and words[2] != "the":
        return {told(facts)[0].get(words[2], "")} - {""}
    if words[:3] == ["Where", "is", "the"]:
        return set(told(facts)[1].get(words[3], [])[-1:])
    if words[:2] == ["Where", "was"]:
        thing, place = words[3], words[6]
        rooms = told(facts)[1].get(thing, [])
        return {a for a, b in itertools.pairwise(rooms) if b == place}
    if words[:2] == ["What", "is"]:
        sides = {SIDE.fullmatch(fact).groups() for fact in facts}
        sides |= {(b, BACK[d], a) for a, d, b in sides}
        if words[-1] == "of":  # What is the attic north of
            return {b for a, d, b in sides if (a, d) == (words[3], words[4])}
        return {a for a, d, b in sides if (d, b) == (words[2], words[5])}
    gifts = [found.groups() for fact in facts if (found := GIVE.fullmatch(fact))]
    forms = (
        (r"What did (?P<giver>\w+) give to (?P<receiver>\w+)\?", 1),
        (r"Who did (?P<giver>\w+) give the (?P<thing>\w+) to\?", 2),
        (r"Who gave the (?P<thing>\w+) to (?P<receiver>\w+)\?", 0),
        (r"Who gave the (?P<thing>\w+)\?", 0),
        (r"Who received the (?P<thing>\w+)\?", 2),
    )
    for form, asked in forms:
        if found := re.fullmatch(form, question):
            given = found.groupdict().items()
            places = ("giver", "thing", "receiver")
            fitting = [g for g in gifts if all(g[places.index(k)] == v for k, v in given)]
            return {gift[asked] for gift in fitting[-1:]}
    raise AssertionError(question)


@pytest.mark.parametrize("task", TELLERS)
@pytest.mark.parametrize("split", ["train", "dev"])
def test_the_story_answers_and_so_do_the_supporting_facts_alone(task: str, split) -> None:
    for story in generate(task, split, 300, seed=3):
        assert answers(story.question, story.facts) == {story.answer}, story
        support = [story.facts[i] for i in sorted(story.support)]
        assert answers(story.question, support) == {story.answer}, story
        for fact in support:  # none of them is idle
            rest = [other for other in support if other is not fact]
            assert answers(story.question, rest) != {story.answer}, story


def test_sizes() -> None:
    facts = {"qa1": (2, 10), "qa2": (3, 60), "qa3": (6, 200), "qa4": (2, 2), "qa5": (4, 150)}
    support = {"qa1": 1, "qa2": 2, "qa3": 3, "qa4": 1, "qa5": 1}
    for task, (least, most) in facts.items():
        stories = generate(task, "train", 300, seed=0)
        lengths = [len(story.facts) for story in stories]
        assert least <= min(lengths)
        assert max(lengths) <= most
        for story in stories:
            assert len(set(story.support)) == support[task]


def texts(stories: list[Story]) -> set[tuple[str, ...]]:
    return {(*story.facts, story.question) for story in stories}


@pytest.mark.parametrize("task", TELLERS)
def test_splits_are_disjoint_and_stories_the_same_at_every_call(task: str) -> None:
    train, dev = (generate(task, split, 300, seed=0) for split in ("train", "dev"))
    assert not texts(train) & texts(dev)
    assert not texts(train) & texts(generate(task, "dev", 300, seed=1))
    assert len(texts(train)) > 290
    assert generate(task, "train", 20, seed=0) == train[:20]
    assert generate(task, "train", 20, seed=1) != train[:20]


def test_answers_are_spread() -> None:
    for task in TELLERS:
        given = [story.answer for story in generate(task, "train", 600, seed=0)]
        counts = sorted(given.count(answer) for answer in set(given))
        assert len(counts) >= 6
        assert counts[-1] < 5 * counts[-6]


def test_other_tasks_have_no_generator() -> None:
    with pytest.raises(InputError) as caught:
        generate("qa6", "train", 1, seed=0)
    assert "'qa6', and without files there are only qa1, qa2, qa3" in str(caught.value)
    assert "set config.data.sources.babilong.task to one" in str(caught.value)

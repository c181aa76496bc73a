"""bAbI's files, and generated stories against a slow reader that knows the sentences alone."""

from __future__ import annotations

import gzip
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.worlds.stories import TELLERS, generate
from qrag_jax.data.babi import TASKS, Story, read_stories, story_file
from qrag_jax.errors import InputError
from tests.data.real_data import real

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


SUPPORT = {"qa1": 1, "qa2": 2, "qa3": 3, "qa4": 1, "qa5": 1}


@pytest.mark.parametrize("task", TELLERS)
@pytest.mark.parametrize("split", ["train", "dev"])
def test_the_story_answers_and_so_do_the_supporting_facts_alone(task: str, split) -> None:
    for story in generate(task, split, 150, seed=3):
        assert answers(story.question, story.facts) == {story.answer}, story
        support = [story.facts[i] for i in sorted(story.support)]
        assert len(set(story.support)) == SUPPORT[task]
        assert answers(story.question, support) == {story.answer}, story
        for fact in support:  # none of them is idle
            rest = [other for other in support if other is not fact]
            assert answers(story.question, rest) != {story.answer}, story


def texts(stories: list[Story]) -> set[tuple[str, ...]]:
    return {(*story.facts, story.question) for story in stories}


@pytest.mark.parametrize("task", TELLERS)
def test_splits_are_disjoint_and_stories_the_same_at_every_call(task: str) -> None:
    train, dev = (generate(task, split, 150, seed=0) for split in ("train", "dev"))
    assert not texts(train) & texts(dev)
    assert not texts(train) & texts(generate(task, "dev", 150, seed=1))
    assert len(texts(train)) > 145
    assert generate(task, "train", 20, seed=0) == train[:20]
    assert generate(task, "train", 20, seed=1) != train[:20]
    counts = sorted(Counter(story.answer for story in train).values())
    assert len(counts) >= 6
    assert counts[-1] < 8 * counts[-6]  # answers are spread
    with pytest.raises(InputError, match=r"'qa6'.*babilong\.task"):
        generate("qa6", "train", 1, seed=0)


TEXT = """\
1 Ada went to the hall.
2 Ada got the lamp there.
3 Where is Ada? \thall\t1
4 Ada moved to the yard.
5 Where is the lamp? \tyard\t4 2
1 Bo is in the hall.
2 Where is Bo?\thall\t1
"""


def write(folder: Path, text: str, name: str = "qa1_train.txt") -> Path:
    path = folder / name
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def test_one_story_a_question(tmp_path: Path) -> None:
    one, two = "Ada went to the hall.", "Ada got the lamp there."
    expected = [
        Story((one, two), "Where is Ada?", "hall", (0,)),
        Story((one, two, "Ada moved to the yard."), "Where is the lamp?", "yard", (2, 1)),
        Story(("Bo is in the hall.",), "Where is Bo?", "hall", (0,)),
    ]
    assert read_stories(write(tmp_path, TEXT)) == expected
    assert read_stories(write(tmp_path, TEXT, "a.txt.gz")) == expected
    windows = "\ufeff" + TEXT.replace("\n", "\r\n") + "\r\n"
    assert read_stories(write(tmp_path, windows)) == expected


def test_file_of_a_split(tmp_path: Path) -> None:
    (tmp_path / "babi").mkdir()  # under a parent that several sources share
    for task, split, name, part in (
        ("qa11", "train", "qa11_train.txt", "train"),
        ("qa11", "dev", "qa11_test.txt.gz", "test"),
        ("qa11", "dev", "qa11_valid.txt", "valid"),  # goes before the test
        ("qa1", "train", "qa1_single-supporting-fact_train.txt", "train"),
        ("qa2", "train", "babi/qa2_train.txt", "train"),
    ):
        path = write(tmp_path, TEXT, name)
        assert story_file(tmp_path, task, split) == (path, part)


def test_bad_lines_are_named(tmp_path: Path) -> None:
    for text, line in (
        ("Ada went.\n", "1"),
        ("1 Ada went.\n2\n", "2"),
        ("2 Ada went.\n", "1"),
        ("1 A.\n2 B.\n2 C.\n", "3"),
        ("1 A.\n2 Where is A?\n", "2"),
        ("1 A.\n2 Where is A?\t\t1\n", "2"),
        ("1 A.\n2 \thall\t1\n", "2"),
        ("1 A.\n2 Where?\thall\t2\n", "2"),
        (TEXT + "3 Where?\thall\t2\n", "8"),
        ("1 Ada went.\n", ""),
    ):
        path = write(tmp_path, text)
        with pytest.raises(InputError, match=rf"{re.escape(str(path))}.*{line}"):
            read_stories(path)
    for task, named in (("qa1", r"qa1_valid\.txt"), ("qa21", "'qa21'")):
        with pytest.raises(InputError, match=named):
            story_file(tmp_path, task, "dev")


def test_real_stories() -> None:
    for task in TASKS:
        path, part = story_file(real("babi"), task, "dev")
        assert part == "valid"
        stories = read_stories(path)
        assert 990 <= len(stories) <= 1010
        for story in stories:
            assert all(0 <= i < len(story.facts) for i in story.support)
            assert len(story.support) == SUPPORT.get(task, len(story.support))
            if task in ("qa1", "qa2", "qa4", "qa5"):
                assert any(story.answer in story.facts[i] for i in story.support)

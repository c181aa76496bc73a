"""Stories like those of bAbI tasks 1 to 5, from a small simulated world; no downloads.

People walk between the rooms of a house and take, put down and hand over things, as far as their
place allows it. Questions are about the final state or the past of the house. The train and dev
splits have no story in common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from qrag_jax.data.sample import SPLITS, Draw, Sample, Split
from qrag_jax.data.sources import BABILONG
from qrag_jax.errors import InputError

PEOPLE = ("Nora", "Felix", "Ruth", "Oscar")
ROOMS = ("library", "attic", "cellar", "pantry", "porch", "studio")
THINGS = ("lantern", "basket", "violin")
MOVES = ("walked to", "went over to", "headed for", "hurried to")
TAKES = ("grabbed", "picked up", "took")
DROPS = ("put down", "left behind")
GIVES = ("gave", "passed")
DIRECTIONS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}

Question = tuple[str, str, tuple[int, ...]]  # text, answer, supporting facts


class House:
    """The state of the world and the facts told so far. A fact is named by its index in `facts`.

    Attributes:
        draw: the random draws.
        facts: the sentences told, one per event.
        room: person → (room, fact that says so), once a fact has told it.
        holder: thing → (person, fact that says so), while the thing is carried.
        lies: thing → (room, fact that it was put down, fact that tells the room), from when it is
            put down until it is taken again.
        path: thing → moves while it was carried: (room before, new room, supporting facts).
        gifts: (giver, thing, receiver, fact), in order.
    """

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.facts: list[str] = []
        self.room: dict[str, tuple[str, int]] = {}
        self.holder: dict[str, tuple[str, int]] = {}
        self.lies: dict[str, tuple[str, int, int]] = {}
        self.path: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {t: [] for t in THINGS}
        self.gifts: list[tuple[str, str, str, int]] = []
        # Where the things lie. A story never tells where they lie at first.
        self._place = {thing: draw.choice(ROOMS) for thing in THINGS}

    def move(self) -> None:
        """Somebody goes to another room with everything that they carry."""
        person = self.draw.choice(PEOPLE)
        before = self.room.get(person)
        room = self.draw.choice([r for r in ROOMS if before is None or r != before[0]])
        fact = self._tell(f"{person} {self.draw.choice(MOVES)} the {room}.")
        for thing, (holder, taken) in self.holder.items():
            if holder == person and before is not None:
                self.path[thing].append((before[0], room, (fact, before[1], taken)))
        self.room[person] = (room, fact)

    def take(self) -> None:
        """Somebody takes a thing that lies in their room; nothing happens if there is none."""
        able = [
            (person, thing)
            for person, (room, _) in self.room.items()
            for thing in THINGS
            if thing not in self.holder and self._place[thing] == room
        ]
        if able:
            person, thing = self.draw.choice(able)
            fact = self._tell(f"{person} {self.draw.choice(TAKES)} the {thing}.")
            self.holder[thing] = (person, fact)
            self.lies.pop(thing, None)

    def drop(self) -> None:
        """Somebody puts down what they carry; nothing happens if nobody carries anything."""
        if self.holder:
            thing = self.draw.choice(list(self.holder))
            person, _ = self.holder.pop(thing)
            fact = self._tell(f"{person} {self.draw.choice(DROPS)} the {thing}.")
            room, moved = self.room[person]
            self._place[thing] = room
            self.lies[thing] = (room, fact, moved)

    def give(self) -> None:
        """Somebody hands a thing to another person in the room, if there is one."""
        able = [
            (giver, thing, person)
            for thing, (giver, _) in self.holder.items()
            for person, (room, _) in self.room.items()
            if person != giver and room == self.room[giver][0]
        ]
        if able:
            giver, thing, person = self.draw.choice(able)
            verb = self.draw.choice(GIVES)
            fact = self._tell(f"{giver} {verb} the {thing} to {person}.")
            self.holder[thing] = (person, fact)
            self.gifts.append((giver, thing, person, fact))

    def _tell(self, sentence: str) -> int:
        self.facts.append(sentence)
        return len(self.facts) - 1


def where_is_person(house: House) -> Question | None:
    """qa1: one supporting fact, the person's last walk."""
    if not house.room:
        return None
    person = house.draw.choice(list(house.room))
    room, fact = house.room[person]
    return f"Where is {person}?", room, (fact,)


def where_is_thing(house: House) -> Question | None:
    """qa2: two facts, who has the thing or put it down, and where that person went."""
    places = {
        thing: (house.room[person][0], (fact, house.room[person][1]))
        for thing, (person, fact) in house.holder.items()
    }
    places |= {thing: (room, (fact, moved)) for thing, (room, fact, moved) in house.lies.items()}
    if not places:
        return None
    thing = house.draw.choice(sorted(places))
    room, support = places[thing]
    return f"Where is the {thing}?", room, support


def where_was_thing(house: House) -> Question | None:
    """qa3: three facts, how a person got the thing, and their walks to and from the answer."""
    steps = []
    for thing, path in house.path.items():
        entered = [room for _, room, _ in path]
        steps += [(thing, *step) for step in path if entered.count(step[1]) == 1]
    if not steps:
        return None
    thing, before, room, support = house.draw.choice(steps)
    return f"Where was the {thing} before the {room}?", before, support


def who_gave_what(house: House) -> Question | None:
    """qa5: one fact, the last gift that matches the question."""
    if not house.gifts:
        return None
    giver, thing, receiver, _ = house.draw.choice(house.gifts)
    known = {"giver": giver, "thing": thing, "receiver": receiver}
    forms = (
        (f"What did {giver} give to {receiver}?", ("giver", "receiver"), "thing"),
        (f"Who did {giver} give the {thing} to?", ("giver", "thing"), "receiver"),
        (f"Who gave the {thing} to {receiver}?", ("thing", "receiver"), "giver"),
        (f"Who gave the {thing}?", ("thing",), "giver"),
        (f"Who received the {thing}?", ("thing",), "receiver"),
    )
    question, named, asked = house.draw.choice(forms)
    for *roles, fact in reversed(house.gifts):
        gift = dict(zip(("giver", "thing", "receiver"), roles, strict=True))
        if all(gift[role] == known[role] for role in named):
            return question, gift[asked], (fact,)
    raise AssertionError("a drawn gift matches its own question")


def _happenings(
    events: tuple[tuple[int, Callable[[House], None]], ...],
    ask: Callable[[House], Question | None],
    least: int,
    most: int,
) -> Callable[[Draw], Sample]:
    """A teller of stories of `least` to `most` events (more while there is nothing to ask).

    `events` are pairs (weight, event); an event is drawn in proportion to its weight.
    """
    weighted = [event for weight, event in events for _ in range(weight)]

    def tell(draw: Draw) -> Sample:
        house = House(draw)
        length = least + draw.below(most - least + 1)
        while True:
            draw.choice(weighted)(house)
            if len(house.facts) >= length and (asked := ask(house)):
                return _story(house.facts, *asked)

    return tell


def which_room(draw: Draw) -> Sample:
    """qa4: two statements on where three rooms lie; the question is about one of them."""
    first, second, third = draw.shuffled(ROOMS)[:3]
    one = draw.choice(list(DIRECTIONS))
    # The third room must not lie in the same place as the first.
    two = draw.choice([d for d in DIRECTIONS if d != OPPOSITE[one]])
    pairs = [_said(draw, second, one, first), _said(draw, third, two, second)]
    asked = draw.below(2)
    subject, direction, reference = pairs[asked]
    facts = tuple(f"The {a} is {d} of the {b}." for a, d, b in pairs)
    if draw.chance(0.5):
        question, answer = f"What is {direction} of the {reference}?", subject
    else:
        question, answer = f"What is the {subject} {direction} of?", reference
    # Sometimes the question reverses the direction of the statement.
    if draw.chance(0.5):
        back = OPPOSITE[direction]
        if answer == subject:
            question = f"What is the {reference} {back} of?"
        else:
            question = f"What is {back} of the {subject}?"
    return _story(facts, question, answer, (asked,))


def _story(facts: Sequence[str], question: str, answer: str, support: Sequence[int]) -> Sample:
    return Sample("", question, tuple(facts), tuple(sorted({*support})), (answer,), BABILONG)


def _said(draw: Draw, subject: str, direction: str, reference: str) -> tuple[str, str, str]:
    """The relation, stated from a random end."""
    if draw.chance(0.5):
        return subject, direction, reference
    return reference, OPPOSITE[direction], subject


_HANDLING = ((6, House.move), (3, House.take), (2, House.drop))
TELLERS: dict[str, Callable[[Draw], Sample]] = {
    "qa1": _happenings(((1, House.move),), where_is_person, 2, 10),
    "qa2": _happenings(_HANDLING, where_is_thing, 3, 30),
    "qa3": _happenings(_HANDLING, where_was_thing, 6, 60),
    "qa4": which_room,
    "qa5": _happenings((*_HANDLING, (6, House.give)), who_gave_what, 4, 40),
}


def generate(task: str, split: Split, count: int, seed: int) -> list[Sample]:
    """The first `count` stories of a split; a larger `count` only appends stories."""
    if task not in TELLERS:
        raise InputError(
            f"the bAbI task is {task!r}, and without files there are only {', '.join(TELLERS)}; "
            "set config.data.sources.babilong.task to one, or config.data.path to a folder of bAbI "
            "files."
        )
    stream = SPLITS.index(split)
    task_stream = 2 * int(task.removeprefix("qa")) + stream
    return [_drawn(task, Draw(seed, task_stream, index), stream) for index in range(count)]


def _drawn(task: str, draw: Draw, stream: int) -> Sample:
    """Draws stories until one belongs to the split; a digest of the text decides its split."""
    while True:
        story = TELLERS[task](draw)
        text = "\n".join((*story.chunks, story.question))
        if hashlib.sha256(text.encode()).digest()[0] % 2 == stream:
            return story

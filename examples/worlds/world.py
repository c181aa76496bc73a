"""An invented world, without end: questions of several hops, each among passages that hide it.

A bridge question names one entity and a chain of relations ("In which city is the company based
that employs Velmora Tashkin?"). Each passage of the chain but the last names the entity of the next
one; the last has the answer. A comparison names two entities (2 hops), or a bridge to each (4).

One rule keeps the later passages from being found by the question alone: every passage about a kind
of thing states all relations that the question asks of that kind, whether the passage is in the
chain or not. Only the names show the role of a passage. The splits share no invented word.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from qrag_jax.data.sample import SPLITS, Draw, Split
from qrag_jax.errors import InputError

RIVALS = 2
NAMESAKE_RIVALS = 0.1  # share of rivals with a copied name word; 0.3 confuses an untrained MiniLM
PLAIN = 6  # plain rivals per round; each other sort of distractor has one turn per round
NUMBER = "number"

# ---------------------------------------------------------------- grammar


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of thing: the forms of its names, asides that are no facts, syllables of a name."""

    forms: tuple[str, ...]
    asides: tuple[str, ...]
    syllables: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Relation:
    """A statement about a `subject` kind, and its wordings; see grammar.txt.

    Attributes:
        object: a kind, or `NUMBER`, which is drawn from `span` without its upper end.
        shared: whether several subjects may have the same object (two persons, one employer).
        last: whether it may stand only at the end of a chain.
        contests: pairs (question about {a} and {b}, whether the greater number wins).
    """

    subject: str
    object: str
    predicates: tuple[str, ...]
    phrases: tuple[str, ...]
    questions: tuple[str, ...]
    shared: bool = True
    last: bool = False
    span: tuple[int, int] = (0, 0)
    contests: tuple[tuple[str, bool], ...] = ()


def _read_grammar(text: str) -> tuple[dict[str, Kind], tuple[Relation, ...]]:
    kinds: dict[str, Kind] = {}
    relations: list[Relation] = []
    lines = iter(text.splitlines())
    for line in lines:
        what, subject, *more = line.split()
        first, second, *third = (
            tuple(next(lines).strip().split(" | ")) for _ in range(2 if what == "kind" else 3)
        )
        if what == "kind":
            kinds[subject] = Kind(first, second, int(more[0]))
        elif what == "link":
            shared, last = "own" not in more, "last" in more
            relations.append(Relation(subject, more[0], first, second, third[0], shared, last))
        else:
            span, (low, high) = (int(more[0]), int(more[1])), third[0]
            contests = ((low, False), (high, True))
            numbered = Relation(subject, NUMBER, first, (), second, span=span, contests=contests)
            relations.append(numbered)
    return kinds, tuple(relations)


_FILE = Path(__file__).with_name("grammar.txt").read_text(encoding="utf-8")
GRAMMAR = re.sub(r"^#.*\n", "", _FILE, flags=re.M)  # without its comments
KINDS, RELATIONS = _read_grammar(GRAMMAR)
_ENGLISH = frozenset(
    word
    for text in (
        *(t for r in RELATIONS for t in (*r.predicates, *r.phrases, *r.questions)),
        *(t for kind in KINDS.values() for t in (*kind.forms, *kind.asides)),
    )
    for word in text.lower().split()
)

# ---------------------------------------------------------------- names


def _pieces(text: str) -> tuple[str, ...]:
    return tuple(text.split(" "))


# A word is onset, vowel, middle, vowel, (middle, vowel,) coda. Consonants and vowels alternate, so
# a word can be split into its pieces in only one way. The sum of the pieces' indices is even in
# words of the train split and odd in words of dev. So no word is in both splits, although both are
# spelled from the same pieces.
_ONSETS = _pieces("b d f g h j k l m n p r s t v z br dr fr gr kr pl sl st kl th tr bl sh ch")
_VOWELS = _pieces("a e i o u ia")
_MIDDLES = _pieces(
    "ld lm lt lv mb nd ndr nk rb rd rk rm rn rv nt sk st sh lk th "
    "tr v vr z l ll m n r rr s ss t d k g gr br mp lb"
)
_CODAS = _pieces(" n r l s m t k d x th nd rn sh")  # the first is empty
_BODIES = {
    2: (_ONSETS, _VOWELS, _MIDDLES, _VOWELS),
    3: (_ONSETS, _VOWELS, _MIDDLES, _VOWELS, _MIDDLES, _VOWELS),
}
_SPACE = {n: int(np.prod([len(p) for p in body])) for n, body in _BODIES.items()}

_SPELLED = {
    n: re.compile("".join(f"({'|'.join(pieces)})" for pieces in (*body, _CODAS)))
    for n, body in _BODIES.items()
}


def invented_word(draw: Draw, stream: int, syllables: int) -> str:
    """A capitalised, pronounceable word of split number `stream` (0 train, 1 dev).

    Each split has 3·10^5 words of two syllables and 7·10^7 words of three.
    """
    number, pieces, places = draw.below(_SPACE[syllables]), [], 0
    for inventory in _BODIES[syllables]:
        number, place = divmod(number, len(inventory))
        pieces.append(inventory[place])
        places += place
    coda = 2 * draw.below(len(_CODAS) // 2) + (places + stream) % 2
    return ("".join(pieces) + _CODAS[coda]).capitalize()


def invented_syllables(word: str) -> int:
    """How many syllables an invented word of any split has; 0: `word` is not spelled as one."""
    return next((n for n, spelled in _SPELLED.items() if spelled.fullmatch(word.lower())), 0)


# ---------------------------------------------------------------- puzzles


def _title(mention: str) -> str:
    return mention.removeprefix("the ")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Entity:
    """A thing of the world. `title` heads its passage; sentences name it by `mention`."""

    kind: str
    words: tuple[str, ...]
    mention: str

    @property
    def title(self) -> str:
        return _title(self.mention)


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """A passage about `entity` that states `facts` and perhaps an aside."""

    entity: Entity
    facts: dict[Relation, Entity | int]
    sentences: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Puzzle:
    """A question with its passages in shuffled order.

    Attributes:
        chain: positions in `passages` of the supporting ones, in the order of the hops.
        path: the relation that is asked of each supporting passage.
    """

    question: str
    answer: str
    passages: tuple[Passage, ...]
    chain: tuple[int, ...]
    path: tuple[Relation, ...]


@functools.cache
def _paths(hops: int, room: int) -> tuple[tuple[Relation, ...], ...]:
    """All chains of `hops` relations whose subjects, except the first, have at most `room` kinds.

    A chain uses no relation twice. It asks at most two relations of one kind (three if `room` is
    one), so that passages stay short.
    """
    asked_at_most = 3 if room == 1 else 2

    def grow(path: tuple[Relation, ...]) -> list[tuple[Relation, ...]]:
        if len(path) == hops:
            return [path]
        at = path[-1].object
        if at == NUMBER or path[-1].last:
            return []
        asked = sum(r.subject == at for r in path)
        if asked == asked_at_most or len({at, *(r.subject for r in path[1:])}) > room:
            return []
        return [p for r in RELATIONS if r.subject == at and r not in path for p in grow((*path, r))]

    return tuple(path for first in RELATIONS for path in grow((first,)))


class _Pool:
    """Collects the passages of one puzzle: first the chain, then the distractors."""

    def __init__(self, draw: Draw, stream: int, asked: tuple[Relation, ...], later: set[str]):
        self.draw, self.stream, self.asked, self.later = draw, stream, asked, later
        self.passages: list[Passage] = []
        self._words: set[str] = set()
        self._titles: set[str] = set()

    def word(self, syllables: int) -> str:
        """A word that is new in this puzzle and that no template uses."""
        while True:
            word = invented_word(self.draw, self.stream, syllables)
            if word not in self._words and word.lower() not in _ENGLISH:
                self._words.add(word)
                return word

    def entity(self, kind: str, word: str = "", first: bool = False) -> Entity:
        """A new entity; its name has `word`, if given. `first`: as the first word of a person."""
        w = word or self.word(KINDS[kind].syllables)
        words: tuple[str, ...] = (w,)
        if kind == "person":
            words = (w, self.word(2)) if first else (self.word(2), w)
            mention = " ".join(words)
        else:
            mention = self.draw.choice(self._free_forms(kind, w))
        self._titles.add(_title(mention))
        return Entity(kind, words, mention)

    def named_after(self, model: Entity, kinds: list[str]) -> Entity | None:
        """A new entity of one of the kinds with a word of the model's name; None if none is free.

        With probability 0.5 it gets the model's kind, if that is free.
        """
        word = self.draw.choice(model.words)
        free = [  # words of persons' names are of persons alone
            kind
            for kind in kinds
            if kind == model.kind == "person"
            or ("person" not in (kind, model.kind) and self._free_forms(kind, word))
        ]
        if not free:
            return None
        same_kind = model.kind in free and self.draw.chance(0.5)
        kind = model.kind if same_kind else self.draw.choice(free)
        return self.entity(kind, word, first=word == model.words[0])

    def _free_forms(self, kind: str, word: str) -> list[str]:
        """Names of this kind with the word and with a free title ("the X" has the title "X")."""
        mentions = [form.format(w=word) for form in KINDS[kind].forms]
        return [mention for mention in mentions if _title(mention) not in self._titles]

    def number(self, relation: Relation) -> int:
        low, high = relation.span
        return low + self.draw.below(high - low)

    def object_of(self, relation: Relation) -> Entity | int:
        """A new object for a relation."""
        if relation.object == NUMBER:
            return self.number(relation)
        return self.entity(relation.object)

    def add(self, entity: Entity, fixed: dict[Relation, Entity | int]) -> None:
        """Adds an entity's passage: the given facts, all that is asked of its kind, some more."""
        facts = dict(fixed)
        known = [r for r in RELATIONS if r.subject == entity.kind]
        for r in known:
            if r in self.asked and r not in facts:
                facts[r] = self.object_of(r)
        if len(facts) < 2:
            links = [r for r in known if r.object != NUMBER and r not in facts]
            more = self.draw.choice(links)
            facts[more] = self.object_of(more)
        numbers = [r for r in known if r.object == NUMBER and r not in facts]
        if numbers and self.draw.chance(0.5):
            facts[numbers[0]] = self.number(numbers[0])
        predicates = [
            self.draw.choice(r.predicates).format(o=o.mention if isinstance(o, Entity) else o)
            for r, o in facts.items()
        ]
        if len(predicates) < 3 or self.draw.chance(0.3):
            predicates.append(self.draw.choice(KINDS[entity.kind].asides))
        self.passages.append(Passage(entity, facts, self._sentences(entity, predicates)))

    def _sentences(self, entity: Entity, predicates: list[str]) -> tuple[str, ...]:
        rest = self.draw.shuffled(predicates)
        subject = entity.mention[0].upper() + entity.mention[1:]
        again = ("She", "He") if entity.kind == "person" else ("It", f"The {entity.kind}")
        sentences, then = [], self.draw.choice(again)
        while rest:
            take = 1 if len(rest) == 3 and self.draw.chance(0.5) else 2
            sentences.append(f"{subject} {' and '.join(rest[:take])}.")
            rest, subject = rest[take:], then
        return tuple(sentences)

    # Distractors. Each returns whether it could add a passage.

    def rival(self, kind: str, models: list[Entity]) -> bool:
        """Adds another entity of the kind, sometimes with a word of a model's name."""
        alike = [m for m in models if m.kind == kind]
        entity = None
        if alike and self.draw.chance(NAMESAKE_RIVALS):
            entity = self.named_after(self.draw.choice(alike), [kind])
        self.add(entity or self.entity(kind), {})
        return True

    def namesake(self, model: Entity, anywhere: bool = False) -> bool:
        """Adds an entity with a word of the model's name, of a kind that no later hop has."""
        entity = self.named_after(model, [k for k in KINDS if anywhere or k not in self.later])
        if entity is None:
            return False
        self.add(entity, {})
        return True

    def colleague(self, chain: list[Passage], path: tuple[Relation, ...]) -> bool:
        """Adds another subject with the same object as a fact of the chain.

        Its passage names the next entity of the chain (or the answer) but is no supporting fact.
        """
        shareable = [(p, r) for p, r in zip(chain, path) if r.shared and r.object != NUMBER]
        if not shareable:
            return False
        passage, relation = self.draw.choice(shareable)
        self.add(self.entity(relation.subject), {relation: passage.facts[relation]})
        return True

    def reference(self, model: Entity) -> bool:
        """Adds an entity that names `model`, an entity of the question, in one of its facts."""
        links = [
            r
            for r in RELATIONS
            if r.object == model.kind and r.shared and not r.last and r.subject not in self.later
        ]
        if not links:
            return False
        link = self.draw.choice(links)
        self.add(self.entity(link.subject), {link: model})
        return True

    def decoy(self, chain: list[Passage]) -> bool:
        """Adds the passage of an entity that a chain passage names in a fact that is not asked."""
        known = {p.entity for p in self.passages}
        aside = [
            o
            for p in chain
            for r, o in p.facts.items()
            if isinstance(o, Entity) and o not in known and not r.last and r not in self.asked
        ]
        if not aside:
            return False
        self.add(self.draw.choice(aside), {})
        return True

    def fill(
        self, chunks: int, makers: Sequence[Callable[[], bool]], rival: Callable[[], bool]
    ) -> None:
        """Adds distractors until there are `chunks` passages.

        In each round every maker has one turn and `rival` has `PLAIN`, in random order. `rival`
        also stands in for a maker that cannot add a passage.
        """
        turns: list[Callable[[], bool]] = []
        while len(self.passages) < chunks:
            turns = turns or self.draw.shuffled([*makers, *[rival] * PLAIN])
            if not turns.pop()():
                rival()

    def puzzle(self, question: str, answer: str, path: tuple[Relation, ...]) -> Puzzle:
        """Shuffles the passages. The first ones added, one per relation, are the chain."""
        order = self.draw.shuffled(range(len(self.passages)))
        chain = tuple(order.index(k) for k in range(len(path)))
        passages = tuple(self.passages[i] for i in order)
        return Puzzle(question[0].upper() + question[1:], answer, passages, chain, path)


def _bridge(draw: Draw, stream: int, hops: int, chunks: int) -> Puzzle:
    """A question that names one entity and leads from it to the answer by `hops` relations.

    `chunks` must be at least `hops + RIVALS`.
    """
    path = draw.choice(_paths(hops, min((chunks - hops) // RIVALS, hops - 1)))
    later = [r.subject for r in path[1:]]
    pool = _Pool(draw, stream, path, set(later))
    entities = [pool.entity(r.subject) for r in path]
    last = pool.object_of(path[-1])
    for entity, relation, target in zip(entities, path, [*entities[1:], last]):
        pool.add(entity, {relation: target})
    chain = pool.passages[:hops]
    for kind in [*dict.fromkeys(later)] * RIVALS:
        pool.rival(kind, entities[1:])
    makers = (
        lambda: pool.colleague(chain, path),
        lambda: pool.decoy(chain),
        lambda: pool.namesake(entities[0]),
        lambda: pool.namesake(draw.choice(entities[1:]), anywhere=True),
        lambda: pool.reference(entities[0]),
    )
    pool.fill(chunks, makers, lambda: pool.rival(draw.choice(later), entities[1:]))
    phrase = entities[0].mention
    for relation in path[:-1]:
        phrase = draw.choice(relation.phrases).format(x=phrase)
    question = draw.choice(path[-1].questions).format(x=phrase)
    return pool.puzzle(question, last.title if isinstance(last, Entity) else str(last), path)


def _comparison(draw: Draw, stream: int, hops: int, chunks: int) -> Puzzle:
    """A question that compares two entities: it names them (2 hops) or a bridge to each (4 hops).

    `chunks` must be at least `hops + RIVALS`.
    """
    contests = [r for r in RELATIONS if r.contests]
    links: tuple[Relation, ...] = ()
    if hops == 2:
        contest = draw.choice(contests)
    else:
        bridges = [(p[0], p[1]) for p in _paths(2, 1) if p[1].contests]
        link, contest = draw.choice(bridges)
        links = (link, link)
    kind = contest.subject
    path = (*links, contest, contest)
    pool = _Pool(draw, stream, path, {kind} if links else set())
    named = [pool.entity(r.subject) for r in links or path]
    compared = [pool.entity(kind) for _ in named] if links else named
    first = pool.number(contest)
    while (second := pool.number(contest)) == first:
        pass
    for entity, link, target in zip(named, links, compared):
        pool.add(entity, {link: target})
    for entity, value in zip(compared, (first, second)):
        pool.add(entity, {contest: value})
    chain = pool.passages[:hops]
    for _ in range(RIVALS):
        pool.rival(kind, compared)
    makers = (
        lambda: pool.namesake(named[0]),
        lambda: pool.namesake(named[1]),
        lambda: pool.colleague(chain, path),
        lambda: pool.decoy(chain),
        lambda: pool.reference(named[0]),
        lambda: pool.reference(named[1]),
    )
    pool.fill(chunks, makers, lambda: pool.rival(kind, compared))
    a, b = (e.mention for e in named)
    if links:
        a, b = (draw.choice(links[0].phrases).format(x=x) for x in (a, b))
    wording, greater = draw.choice(contest.contests)
    winner = compared[0] if (first > second) == greater else compared[1]
    return pool.puzzle(wording.format(a=a, b=b), winner.title, path)


def puzzle_at(
    split: Split,
    index: int,
    *,
    seed: int = 0,
    hops: Sequence[int] = (2, 3, 4),
    comparison: float = 0.2,
    chunks: int = 10,
) -> Puzzle:
    """The `index`-th question of a split; it depends on the arguments only, on every machine.

    Args:
        seed: another seed gives another world.
        hops: supporting passages, 2 to 4; each number is equally likely.
        comparison: share of comparisons among questions of 2 and 4 hops.
        chunks: passages, at least `max(hops) + RIVALS`.
    """
    if split not in SPLITS or index < 0 or seed < 0:
        raise InputError(f"the world has no question ({seed}, {split!r}, {index}).")
    if not set(hops) <= {2, 3, 4} or chunks < max(hops) + RIVALS:
        raise InputError(
            f"the world has no questions of {hops} hops among {chunks} passages; give hops from 2 "
            f"to 4, and {RIVALS} passages more at least."
        )
    stream = SPLITS.index(split)
    draw = Draw(seed, stream, index)
    many = draw.choice(hops)
    make = _comparison if many != 3 and draw.chance(comparison) else _bridge
    return make(draw, stream, many, chunks)

"""The kinds and relations of the invented world, and the wording of its facts and questions.

`RELATIONS` is the world's grammar. A relation is worded in three ways: as a predicate ("works for
{o}"), as a noun phrase for the object ("the employer of {x}") and as a final question ("Which
company employs {x}?"). Nested noun phrases make questions of several hops.
"""

from __future__ import annotations

import dataclasses

NUMBER = "number"


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of thing: its noun, the forms of its names, and asides that are not facts."""

    noun: str
    forms: tuple[str, ...]
    asides: tuple[str, ...]
    syllables: int = 2


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Relation:
    """A statement that can be made about a `subject` kind, and its wordings.

    Attributes:
        object: a kind, or `NUMBER`.
        shared: whether several subjects may have the same object (two persons, one employer).
        last: whether the relation may stand only at the end of a chain, because it is symmetric:
            the passage of the second entity would name the first entity.
        span: the range that a `NUMBER` is drawn from; the upper end is excluded.
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


def _to(subject: str, obj: str, predicates: str, phrases: str, questions: str, **kw) -> Relation:
    return Relation(
        subject,
        obj,
        tuple(predicates.split(" | ")),
        tuple(phrases.split(" | ")),
        tuple(questions.split(" | ")),
        **kw,
    )


def _of(
    subject: str, span: tuple[int, int], predicates: str, questions: str, *, low: str, high: str
) -> Relation:
    return Relation(
        subject,
        NUMBER,
        tuple(predicates.split(" | ")),
        (),
        tuple(questions.split(" | ")),
        span=span,
        contests=((low, False), (high, True)),
    )


def _kind(noun: str, forms: str, asides: str, syllables: int = 2) -> Kind:
    return Kind(noun, tuple(forms.split(" | ")), tuple(asides.split(" | ")), syllables)


# A lower-case "the " in a form is an article: it belongs to the mention, not to the title.
KINDS: dict[str, Kind] = {
    "person": _kind(
        "person",
        "{v} {w}",
        "collects old maps | keeps bees | speaks four languages | walks with a cane | plays chess "
        "on Sundays | has never learned to swim | paints small portraits | wears a green hat",
    ),
    "company": _kind(
        "company",
        "{w} Group | {w} Works | {w} Holdings | {w} Industries | {w} Mills | {w} Brothers",
        "makes copper wire | sells garden tools | has a blue logo | prints its own calendar | "
        "repairs clocks | closes every August | bottles mineral water",
    ),
    "city": _kind(
        "city",
        "{w}",
        "is known for its salt market | has a white lighthouse | holds a kite fair in May | "
        "has two tram lines | is famous for plum cake | keeps its old walls",
        3,
    ),
    "river": _kind(
        "river",
        "the River {w} | the {w} River",
        "freezes in January | is rich in trout | carries much red clay | has nine weirs | "
        "is too shallow for barges | floods in spring",
    ),
    "lake": _kind(
        "lake",
        "Lake {w}",
        "is home to grey herons | has clear water | is ringed by pine woods | "
        "freezes in hard winters | has three small islands | is popular with rowers",
    ),
    "university": _kind(
        "university",
        "{w} University | the University of {w} | {w} College",
        "has a famous choir | keeps a botanical garden | uses an owl as its emblem | "
        "owns a large telescope | teaches only in the evening | has a round library",
    ),
    "book": _kind(
        "book",
        "The Lantern of {w} | A Song for {w} | The Keys of {w} | The Last Days of {w} | "
        "The Orchard of {w} | Letters to {w}",
        "is told in letters | ends with a storm | won no prizes | has a yellow cover | "
        "was translated six times | opens with a funeral",
    ),
    "instrument": _kind(
        "instrument",
        "the {w}",
        "has a warm low tone | is held under the chin | is carved from pear wood | "
        "is hard to tune | is heard at weddings | has a curved neck",
        3,
    ),
    "museum": _kind(
        "museum",
        "the {w} Museum | the {w} Gallery",
        "shows old clocks | is free on Mondays | owns a whale skeleton | keeps rare coins | "
        "has a glass roof | sells postcards",
    ),
}

RELATIONS: tuple[Relation, ...] = (
    _to(
        "person",
        "company",
        "works for {o} | is employed by {o} | holds a post at {o} | is on the staff of {o}",
        "the company that employs {x} | the employer of {x} | the company that pays {x}",
        "Which company employs {x}? | For which company does {x} work?",
    ),
    _to(
        "person",
        "university",
        "studied at {o} | took a degree at {o} | is a graduate of {o}",
        "the university attended by {x} | the alma mater of {x} | the university that taught {x}",
        "At which university did {x} study? | Which university did {x} attend?",
    ),
    _to(
        "person",
        "city",
        "was born in {o} | is a native of {o} | comes from {o}",
        "the birthplace of {x} | the home town of {x} | the native city of {x}",
        "In which city was {x} born? | What is the home town of {x}?",
    ),
    _to(
        "person",
        "person",
        "was taught by {o} | learned the trade from {o} | was a pupil of {o}",
        "the teacher of {x} | the person who taught {x} | the tutor of {x}",
        "Who taught {x}? | Who was the teacher of {x}?",
    ),
    _to(
        "person",
        "person",
        "is a godchild of {o} | has {o} as godparent | was christened with {o} as godparent",
        "the godparent of {x} | the person who is godparent to {x}",
        "Who is the godparent of {x}? | Who is godparent to {x}?",
    ),
    _to(
        "person",
        "instrument",
        "plays {o} | performs on {o} | gives lessons on {o}",
        "the instrument played by {x} | the musical instrument of {x}",
        "Which instrument does {x} play? | What instrument is played by {x}?",
    ),
    _to(
        "person",
        "person",
        "is married to {o} | wed {o} | is the spouse of {o}",
        "the spouse of {x}",
        "Who is married to {x}? | Who is the spouse of {x}?",
        shared=False,
        last=True,
    ),
    _of(
        "person",
        (1820, 1990),
        "was born in {o} | has been alive since {o} | came into the world in {o}",
        "In what year was {x} born? | What is the birth year of {x}?",
        low="Who was born first, {a} or {b}?",
        high="Who is younger, {a} or {b}?",
    ),
    _to(
        "company",
        "city",
        "is based in {o} | has its head office in {o} | is run from {o}",
        "the city that is home to {x} | the home city of {x} | the city that hosts {x}",
        "In which city is {x} based? | Where does {x} have its head office?",
    ),
    _to(
        "company",
        "person",
        "was founded by {o} | was set up by {o} | owes its start to {o}",
        "the founder of {x} | the person who founded {x} | the creator of {x}",
        "Who founded {x}? | Who set up {x}?",
    ),
    _to(
        "company",
        "company",
        "is owned by {o} | belongs to {o} | is a subsidiary of {o}",
        "the owner of {x} | the parent company of {x} | the company that owns {x}",
        "Which company owns {x}? | To which company does {x} belong?",
    ),
    _of(
        "company",
        (1780, 1995),
        "was founded in {o} | opened for business in {o} | dates from {o}",
        "In what year was {x} founded? | When did {x} open for business?",
        low="Which is older, {a} or {b}?",
        high="Which was founded later, {a} or {b}?",
    ),
    _to(
        "city",
        "river",
        "lies on {o} | stands on the banks of {o} | is crossed by {o}",
        "the river that crosses {x} | the river that runs through {x} | the river of {x}",
        "Which river runs through {x}? | On which river does {x} lie?",
    ),
    _to(
        "city",
        "person",
        "has {o} as its mayor | is governed by mayor {o} | elected {o} as mayor",
        "the mayor of {x} | the person who governs {x}",
        "Who is the mayor of {x}? | Who governs {x}?",
        shared=False,
    ),
    _of(
        "city",
        (3000, 900000),
        "has {o} inhabitants | is home to {o} people | counts {o} residents",
        "How many people live in {x}? | What is the population of {x}?",
        low="Which has fewer inhabitants, {a} or {b}?",
        high="Which has more inhabitants, {a} or {b}?",
    ),
    _to(
        "river",
        "lake",
        "flows into {o} | empties into {o} | ends in {o}",
        "the lake fed by {x} | the lake that receives {x} | the lake at the end of {x}",
        "Into which lake does {x} flow? | Which lake is fed by {x}?",
    ),
    _to(
        "river",
        "city",
        "rises near {o} | has its spring near {o} | begins in the hills above {o}",
        "the city near the source of {x} | the city near the spring of {x}",
        "Near which city does {x} rise? | Which city is near the source of {x}?",
    ),
    _of(
        "river",
        (40, 990),
        "is {o} kilometres long | has a length of {o} kilometres | runs for {o} kilometres",
        "How long is {x}? | What is the length of {x}?",
        low="Which is shorter, {a} or {b}?",
        high="Which is longer, {a} or {b}?",
    ),
    _to(
        "lake",
        "city",
        "has its main harbour at {o} | has {o} as its harbour city | is reached from port {o}",
        "the harbour city of {x} | the city with the harbour of {x}",
        "Which city has the harbour of {x}? | What is the harbour city of {x}?",
    ),
    _to(
        "lake",
        "person",
        "was first mapped by {o} | was charted by {o} | was surveyed by {o}",
        "the surveyor of {x} | the person who first mapped {x}",
        "Who first mapped {x}? | Who was the surveyor of {x}?",
    ),
    _of(
        "lake",
        (12, 480),
        "is {o} metres deep | has a depth of {o} metres | reaches down {o} metres",
        "How deep is {x}? | What is the depth of {x}?",
        low="Which is shallower, {a} or {b}?",
        high="Which is deeper, {a} or {b}?",
    ),
    _to(
        "university",
        "city",
        "has its campus in {o} | stands in {o} | is located in {o}",
        "the city with the campus of {x} | the city that houses {x} | the location of {x}",
        "In which city is {x} located? | Which city houses {x}?",
    ),
    _to(
        "university",
        "person",
        "is headed by {o} | has {o} as its rector | is led by rector {o}",
        "the rector of {x} | the head of {x} | the person who leads {x}",
        "Who is the rector of {x}? | Who leads {x}?",
        shared=False,
    ),
    _of(
        "university",
        (1400, 1960),
        "was founded in {o} | received its charter in {o} | took its first students in {o}",
        "In what year was {x} founded? | When did {x} receive its charter?",
        low="Which is older, {a} or {b}?",
        high="Which was founded later, {a} or {b}?",
    ),
    _to(
        "book",
        "person",
        "was written by {o} | is a novel by {o} | came from the pen of {o}",
        "the author of {x} | the writer of {x} | the person who wrote {x}",
        "Who wrote {x}? | Who is the author of {x}?",
    ),
    _to(
        "book",
        "company",
        "was published by {o} | was printed by {o} | appeared with {o}",
        "the publisher of {x} | the company that published {x}",
        "Which company published {x}? | Which company is the publisher of {x}?",
    ),
    _of(
        "book",
        (1850, 2010),
        "appeared in {o} | came out in {o} | was first printed in {o}",
        "In what year did {x} appear? | When did {x} come out?",
        low="Which came out first, {a} or {b}?",
        high="Which came out later, {a} or {b}?",
    ),
    _to(
        "instrument",
        "person",
        "was invented by {o} | was devised by {o} | is the invention of {o}",
        "the inventor of {x} | the person who invented {x}",
        "Who invented {x}? | Who is the inventor of {x}?",
    ),
    _to(
        "instrument",
        "company",
        "is built by {o} | is manufactured by {o} | comes from the workshops of {o}",
        "the maker of {x} | the company that builds {x} | the manufacturer of {x}",
        "Which company builds {x}? | Which company is the maker of {x}?",
    ),
    _of(
        "instrument",
        (3, 60),
        "has {o} strings | is strung with {o} strings | carries {o} strings",
        "How many strings has {x}? | How many strings are there on {x}?",
        low="Which has fewer strings, {a} or {b}?",
        high="Which has more strings, {a} or {b}?",
    ),
    _to(
        "museum",
        "city",
        "is in {o} | is located in {o} | stands in the centre of {o}",
        "the city with {x} | the city that houses {x} | the location of {x}",
        "In which city is {x} located? | Which city houses {x}?",
    ),
    _to(
        "museum",
        "person",
        "is run by {o} | has {o} as its director | is directed by {o}",
        "the director of {x} | the person who directs {x}",
        "Who is the director of {x}? | Who runs {x}?",
        shared=False,
    ),
    _of(
        "museum",
        (1800, 2005),
        "opened in {o} | has welcomed visitors since {o} | was opened to the public in {o}",
        "In what year did {x} open? | When was {x} opened to the public?",
        low="Which opened first, {a} or {b}?",
        high="Which opened later, {a} or {b}?",
    ),
)

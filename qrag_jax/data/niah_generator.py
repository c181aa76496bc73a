"""Needle-in-a-haystack documents of any length, with the knobs of RULER (Hsieh et al., 2024)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from qrag_jax.data.babi import Split
from qrag_jax.data.lazy_samples import LazySamples
from qrag_jax.data.niah import NAME
from qrag_jax.data.niah_words import SINGULAR, TYPES, distinct
from qrag_jax.data.noise import Noise, noise
from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError

HAYSTACKS = ("noise", "essay", "needle")
CHARACTERS_PER_TOKEN = 4  # of English prose, roughly
# The haystack "noise": always the same, in this order.
FILLER = (
    "The kettle is on the stove.",
    "Rain falls on the roof.",
    "The road leads up the hill.",
    "Nothing happens for a while.",
    "Then all of it begins once more.",
)


class Preset(NamedTuple):
    """One of RULER's tasks.

    haystack: what is between the needles: "noise" (the same sentences over and over), "essay"
    (book sentences) or "needle" (needles of other keys). keys, values, queries: RULER's
    num_needle_k, num_needle_v and num_needle_q: keys hidden, values of each, keys asked for.
    key_type, value_type: words, numbers or uuids.
    """

    haystack: str = "essay"
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_type: str = "words"
    value_type: str = "numbers"


PRESETS = {
    "single_1": Preset("noise"),
    "single_2": Preset(),
    "single_3": Preset(value_type="uuids"),
    "multikey_1": Preset(keys=4),
    "multikey_2": Preset("needle"),
    "multikey_3": Preset("needle", key_type="uuids", value_type="uuids"),
    "multivalue": Preset(values=4),
    "multiquery": Preset(keys=4, queries=4),
}


@dataclasses.dataclass(frozen=True)
class NiahConfig:
    """What documents to make.

    Attributes:
        preset: a name in `PRESETS`; the fields that follow go before it unless they are 0 or "".
        keys, values, queries, haystack, key_type, value_type: as in `Preset`; keys are at least
            as many as queries.
        chunks: C, sentences of a document; 0: as many as make up `tokens`.
        tokens: length of a document, roughly.
        noise: folder of books for the haystack "essay"; "" for sentences of an invented world.
        noise_repeats: times that one document may use one book sentence, 0: any number.
        seed: of everything drawn.
        train, dev: documents made.

    Raises:
        InputError: a field is outside its range.
    """

    preset: str = "multivalue"
    keys: int = 0
    values: int = 0
    queries: int = 0
    haystack: str = ""
    key_type: str = ""
    value_type: str = ""
    chunks: int = 0
    tokens: int = 4096
    noise: str = ""
    noise_repeats: int = 1
    seed: int = 0
    train: int = 10_000
    dev: int = 1_000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("tokens", "train", "dev") else 0
            if field.type == "int" and (
                not isinstance(value, int) or isinstance(value, bool) or value < least
            ):
                raise InputError(
                    f"config.data.niah.{field.name} is {value!r}; give an integer from {least} up."
                )
        for name, known in (
            ("preset", tuple(PRESETS)),
            ("haystack", (*HAYSTACKS, "")),
            ("key_type", (*TYPES, "")),
            ("value_type", (*TYPES, "")),
        ):
            if getattr(self, name) not in known:
                raise InputError(
                    f"config.data.niah.{name} is {getattr(self, name)!r}; give one of "
                    f"{', '.join(filter(None, known))}."
                )

    @property
    def knobs(self) -> Preset:
        """The preset with what the config says otherwise."""
        given = {name: getattr(self, name) for name in Preset._fields}
        knobs = PRESETS[self.preset]._replace(**{n: v for n, v in given.items() if v})
        return knobs._replace(keys=max(knobs.keys, knobs.queries))


def documents(config: NiahConfig, split: Split, chunks: int = 0, count: int = 0) -> LazySamples:
    """Documents of one length, each with one question.

    A document depends on the config, the split, the length and its number alone.

    Args:
        chunks: sentences of a document, 0 for what the config says.
        count: the first so many, 0 for all.

    Raises:
        InputError: the needles are more than the sentences, or the noise is too little.
    """
    knobs = config.knobs
    chunks = chunks or config.chunks or _chunks_of_tokens(config, split)
    needles = knobs.keys * knobs.values
    if needles > chunks:
        raise InputError(
            f"{needles} needles (keys × values) do not fit {chunks} chunks; raise "
            "config.data.niah.chunks or config.data.niah.tokens."
        )
    books = None
    if knobs.haystack == "essay":
        books = _books(config, split, chunks - needles)
    total = config.train if split == "train" else config.dev

    def make(index: int) -> Sample:
        return _document(config, split, books, chunks, index)

    return LazySamples(min(total, count) if count else total, make)


def _books(config: NiahConfig, split: Split, count: int) -> Noise:
    return noise(config.noise, split, count, config.noise_repeats, config.seed, NAME)


def _chunks_of_tokens(config: NiahConfig, split: Split) -> int:
    """How many sentences of the haystack make up `config.tokens`."""
    knobs = config.knobs
    if knobs.haystack == "essay":
        texts = _books(config, split, 1).sentences
    elif knobs.haystack == "noise":
        texts = np.array(FILLER, object)
    else:
        texts = np.array(_needles(knobs, *_hidden(knobs, np.random.default_rng(0), 100)), object)
    characters = sum(map(len, texts)) / len(texts) + 1  # and a space
    return max(round(config.tokens * CHARACTERS_PER_TOKEN / characters), 1)


def _document(
    config: NiahConfig, split: Split, books: Noise | None, chunks: int, index: int
) -> Sample:
    knobs = config.knobs
    rng = np.random.default_rng((config.seed, ("train", "dev").index(split), chunks, index))
    meant = knobs.keys * knobs.values
    others = chunks - meant if knobs.haystack == "needle" else 0
    keys, values = _hidden(knobs, rng, others)
    places = rng.choice(chunks, size=len(keys), replace=False)
    texts = np.empty(chunks, object)
    texts[places] = _needles(knobs, keys, values)
    is_hay = np.ones(chunks, bool)
    is_hay[places] = False
    hay = chunks - len(keys)
    if books is not None:
        texts[is_hay] = books.sentences[books.draw(rng, hay, config.noise_repeats)]
    elif hay:
        texts[is_hay] = (FILLER * (hay // len(FILLER) + 1))[:hay]
    asked = keys[: knobs.queries]
    support = [place for place in range(meant) if keys[place] in asked]
    return Sample(
        id=f"niah_{config.preset}-{split}-{index}",
        question=_question(knobs, asked),
        chunks=tuple(texts.tolist()),
        support=tuple(sorted(int(places[i]) for i in support)),
        answers=(", ".join(values[i] for i in support),),
        source=NAME,
    )


def _hidden(knobs: Preset, rng: np.random.Generator, others: int) -> tuple[list[str], list[str]]:
    """Key and value of each needle: of those meant, then of `others` with keys of their own."""
    keys = distinct(knobs.key_type, rng, knobs.keys + others)
    keys = keys[: knobs.keys] * knobs.values + keys[knobs.keys :]
    return keys, distinct(knobs.value_type, rng, len(keys))


def _needles(knobs: Preset, keys: list[str], values: list[str]) -> list[str]:
    kind = knobs.value_type
    return [
        f"One of the special magic {kind} for {key} is: {value}."
        for key, value in zip(keys, values, strict=True)
    ]


def _question(knobs: Preset, asked: list[str]) -> str:
    *first, last = asked
    query = f"{', '.join(first)}{',' * (len(first) > 1)} and {last}" if first else last
    if knobs.values * len(asked) == 1:
        kind = SINGULAR[knobs.value_type]
        return f"What is the special magic {kind} for {query} mentioned in the provided text?"
    kind = knobs.value_type
    return f"What are all the special magic {kind} for {query} mentioned in the provided text?"

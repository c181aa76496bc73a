"""What RULER's needles hide (Hsieh et al., 2024): keys, values and the questions for them."""

from __future__ import annotations

import uuid

import numpy as np

from qrag_jax.data.long_docs import NiahConfig, Preset
from qrag_jax.data.sample import SPLITS, Sample, Split
from qrag_jax.data.sources import NIAH


def hide(
    config: NiahConfig, split: Split, chunks: int, index: int
) -> tuple[Sample, np.random.Generator]:
    """A document's needles and question, and the generator for its remaining draws."""
    knobs = config.knobs
    meant = knobs.keys * knobs.values
    others = chunks - meant if knobs.haystack == "needle" else 0
    rng = np.random.default_rng((config.seed, SPLITS.index(split), chunks, index))
    if split == "train":
        keys, values = _keys_and_values(knobs, rng, others)
    else:
        # Their generator does not depend on the length, so every length has the same question.
        alone = np.random.default_rng((config.seed, SPLITS.index(split), 0, index))
        keys, values = _keys_and_values(knobs, alone, 0)
        for texts, kind in ((keys, knobs.key_type), (values, knobs.value_type)) if others else ():
            more = distinct(kind, rng, others + len(texts))
            texts += [text for text in more if text not in texts][:others]
    asked = keys[: knobs.queries]
    support = tuple(place for place in range(meant) if keys[place] in asked)
    name, chunks_of = f"niah_{config.preset}-{split}-{index}", tuple(_texts(knobs, keys, values))
    answers = tuple(values[i] for i in support)
    return Sample(name, _question(knobs, asked), chunks_of, support, answers, NIAH), rng


def _keys_and_values(
    knobs: Preset, rng: np.random.Generator, others: int
) -> tuple[list[str], list[str]]:
    """Key and value of each needle: first those of `knobs`, then `others` with further keys."""
    keys = distinct(knobs.key_type, rng, knobs.keys + others)
    keys = keys[: knobs.keys] * knobs.values + keys[knobs.keys :]
    return keys, distinct(knobs.value_type, rng, len(keys))


def _texts(knobs: Preset, keys: list[str], values: list[str]) -> list[str]:
    begin = f"One of the special magic {knobs.value_type} for"
    return [f"{begin} {key} is: {value}." for key, value in zip(keys, values, strict=True)]


def _question(knobs: Preset, asked: list[str]) -> str:
    *first, last = asked
    query = f"{', '.join(first)}{',' * (len(first) > 1)} and {last}" if first else last
    is_one = knobs.values * len(asked) == 1
    kind = knobs.value_type.removesuffix("s") if is_one else knobs.value_type
    asks = f"What {'is the' if is_one else 'are all the'} special magic {kind} for {query}"
    return f"{asks} mentioned in the provided text?"


def needles(knobs: Preset, rng: np.random.Generator, others: int) -> list[str]:
    """The sentences of a document's needles, and of so many others."""
    return _texts(knobs, *_keys_and_values(knobs, rng, others))


# ---------------------------------------------------------------- keys and values

_FIRST = (
    "amber ancient bitter blunt bold brave brisk broken calm careful clever cold crimson crisp "
    "curious damp dark deep distant dusty eager early faint famous fancy fierce fluent fresh "
    "gentle giant glad golden grand grave happy heavy hidden hollow humble icy idle jolly keen "
    "kind late lazy little lively lone loud lucky mellow mild misty modest narrow nimble noble "
    "odd pale patient plain polite proud quick quiet rapid rare rough round rusty secret sharp "
    "silent simple slim smooth solid stern tidy"
)
_SECOND = (
    "anchor apple arrow badger barrel beacon bell bridge bucket button cabin candle canoe carpet "
    "castle cedar chimney clock cloud compass copper coral cradle curtain desert dragon drum "
    "eagle engine falcon feather ferry fiddle forest fountain garden glacier hammer harbor helmet "
    "island jacket kettle ladder lantern lemon letter magnet maple market meadow mirror mountain "
    "needle ocean orchard otter paddle parrot pebble pillow planet pocket pumpkin rabbit ribbon "
    "river saddle sailor shadow spoon stable statue tailor temple thimble tunnel turtle valley "
    "window"
)
FIRST, SECOND = _FIRST.split(), _SECOND.split()


def distinct(kind: str, rng: np.random.Generator, count: int) -> list[str]:
    """`count` different words ("quiet-falcon"), numbers of seven digits, or UUIDs."""
    if kind == "uuids":
        digits = rng.bytes(16 * count).hex()
        return [str(uuid.UUID(digits[i : i + 32], version=4)) for i in range(0, 32 * count, 32)]
    if kind == "numbers":
        return [str(10**6 + n) for n in _numbers(rng, 9 * 10**6, count)]
    pairs = len(FIRST) * len(SECOND)
    is_triple = count > pairs
    numbers = _numbers(rng, pairs * len(FIRST) if is_triple else pairs, count)
    words = []
    for number in numbers:
        first, rest = divmod(number, pairs)
        second, third = divmod(rest, len(SECOND))
        words.append(f"{FIRST[first]}-" * is_triple + f"{FIRST[second]}-{SECOND[third]}")
    return words


def _numbers(rng: np.random.Generator, space: int, count: int) -> list[int]:
    return rng.choice(space, size=count, replace=False).tolist()

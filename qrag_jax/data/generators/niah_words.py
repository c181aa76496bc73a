"""Distinct words, numbers and UUIDs: the keys and values of needles in a generated haystack."""

from __future__ import annotations

import numpy as np

from qrag_jax.errors import InputError


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST = _listed(
    "amber ancient bitter blunt bold brave brisk broken calm careful clever cold crimson crisp "
    "curious damp dark deep distant dusty eager early faint famous fancy fierce fluent fresh "
    "gentle giant glad golden grand grave happy heavy hidden hollow humble icy idle jolly keen "
    "kind late lazy little lively lone loud lucky mellow mild misty modest narrow nimble noble "
    "odd pale patient plain polite proud quick quiet rapid rare rough round rusty secret sharp "
    "silent simple slim smooth solid stern tidy"
)
SECOND = _listed(
    "anchor apple arrow badger barrel beacon bell bridge bucket button cabin candle canoe carpet "
    "castle cedar chimney clock cloud compass copper coral cradle curtain desert dragon drum "
    "eagle engine falcon feather ferry fiddle forest fountain garden glacier hammer harbor helmet "
    "island jacket kettle ladder lantern lemon letter magnet maple market meadow mirror mountain "
    "needle ocean orchard otter paddle parrot pebble pillow planet pocket pumpkin rabbit ribbon "
    "river saddle sailor shadow spoon stable statue tailor temple thimble tunnel turtle valley "
    "window"
)

TYPES = ("words", "numbers", "uuids")
SINGULAR = {"words": "word", "numbers": "number", "uuids": "uuid"}


def distinct(kind: str, rng: np.random.Generator, count: int) -> list[str]:
    """`count` different words ("quiet-falcon"), numbers of seven digits, or UUIDs."""
    if kind == "uuids":
        digits = rng.bytes(16 * count).hex()
        return [_uuid(digits[i : i + 32]) for i in range(0, 32 * count, 32)]
    if kind == "numbers":
        return [str(10**6 + n) for n in _numbers(kind, rng, 9 * 10**6, count)]
    pairs = len(FIRST) * len(SECOND)
    if count <= pairs:
        numbers, word = _numbers(kind, rng, pairs, count), _pair
    else:
        numbers, word = _numbers(kind, rng, pairs * len(FIRST), count), _triple
    return [word(number) for number in numbers]


def _uuid(digits: str) -> str:
    """A UUID of version 4: one digit is fixed, and one digit has four possible values."""
    variant = "89ab"[int(digits[16], 16) % 4]
    groups = digits[:8], digits[8:12], "4" + digits[13:16], variant + digits[17:20], digits[20:]
    return "-".join(groups)


def _pair(number: int) -> str:
    first, second = divmod(number, len(SECOND))
    return f"{FIRST[first]}-{SECOND[second]}"


def _triple(number: int) -> str:
    first, rest = divmod(number, len(FIRST) * len(SECOND))
    return f"{FIRST[first]}-{_pair(rest)}"


def _numbers(kind: str, rng: np.random.Generator, space: int, count: int) -> list[int]:
    if count > space:
        raise InputError(
            f"a document asks for {count} different {kind}, but there are {space}; set "
            "config.data.sources.niah.key_type or value_type to uuids."
        )
    return rng.choice(space, size=count, replace=False).tolist()

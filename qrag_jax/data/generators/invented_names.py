"""Makes the words of the invented world, and the random draws that they come from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Draw:
    """Random draws that are the same on every machine.

    The definition of Philox fixes its raw 64-bit output. What `numpy.random.Generator` makes of
    this output may change between numpy releases. So this class makes the few draws itself.
    """

    def __init__(self, seed: int, stream: int, index: int) -> None:
        key = np.array([seed, stream], dtype=np.uint64)
        counter = np.array([0, 0, 0, index], dtype=np.uint64)
        self._source = np.random.Philox(key=key, counter=counter)
        self._raw: list[int] = []

    def below(self, n: int) -> int:
        """An integer in [0, n); n must be far below 2^64 to make the bias negligible."""
        if not self._raw:  # 256 at a time, used from the last to the first
            self._raw = self._source.random_raw(256).tolist()
        return (self._raw.pop() * n) >> 64

    def chance(self, p: float) -> bool:
        """True with probability p."""
        return self.below(1 << 53) < p * (1 << 53)

    def choice(self, items: Sequence[T]) -> T:
        """One of the items, uniformly."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in a uniformly random order (Fisher-Yates)."""
        out = list(items)
        for i in range(len(out) - 1, 0, -1):
            j = self.below(i + 1)
            out[i], out[j] = out[j], out[i]
        return out


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

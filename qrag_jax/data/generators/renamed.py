"""Gives the invented words of texts other spellings, the same in each text of one renaming.

The names of the invented world mean nothing, so a text with other names is as true as before. What
is read often under ever other names cannot be learned by heart; it can only be copied.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cache

from qrag_jax.data.generators.invented_names import Draw, invented_syllables, invented_word
from qrag_jax.data.generators.invented_world import KINDS, RELATIONS

_TRAIN = 0  # number of the split that words are drawn from
_WORD = re.compile(r"\b[A-Z][a-z]+\b")


@dataclasses.dataclass
class Renaming:
    """One renaming; it grows with each word that it meets.

    Attributes:
        draw: where the new words come from.
    """

    draw: Draw
    _words: dict[str, str] = dataclasses.field(default_factory=dict)

    def of(self, text: str) -> str:
        """The text with other names; a word has the same new spelling wherever it stands."""
        return _WORD.sub(lambda found: self._renamed(found[0]), text)

    def _renamed(self, word: str) -> str:
        if word not in self._words:
            syllables = 0 if word in _own_words() else invented_syllables(word)
            self._words[word] = self._fresh(syllables) if syllables else word
        return self._words[word]

    def _fresh(self, syllables: int) -> str:
        taken = {*self._words.values()} | _own_words()
        while (word := invented_word(self.draw, _TRAIN, syllables)) in taken:
            pass
        return word


@cache
def _own_words() -> frozenset[str]:
    """Capitalised words of the world's wording, such as "Lake", which are no invented ones."""
    texts = [text for kind in KINDS.values() for text in (*kind.forms, *kind.asides)]
    for each in RELATIONS:
        contests = [question for question, _ in each.contests]
        texts += [*each.predicates, *each.phrases, *each.questions, *contests]
    return frozenset(word for text in texts for word in _WORD.findall(text))

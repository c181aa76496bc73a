"""The passages of many questions as one corpus, in which each different passage is there once.

Ids can be read, and do not depend on what else is in the pool: the words of the title (or, without
one, the first words of the text), and a hash of the whole, such as "ada-berg-1f0c93ab".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from qrag_jax.data.query_question import Page
from qrag_jax.retrieval.gold_names import letters
from qrag_jax.retrieval.protocol import Passage

_WORD = re.compile(r"\w+")
_LONGEST = 40  # letters of an id before the hash
_DIGITS = 8  # of the hash, in hex


def pooled(pages: Iterable[Page]) -> list[Passage]:
    """The different passages, in the order in which they come.

    As in `gold_names`, letters and digits alone are compared: of the title, and of the text.
    """
    found: dict[tuple[str, str], Passage] = {}
    for page in pages:
        # A page without letters is told from others by its marks.
        key = (letters(page.title), letters(page.text)) if letters(page.whole) else page[:2]
        if key not in found:
            found[key] = Passage(_name(page), page.text, page.title)
    return [*found.values()]


def _name(page: Page) -> str:
    words = "-".join(_WORD.findall((page.title or page.text).casefold()))
    digest = hashlib.blake2b(f"{page.title}\0{page.text}".encode(), digest_size=_DIGITS // 2)
    return f"{words[:_LONGEST].rstrip('-')}-{digest.hexdigest()}".lstrip("-")

"""A question for a query writer, who searches for its gold pages in a corpus.

Most data sets bring passages with each question, of which some are gold. Others name the titles of
the gold pages alone (HoVer), and need a corpus. `Sample` has no place for these, because there the
gold passages are among the question's own; so query writers read this form.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from qrag_jax.runtime.retriever_config import passage_text


class Page(NamedTuple):
    """A passage of a question, or a gold page of which less is known.

    Attributes:
        title: "" if it has none.
        text: what follows the title; "" if it is unknown.
        id: in the corpus that comes with the data; "" if none does.
    """

    title: str
    text: str = ""
    id: str = ""

    @property
    def whole(self) -> str:
        """Title and text, as corpora are searched."""
        return passage_text(self.title, self.text)


@dataclasses.dataclass(frozen=True, slots=True)
class QueryQuestion:
    """One question.

    Attributes:
        id: unique within its data set.
        question: the question's text.
        answers: the answer followed by its aliases; may be empty.
        gold: the pages to be found, one at least.
        passages: the question's own, which may be pooled with those of others; () if it has none.
        source: see `Sample`; "" for what has none.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[Page, ...]
    passages: tuple[Page, ...] = ()
    source: str = ""

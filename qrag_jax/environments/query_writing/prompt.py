"""The one builder of a query writer's prompts, which samples, trains and serves.

A state is asked by the bare prompt, or by a variant of it that makes the model try something else:
with solved examples before it, as earlier turns, or with a mark before its last message. What is
trained on is the bare prompt, so variants must leave no trace in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qrag_jax.environments.query_writing.state import QueryState
from qrag_jax.errors import InputError, check_least
from qrag_jax.llm.text.prompts import CHUNK_SLOTS, Messages, Prompt, harmless, one_line

NOTHING = "(none yet)"  # in place of passages at the first hop
BARE = "bare"


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A solved state that a prompt shows.

    Attributes:
        question: its question.
        passages: texts of its pool, in order.
        query: the query that was written for it.

    Raises:
        ValueError: there is no query, so that the example would show nothing.
    """

    question: str
    passages: tuple[str, ...]
    query: str

    def __post_init__(self) -> None:
        if not self.query.strip():
            raise ValueError(f"the example of {self.question!r} has no query")


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One way to ask.

    Attributes:
        name: of it, unique.
        examples: shown as earlier turns of the conversation.
        mark: text on a line of its own before the last message; "": none.
    """

    name: str
    examples: tuple[Example, ...] = ()
    mark: str = ""


@dataclasses.dataclass(frozen=True)
class QueryPrompt:
    """Asks for the query of a state.

    Attributes:
        prompt: with the slots `question` and `passages`.
        variants: those beside the bare prompt; variant n is number n - 1 of them.
        passage_words: words of a passage that are shown, at most; 0: all.
    """

    prompt: Prompt
    variants: tuple[Variant, ...] = ()
    passage_words: int = 0

    def __post_init__(self) -> None:
        check_least("writing", self, passage_words=0)
        if self.prompt.slots != {"question", "passages"}:
            raise InputError(
                f"{self.prompt.path} has the slots {', '.join(sorted(self.prompt.slots)) or 'none'}"
                "; write {question} and {passages}."
            )
        names = [BARE, *(each.name for each in self.variants)]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"two prompts have the name {twice!r}; give each its own.")
        shown = [self.tried(each) for each in (None, *self.variants)]
        for number, each in enumerate(shown):
            if each in shown[:number]:
                same = names[shown.index(each)]
                raise InputError(
                    f"the prompts {same!r} and {names[number]!r} are the same text, so their tries "
                    "differ by chance only; give other examples, or ask for fewer prompts."
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all ways to ask, the bare one first."""
        return (BARE, *(each.name for each in self.variants))

    def messages(self, state: QueryState) -> Messages:
        """The conversation that asks for the next query of a state, by its variant."""
        variant = self.variants[state.variant - 1] if state.variant else None
        return self._messages(state.question, [each.text for each in state.pool], variant)

    def tried(self, variant: Variant | None) -> Messages:
        """How a variant asks of a stand-in state; two that ask alike are one prompt."""
        return self._messages(*_TRIED, variant)

    def example(self, state: QueryState, query: str) -> Example:
        """A solved state as an example."""
        return Example(state.question, tuple(each.text for each in state.pool), query)

    def _messages(
        self, question: str, passages: Sequence[str], variant: Variant | None
    ) -> Messages:
        *opening, (role, asked) = self._asked(question, passages)
        if variant is None:
            return (*opening, (role, asked))
        turns: list[tuple[str, str]] = []
        for each in variant.examples:
            *_, last = self._asked(each.question, each.passages)
            # A model wrote it, so it may hold the marks of turns.
            turns += [last, ("assistant", harmless(one_line(each.query)))]
        marked = f"{variant.mark}\n{asked}" if variant.mark else asked
        return (*opening, *turns, (role, marked))

    def _asked(self, question: str, passages: Sequence[str]) -> Messages:
        shown = CHUNK_SLOTS["passages"]([self._cut(each) for each in passages])
        return self.prompt.fill({"question": one_line(question), "passages": shown or NOTHING})

    def _cut(self, passage: str) -> str:
        words = one_line(passage).split(" ")
        if not self.passage_words or len(words) <= self.passage_words:
            return " ".join(words)
        return " ".join(words[: self.passage_words])


_TRIED = "Which river?", ("A river.",)

"""What is demonstrated before a query rewriter learns from searches.

Queries that are made here are rewritten in scripted styles. Of other data, sentences of the corpora
are the queries, and what is left when words are dropped is the rewriting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from qrag_jax.data.scripted import Draw, TalkativeQuestion
from qrag_jax.environments.demonstrations import draw_rewriting
from qrag_jax.environments.queries import RewriteAgent, RewriteTask
from qrag_jax.data.words import STREAM, dropped, frequent_words, is_among, sentences_of
from qrag_jax.environments.query_rewriting.agent import RewriteAgent
from qrag_jax.environments.query_rewriting.styles import draw_rewriting
from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.errors import InputError, check_least

if TYPE_CHECKING:
    from qrag_jax.systems.deepretrieval_config import RewriteConfig

_READ_FOR_TOKENIZER = 2000  # demonstrations on which a tiny model's tokenizer is trained


ANY, FREQUENT, RARE = KINDS = ("any", "frequent", "rare")


@dataclasses.dataclass(frozen=True)
class DroppedConfig:
    """Section `dropped`: demonstrations for data: sentences of the corpora, with words left out."""

    # What a demonstration leaves out, one of these drawn for each: any words, frequent ones alone,
    # or rare ones alone
    kinds: tuple[str, ...] = (ANY,)
    share: float = 0.25  # probability with which any word is left out
    frequent_share: float = 0.9  # a frequent word, of the kind frequent
    rare_share: float = 0.25  # another word, of the kind rare
    frequent_from: float = 0.1  # a word is frequent that more than this share of the texts have
    least_words: int = 4  # of a demonstration
    most_words: int = 30
    # Of single sentences, of two neighbours, and so on up to so many. Long queries need long ones
    together: int = 1

    def __post_init__(self) -> None:
        check_least("dropped", self, least_words=1, most_words=self.least_words, together=1)
        if not self.kinds or len(set(self.kinds)) < len(self.kinds):
            raise InputError(
                f"config.dropped.kinds is {self.kinds}; name some of {', '.join(KINDS)}, each once."
            )
        for kind in self.kinds:
            if kind not in KINDS:
                raise InputError(
                    f"config.dropped.kinds has {kind!r}; the kinds are {', '.join(KINDS)}."
                )
        for name in ("share", "frequent_share", "rare_share"):
            if not 0 <= (share := getattr(self, name)) < 1:
                raise InputError(
                    f"config.dropped.{name} is {share}; use a probability, 0 to less than 1."
                )
        if not 0 < self.frequent_from < 1:
            raise InputError(
                f"config.dropped.frequent_from is {self.frequent_from}; use a share above 0 and "
                "below 1."
            )


@dataclasses.dataclass(frozen=True)
class Demonstrated:
    """One rewriting to imitate.

    Attributes:
        task: what is asked; of a sentence, no document is relevant.
        query: what is imitated.
    """

    task: RewriteTask
    query: str


@dataclasses.dataclass(frozen=True)
class RewriteScript:
    """Demonstrations before they are drawn.

    Attributes:
        given: queries of which the script knows all, or sentences.
        frequent: the frequent words of these sentences' corpora, in small letters.
    """

    given: Sequence[TalkativeQuestion | str]
    frequent: frozenset[str] = frozenset()

    def at(self, config: RewriteConfig, number: int, index: int) -> Demonstrated:
        """Demonstration `index`, of query `number`; it depends on the arguments only."""
        one = self.given[number]
        if isinstance(one, str):
            draw = Draw(config.seed, STREAM, index)
            task = RewriteTask(id=f"sentence-{number}", question=one, answers=())
            return Demonstrated(task, self._dropped(config.dropped, one, draw))
        _, query = draw_rewriting(config.styles, config.seed, index, one)
        judged = one.judged
        task = RewriteTask.judged(judged.id, judged.text, dict(judged.grades))
        return Demonstrated(task, query)

    def _dropped(self, config: DroppedConfig, sentence: str, draw: Draw) -> str:
        """The sentence without words of one kind."""
        kind = draw.choice(config.kinds) if len(config.kinds) > 1 else config.kinds[0]
        if kind == ANY:
            return dropped(sentence, draw, config.share)
        is_frequent = partial(is_among, words=self.frequent)
        if kind == FREQUENT:
            return dropped(sentence, draw, config.frequent_share, is_frequent)
        return dropped(sentence, draw, config.rare_share, lambda token: not is_frequent(token))

    def texts(self, config: RewriteConfig, agent: RewriteAgent) -> Iterator[str]:
        """The texts of some demonstrations, prompts included; they are spread over all."""
        step = max(len(self.given) // _READ_FOR_TOKENIZER, 1)
        for number in range(0, len(self.given), step):
            shown = self.at(config, number, number)
            yield from (text for _, text in agent.prompt.messages(shown.task))
            yield shown.query


def script_of_questions(questions: Sequence[TalkativeQuestion]) -> RewriteScript:
    """Demonstrations of queries that are made here."""
    return RewriteScript(questions)


def script_of_texts(config: DroppedConfig, texts: Mapping[str, Iterable[str]]) -> RewriteScript:
    """Demonstrations of the sentences of corpora.

    Args:
        texts: by collection.
    """
    sentences: dict[str, None] = {}
    limits, every = (config.most_words, config.least_words), list[str]()
    for each in texts.values():
        known = [*each]
        every += known
        for together in range(1, config.together + 1):
            sentences |= dict.fromkeys(sentences_of(known, *limits, together))
    if not sentences:
        raise InputError(
            f"no corpus has a sentence of {config.least_words} to {config.most_words} words, of "
            "which demonstrations would be; change config.dropped.least_words and most_words."
        )
    return RewriteScript([*sentences], frequent_words(every, config.frequent_from))

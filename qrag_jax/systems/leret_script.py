"""What LeReT's script demonstrates: questions of the invented world, and what queries find."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from qrag_jax.data.generators.bridge_world import BridgeQuestion
from qrag_jax.data.query_questions import of_bridge
from qrag_jax.environments.query_writing.prompt import QueryPrompt
from qrag_jax.environments.query_writing.state import Pool, QueryState
from qrag_jax.environments.query_writing.styles import (
    Start,
    StyledPlay,
    draw_styles,
    style_variants,
)
from qrag_jax.environments.tools.episode import Look
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text import prompts
from qrag_jax.rollouts.corpus_library import CorpusLibrary
from qrag_jax.rollouts.query_states import states_on
from qrag_jax.systems.leret_config import LeretConfig

_READ_FOR_TOKENIZER = 300  # demonstrations on which a tiny model's tokenizer is trained


@dataclasses.dataclass(frozen=True)
class Script:
    """Demonstrations before they are drawn.

    Attributes:
        library: what their queries search.
        demonstrated: the questions, and what the script knows of them: all of the corpus, so more
            than those that are tried, because a model that sees few names often learns them by
            heart, and not to copy. (To see none twice was worse: names were copied later.)
        prompt: the bare one and those with the marks of the styles, whatever tries are asked by.
    """

    library: CorpusLibrary
    demonstrated: Sequence[tuple[QueryState, BridgeQuestion]]
    prompt: QueryPrompt

    def starts(self, config: LeretConfig, numbers: Sequence[int], first: int) -> list[Start]:
        """The demonstrations `first`, `first` + 1 and so on, of the questions of these numbers."""
        hops = config.writing.hops
        return [
            Start(*self.demonstrated[each], draw_styles(config.styles, config.seed, draw, hops))
            for draw, each in enumerate(numbers, first)
        ]

    def play(self, config: LeretConfig) -> StyledPlay:
        """How they are played."""
        search = search_by(self.library, config.writing.k, self.demonstrated[0][0])
        return StyledPlay(search, config.writing.order, config.styles.most_words)

    def texts(self, config: LeretConfig) -> Iterator[str]:
        """The texts of the first demonstrations, prompts included."""
        few = range(min(_READ_FOR_TOKENIZER, len(self.demonstrated)))
        for hops in self.play(config).play(self.starts(config, few, 0)):
            for hop in hops:
                yield from (text for _, text in self.prompt.messages(hop.state))
                yield hop.query


def script_of(
    config: LeretConfig, made: Sequence[BridgeQuestion], library: CorpusLibrary
) -> Script:
    """Demonstrations of these questions, whose passages `library` has."""
    by_id = {each.id: each for each in made}
    states = states_on([*map(of_bridge, made)], library.corpus, config.search.gold_by).states
    words = config.writing.passage_words
    prompt = QueryPrompt(prompts.load(config.writing.prompt), style_variants(), words)
    return Script(library, [(state, by_id[state.id]) for state in states], prompt)


def search_by(library: CorpusLibrary, k: int, state: QueryState):
    """Queries → what each finds, for scripts; `state` is any question's."""

    def search(queries: Sequence[str]) -> list[Pool | Failure]:
        return library.look([(state, Look(query, k)) for query in queries])

    return search

"""Demonstrations of query writing as token episodes, one for each hop."""

from __future__ import annotations

from collections.abc import Sequence

from qrag_jax.environments.query_writing.prompt import QueryPrompt
from qrag_jax.environments.query_writing.state import Searched
from qrag_jax.environments.query_writing.styles import Written
from qrag_jax.environments.tools.episode import ToolTally
from qrag_jax.errors import InputError
from qrag_jax.rollouts.scripted_tokens import Talk, encoded
from qrag_jax.rollouts.token_episodes import Speech, TokenEpisode


def styled_episodes(
    hops: Sequence[Written], prompt: QueryPrompt, speech: Speech
) -> list[TokenEpisode]:
    """Each hop of a demonstration as an episode of one turn: its prompt, its query, the stop.

    Args:
        hops: in their order.
        prompt: with `styles.style_variants`, which the numbers of prompts mean.
        speech: between text and ids.

    Raises:
        InputError: a hop has more tokens than the policy may read or sample.
    """
    return [_episode(each, prompt, speech) for each in hops]


def _episode(hop: Written, prompt: QueryPrompt, speech: Speech) -> TokenEpisode:
    messages = prompt.messages(hop.state)
    try:
        episode = encoded(Talk(_ended(hop), ((messages, hop.query),)), speech)
    except ValueError as error:
        raise InputError(
            f"a demonstration of question {hop.state.id!r} does not fit ({error}); raise "
            "config.sampling.room, or show fewer words of passages."
        ) from None
    ((turn,),) = episode.segments
    if len(turn.sampled) > speech.turn:
        raise InputError(
            f"a demonstrated query has {len(turn.sampled)} tokens, and a turn may sample "
            f"{speech.turn}; raise that number, or lower config.styles.most_words."
        )
    return episode


def _ended(hop: Written) -> Searched:
    return Searched(
        answer=hop.query,
        seen=tuple(each.id for each in hop.found),
        tally=ToolTally(turns=1, searches=1),
        found=hop.found,
    )

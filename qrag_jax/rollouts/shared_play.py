"""Several hosts play one list of episodes: each its part, and then all have all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from qrag_jax.feedback.service import FeedbackLost
from qrag_jax.rollouts.episode_texts import from_text, to_text
from qrag_jax.rollouts.token_episodes import TokenEpisode, TokenStart
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import Stopped


def played_by_all(
    starts: Sequence[TokenStart], play: Callable[[Sequence[TokenStart]], list[TokenEpisode]]
) -> list[TokenEpisode]:
    """The episodes of these starts, in their order; all hosts call this together with the same.

    Args:
        play: plays episodes on this host alone; an episode does not depend on the others.

    Raises:
        Stopped: the run is told to stop, on this host or another.
        FeedbackLost: too many episodes of a host fail.
    """
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return play(starts)
    failure: Exception | None = None
    own = list[TokenEpisode]()
    try:
        # Neighbours stay together: those of a group have one prompt, which is read once.
        part = starts[len(starts) * index // count : len(starts) * (index + 1) // count]
        own = play(part) if part else []
    except (Stopped, FeedbackLost) as why:
        failure = why
    hosts.fail_together(failure, FeedbackLost)
    return [each for text in hosts.texts_of_each(to_text(own)) for each in from_text(text)]

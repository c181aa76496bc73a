"""Played episodes as text, for other hosts of the same run.

Documents that episodes have found stand in a table, each once: many episodes find the same ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from qrag_jax.environments.query_rewriting.task import Rewritten
from qrag_jax.environments.query_writing.state import Searched
from qrag_jax.environments.tools.episode import Closed, Document, Ended, Failed
from qrag_jax.feedback.llm import FeedbackLost
from qrag_jax.rollouts.token_episodes import TokenEpisode, TokenStart
from qrag_jax.rollouts.trajectories import segments_from_json, segments_to_json
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import Stopped
from qrag_jax.runtime.typed_json import made

_KINDS: dict[str, type] = {kind.__name__: kind for kind in (Closed, Failed, Rewritten, Searched)}
_FOUND = "found"  # the field that has documents


def to_text(episodes: Iterable[TokenEpisode]) -> str:
    """Episodes as JSON; `from_text` reads them, to the last bit."""
    table = dict[Document, int]()  # a document without its score → its number

    def number(document: Document) -> tuple[int, float]:
        return table.setdefault(document._replace(score=0.0), len(table)), document.score

    rows = [
        {
            "kind": type(each.ended).__name__,
            "ended": _fields(each.ended, number),
            "segments": segments_to_json(each.segments),
            "attempts": each.attempts,
        }
        for each in episodes
    ]
    return json.dumps({"documents": [each._asdict() for each in table], "episodes": rows})


def from_text(text: str) -> list[TokenEpisode]:
    """Reads what `to_text` gave."""
    whole = json.loads(text)
    documents = [Document(**each) for each in whole["documents"]]
    return [
        TokenEpisode(
            _ended(row["kind"], row["ended"], documents),
            segments_from_json(row["segments"]),
            row["attempts"],
        )
        for row in whole["episodes"]
    ]


def _fields(ended: Ended, number: Callable[[Document], tuple[int, float]]) -> dict[str, Any]:
    found = getattr(ended, _FOUND, None)
    fields = {
        field.name: getattr(ended, field.name)
        for field in dataclasses.fields(ended)
        if field.name != _FOUND
    }
    fields["tally"] = dataclasses.asdict(ended.tally)
    return fields if found is None else fields | {_FOUND: [number(each) for each in found]}


def _ended(kind: str, fields: Mapping[str, Any], documents: Sequence[Document]) -> Ended:
    given = {name: value for name, value in fields.items() if name != _FOUND}
    ended: Ended = made(_KINDS[kind], given)
    if not isinstance(ended, Rewritten | Searched):
        return ended
    found = tuple(documents[n]._replace(score=score) for n, score in fields[_FOUND])
    return dataclasses.replace(ended, found=found)


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

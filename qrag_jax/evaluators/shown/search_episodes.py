"""Episodes that search by queries, for the page: LeReT's hops, an agent's searches, rewritings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qrag_jax.evaluators.episode_sample import AGENTS, HOPS, REWRITES
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.metrics.agent_log import AgentRow
from qrag_jax.metrics.hop_log import Searched

MOST_NAMES = 30  # of a search that are shown
WORDS = {
    HOPS: {
        "score": "AP",
        "hops": "gold pages",
        "solved": "all gold found",
        "unsolved": "gold missing",
        "regret": "1 minus the average precision of the pool after the last hop.",
    },
    AGENTS: {
        "score": "F1",
        "hops": "searches",
        "solved": "right",
        "unsolved": "wrong",
        "regret": "1 minus the F1 of the answer; the log does not say which passages are gold.",
    },
    REWRITES: {"score": "", "hops": "", "solved": "", "unsolved": "", "regret": ""},
}

Key = tuple[str, str]


def key_of(row: Searched | AgentRow | RewriteRow) -> Key:
    """What is the same in the rows of one question in two logs."""
    if isinstance(row, RewriteRow):
        return row.collection, row.id
    return "", row.id


def search_episodes(
    kind: str, rows: Sequence[Any], before: Mapping[Key, Any]
) -> list[dict[str, Any]]:
    """The episodes of a log of this kind; `before`: the rows of the untrained model."""
    make = _MAKERS[kind]
    found = []
    for row in rows:
        episode, early = make(row), before.get(key_of(row))
        old = early and make(early)
        episode["before"] = old and {"score": old["score"], "steps": old["steps"]}
        found.append(episode)
    return found


def _hops(row: Searched) -> dict[str, Any]:
    last = row.hops[-1].scores if row.hops and not row.failed else {}
    ap, every = last.get("ap"), last.get("all_gold")
    scores = ", ".join(f"{name} {value:.3f}" for name, value in last.items())
    return {
        "id": row.id,
        "question": row.question,
        "solved": None if every is None else every == 1,
        "hops": len(row.pages),
        "score": ap,
        "regret": None if ap is None else 1 - ap,
        "facts": [
            ["question", row.question],
            ["right answer", " / ".join(row.answers)],
            ["gold pages", ", ".join(row.pages)],
            ["after the last hop", scores],
            ["id", row.id],
        ],
        "steps": [
            {
                "query": hop.query,
                "text": "",
                "told": [
                    *filter(None, [hop.outcome]),
                    *(f"{name} {value:.3f}" for name, value in hop.scores.items()),
                ],
                "names": _names(
                    [*(hop.found or ((name, None) for name in hop.pool))], set(row.pages)
                ),
            }
            for hop in row.hops
        ],
    }


def _agents(row: AgentRow) -> dict[str, Any]:
    recall = "not known" if row.recall is None else f"{row.recall:.3f}"
    return {
        "id": row.id,
        "question": row.question,
        "solved": None if row.failed else row.em == 1,
        "hops": len(row.searches),
        "score": None if row.failed else row.f1,
        "regret": None if row.failed else 1 - row.f1,
        "facts": [
            ["question", row.question],
            ["answered", row.answer or f"(no answer: {row.broken or 'it gave up'})"],
            ["right answer", " / ".join(row.golds)],
            ["recall of gold passages", recall],
            ["id", row.id],
        ],
        "steps": [
            {
                "query": str(search.get("query", "")),
                "text": _told("read as the answer of this search: ", search.get("answer")),
                "told": [str(search.get("status", ""))],
                "names": _names([(str(name), None) for name in _list(search.get("names"))], set()),
            }
            for search in row.searches
        ],
    }


def _rewrites(row: RewriteRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "question": row.original,
        "solved": None,
        "hops": None,
        "score": None,
        "regret": None,
        "facts": [
            ["original query", row.original],
            ["collection", row.collection],
            ["id", row.id],
        ],
        "steps": [
            {
                "query": row.query,
                "text": _told("the model wrote: ", row.text),
                "told": [row.outcome, f"{row.sampled} tokens"],
                "names": _names(row.found or (), set()),
            }
        ],
    }


_MAKERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    HOPS: _hops,
    AGENTS: _agents,
    REWRITES: _rewrites,
}


def _names(found: Sequence[tuple[str, float | None]], gold: set[str]) -> list[list[Any]]:
    """Names of passages with scores and gold marks; the first ones, and how many more there are."""
    shown = [[name, score, name in gold] for name, score in found[:MOST_NAMES]]
    if len(found) > MOST_NAMES:
        shown.append([f"and {len(found) - MOST_NAMES} more", None, False])
    return shown


def _told(before: str, text: Any) -> str:
    return f"{before}{text}" if isinstance(text, str) and text else ""


def _list(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else []

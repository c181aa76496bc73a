"""Episodes as Markdown, for TensorBoard's texts. All that is of data or models is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.metrics.agent_log import AgentRow
from qrag_jax.metrics.hop_log import Searched
from qrag_jax.metrics.predictions import Prediction
from qrag_jax.metrics.retrieval_log import Row

LONGEST = 300  # characters that are shown of a text
_MARKS = re.compile(r"([\\`*_{}\[\]()#+\-.!|~>])")


def markdown_of(rows: Sequence[Any]) -> str:
    """The rows of a log, one section each; each kind of row has its own form."""
    return "\n\n".join("\n".join(_FORMS[type(row)](row)) for row in rows)


def _chunks(row: Row) -> Iterator[str]:
    gold, found = set(row.sf_idx), set(row.sf_idx) & set(row.pred_idx)
    facts = f"{len(found)} of {len(gold)} facts" if gold else "facts not known"
    worth = "" if row.ret is None else f", return {row.ret:.3f}"
    yield _head(row.question)
    yield f"{facts}{worth}, answer: {_text(row.answer)}\n"
    for step, (index, text) in enumerate(zip(row.pred_idx, row.pred_texts, strict=True), start=1):
        mark = "**GOLD** " if index in gold else ""
        q = f"Q {row.q_values[step - 1]:.3f}, " if row.q_values else ""
        yield f"{step}. {mark}{q}chunk {index}: {_text(text)}"
    for index, text in zip(row.sf_idx, row.sf_texts, strict=True):
        if index not in found:
            yield f"- not found, **GOLD** chunk {index}: {_text(text)}"


def _tokens(row: Prediction) -> Iterator[str]:
    reward = "no reward" if row.reward is None else f"reward {row.reward:.3f}"
    yield _head(row.question)
    yield f"{reward}, {_text(row.trajectory['status'])}; answered: {_text(row.prediction)}; "
    yield f"right: {_text(' / '.join(row.answers))}\n"
    for number, turn in enumerate(row.turns, start=1):
        if number > 1:  # the prompt is the same in all episodes
            yield f"- tool: {_text(turn['observed'])}"
        yield f"- **model, turn {number}**: {_text(turn['sampled'])}"


def _hops(row: Searched) -> Iterator[str]:
    yield _head(row.question)
    yield f"gold pages: {_text(', '.join(row.pages))}\n"
    for number, hop in enumerate(row.hops, start=1):
        scores = ", ".join(f"{_text(name)} {value:.3f}" for name, value in hop.scores.items())
        yield f"{number}. {_text(hop.query) or '(no query)'}: {scores}"


def _agents(row: AgentRow) -> Iterator[str]:
    recall = "" if row.recall is None else f", recall {row.recall:.3f}"
    yield _head(row.question)
    yield f"EM {row.em:.0f}, F1 {row.f1:.3f}{recall}; answered: {_text(row.answer or row.broken)}; "
    yield f"right: {_text(' / '.join(row.golds))}\n"
    for number, search in enumerate(row.searches, start=1):
        names = ", ".join(map(str, search.get("names", ())))
        yield f"{number}. {_text(str(search.get('query', '')))}: {_text(names)}"


def _rewrites(row: RewriteRow) -> Iterator[str]:
    yield _head(row.original)
    yield f"{_text(row.outcome)}; searched for: {_text(row.query) or '(nothing)'}; "
    yield f"found: {_text(', '.join(row.ranking[:10])) or '(nothing)'}"


_FORMS: dict[type, Callable[[Any], Iterator[str]]] = {
    Row: _chunks,
    Prediction: _tokens,
    Searched: _hops,
    AgentRow: _agents,
    RewriteRow: _rewrites,
}


def _head(text: str) -> str:
    return f"### {_text(text)}\n"


def _text(text: str) -> str:
    """The text on one line, cut, with nothing in it that Markdown or HTML would read."""
    line = " ".join(text.split())
    line = line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
    return _MARKS.sub(r"\\\1", html.escape(line, quote=False))

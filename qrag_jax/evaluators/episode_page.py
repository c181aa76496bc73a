"""A page of HTML that shows episodes token by token: what was observed, sampled and trained.

The page needs nothing else: no scripts, no fonts, no pictures. All that comes from data and models
is escaped, and a policy in the page forbids a browser to load or run anything.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qrag_jax.metrics.predictions import Prediction

EPISODES = 100  # of one page, at most

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222; }
article { border-top: 2px solid #888; margin-top: 2em; }
h2 { font-size: 1.1em; } h3 { font-size: .9em; margin: .8em 0 .2em; color: #555; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: .4em;
  font: 13px/1.6 monospace; background: #fafafa; border-left: 4px solid #bbb; }
pre.tool { border-left-color: #3b7dd8; } pre.model { border-left-color: #2a8f4f; }
i, b { font-style: normal; font-weight: normal; border-radius: 2px; }
i { color: #666; } b.s { background: #ffd9a0; } b.t { background: #bfe8c8; }
i:hover, b:hover { outline: 1px solid #d00; }
table { border-collapse: collapse; margin: .5em 0; } td, th { padding: .1em .8em .1em 0; }
th { font-weight: normal; color: #555; text-align: left; } td { text-align: right; }
"""
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1>
<p>{about}</p>
<p><i>observed</i>: the prompt and what tools gave, <b class="s">sampled</b> by the model, <b
class="t">trained</b>: sampled, and an update would learn from it. Point at a token for its id and
its log-probability.</p>
"""


class Shown(NamedTuple):
    """An episode to show.

    Attributes:
        where: file and line.
        prediction: the episode.
        masks_truncated: whether an episode that was cut off trains nothing.
    """

    where: str
    prediction: Prediction
    masks_truncated: bool


def page(title: str, about: str, episodes: Sequence[Shown], links: Mapping[str, str]) -> str:
    """The page.

    Args:
        title, about: its heading and one sentence on what is shown.
        episodes: in their order; at most `EPISODES`.
        links: text → file name, of neighbouring pages.

    Raises:
        ValueError: there are too many episodes, or a turn has other numbers of ids and texts.
    """
    if len(episodes) > EPISODES:
        raise ValueError(f"a page has at most {EPISODES} episodes, not {len(episodes)}")
    parts = [_HEAD.format(title=_text(title), style=_STYLE, about=_text(about)), _links(links)]
    parts += [_episode(number, each) for number, each in enumerate(episodes, start=1)]
    return "".join([*parts, _links(links), "</body></html>\n"])


def trains(prediction: Prediction, masks_truncated: bool) -> bool:
    """Whether an update would learn from the sampled tokens of the episode."""
    status = prediction.trajectory["status"]
    return prediction.reward is not None and not (masks_truncated and status == "truncated")


def _episode(number: int, shown: Shown) -> str:
    each = shown.prediction
    trajectory, reward = each.trajectory, each.reward
    told = "no reward" if reward is None else f"reward {reward:.3f}"
    about = {
        "asked": each.question,
        "answered": each.prediction or "(no answer)",
        "right": " / ".join(each.answers),
        "question": f"{each.id}, {each.hops} hops, draw {each.draw}",
        "ended": _ended(trajectory),
        "from": shown.where,
    }
    turns = [turn for segment in trajectory["segments"] for turn in segment]
    kind = "t" if trains(each, shown.masks_truncated) else "s"
    body = [
        _turn(place, turn, texts, kind)
        for place, (turn, texts) in enumerate(zip(turns, each.turns, strict=True), start=1)
    ]
    return (
        f'<article id="e{number}"><h2>{number}. {told}: {_text(each.question)}</h2>'
        f"{_table(about)}{_parts(trajectory['parts'])}{''.join(body)}</article>\n"
    )


def _ended(trajectory: Mapping[str, Any]) -> str:
    facts = trajectory["facts"]
    counts = ", ".join(f"{name} {count}" for name, count in facts.get("tally", {}).items())
    lists = [f"{name} {', '.join(facts[name])}" for name in ("cited", "seen") if facts.get(name)]
    message = [facts["message"]] if "message" in facts else []
    return "; ".join([trajectory["status"], *message, counts, *lists])


def _turn(number: int, turn: Mapping[str, Any], texts: Mapping[str, Any], kind: str) -> str:
    observed = "".join(
        f'<i title="id {token}">{_token(text)}</i>'
        for token, text in zip(turn["observed"], texts["observed_tokens"], strict=True)
    )
    sampled = "".join(
        f'<b class="{kind}" title="{_hover(token, log_prob)}">{_token(text)}</b>'
        for token, log_prob, text in zip(
            turn["sampled"], turn["log_probs"], texts["sampled_tokens"], strict=True
        )
    )
    name, source = ("prompt", "prompt") if number == 1 else ("tool", "tool result")
    ended = "" if turn["finish"] == "stop" else ", cut off"
    version = f", weights {_text(turn['version'])}" if turn["version"] else ""
    return (
        f'<h3>{source}, {len(turn["observed"])} tokens</h3><pre class="{name}">{observed}</pre>'
        f"<h3>turn {number} of the model, {len(turn['sampled'])} tokens{ended}{version}</h3>"
        f'<pre class="model">{sampled}</pre>'
    )


def _hover(token: int, log_prob: float) -> str:
    return f"id {token}, log-prob {log_prob:.4f}, p {math.exp(log_prob):.4f}"


def _token(text: str) -> str:
    """A token's text; a line break is seen as well as done."""
    return _text(text).replace("\n", "↵\n") or "∅"


def _table(rows: Mapping[str, str]) -> str:
    cells = (
        f'<tr><th>{_text(name)}</th><td style="text-align: left">{_text(text)}</td></tr>'
        for name, text in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _parts(parts: Mapping[str, float]) -> str:
    if not parts:
        return ""
    heads = "".join(f"<th>{_text(name)}</th>" for name in parts)
    cells = "".join(f"<td>{value:.3f}</td>" for value in parts.values())
    return f"<table><tr>{heads}</tr><tr>{cells}</tr></table>"


def _links(links: Mapping[str, str]) -> str:
    if not links:
        return ""
    each = (f'<a href="{_text(file)}">{_text(text)}</a>' for text, file in links.items())
    return f"<p>{' · '.join(each)}</p>\n"


def _text(text: str) -> str:
    return html.escape(text, quote=True)

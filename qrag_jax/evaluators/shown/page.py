"""One file of HTML that shows runs: curves and episodes, with a script of its own and no network.

The data stand in the page as JSON. The script makes elements of them and sets their texts, so
nothing of data or models is read as HTML. A policy in the page lets a browser run this one script,
known by its digest, and load nothing.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

_SCRIPTS = ("elements.js", "curves.js", "tokens.js", "episodes.js")
# `<` and `>` would end the element that holds the data, or begin a comment in it; the last two are
# line ends of older JavaScript.
_ESCAPED = {each: f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}


@dataclasses.dataclass(frozen=True)
class Curve:
    """A metric of a run.

    Attributes:
        name: as `metrics.jsonl` has it.
        steps, values: its points.
        thinned: whether there were more points.
    """

    name: str
    steps: list[int]
    values: list[float]
    thinned: bool = False


@dataclasses.dataclass(frozen=True)
class ShownRun:
    """A run.

    Attributes:
        name: shown in legends.
        system: its name; "" if it is not known.
        curves: its metrics.
        notes: sentences on what is not here.
    """

    name: str
    system: str
    curves: tuple[Curve, ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Section:
    """The episodes of a log.

    Attributes:
        kind: one of `episode_sample.KINDS`.
        title: its heading.
        notes: sentences on what is shown and what is not.
        words: of this kind: `score`, `hops`, `solved` and `unsolved` name what these mean, `regret`
            says how it is defined ("": there is none).
        episodes: as the script takes them, see `chunk_episodes`, `token_episodes` and
            `search_episodes`.
        texts: texts that episodes name by their numbers.
        tokens: ids and texts of tokens that episodes name by their numbers.
    """

    kind: str
    title: str
    notes: tuple[str, ...]
    words: dict[str, str]
    episodes: list[dict[str, Any]]
    texts: list[str] = dataclasses.field(default_factory=list)
    tokens: list[tuple[int, str]] = dataclasses.field(default_factory=list)


def page(title: str, about: str, runs: Sequence[ShownRun], sections: Sequence[Section]) -> bytes:
    """The page, in UTF-8.

    Args:
        title, about: its heading, and a sentence below it.
        runs: whose curves are drawn together.
        sections: one below the other.

    Raises:
        ValueError: a number is not finite.
    """
    style, script = _file("page.css"), "".join(map(_file, _SCRIPTS))
    whole = {"about": about, "runs": [dataclasses.asdict(run) for run in runs]}
    data = [_data("data-runs", whole)]
    for number, section in enumerate(sections):
        fields = dict(vars(section))  # not `asdict`, which would copy all episodes
        data.append(_data(f"data-section-{number}", fields))
    text = _file("page.html").format(
        title=html.escape(title),
        style=style,
        style_hash=_digest(style),
        script=script,
        script_hash=_digest(script),
        data="\n".join(data),
    )
    return text.encode("utf-8", "replace")  # half a surrogate pair is no text


def _data(name: str, value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escaped in _ESCAPED.items():
        text = text.replace(character, escaped)
    return f'<script type="application/json" id="{name}">{text}</script>'


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _file(name: str) -> str:
    return (resources.files("qrag_jax.evaluators.shown") / name).read_text(encoding="utf-8")

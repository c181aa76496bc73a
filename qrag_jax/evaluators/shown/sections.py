"""Reads the logs of runs and makes the parts of the page: curves, and sections of episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.evaluators.episode_sample import AGENTS, CHUNKS, REWRITES, TOKENS, spread
from qrag_jax.evaluators.shown.chunk_episodes import ChunkEpisodes
from qrag_jax.evaluators.shown.page import Curve, Section, ShownRun
from qrag_jax.evaluators.shown.places import STEP_0, UNTRAINED, Log, Place
from qrag_jax.evaluators.shown.rows import SAMPLE, Rows, read_lines, read_rows, read_sample
from qrag_jax.evaluators.shown.search_episodes import WORDS, key_of, search_episodes
from qrag_jax.evaluators.shown.token_episodes import TokenEpisodes
from qrag_jax.metrics.regret import BestReturn

_MASKED = "masked"  # `rollouts.trajectories.MASKED`, whose module brings jax
_NAMED = 6  # other logs that a note names
_LOST = "What would have been taken before training is not here: "


def run_of(place: Place) -> ShownRun:
    """The run with its curves."""
    system = place.config.get("system", "q_rag" if "pqn" in place.config else "")
    name, notes = place.name, []
    if place.metrics is None:
        notes.append(f"{place.path} has no metrics of a training, so there are no curves.")
        return ShownRun(name, str(system), (), tuple(notes))
    lines, broken = read_lines(place.metrics)
    curves = curves_of(lines)
    if broken:
        notes.append(f"{_count(broken, 'broken line')} of {place.metrics} skipped.")
    if not curves:
        notes.append(f"{place.metrics} holds no numbers yet.")
    if any(curve.thinned for curve in curves):
        notes.append(f"Curves are drawn with {POINTS} of their points, spread evenly.")
    if place.log is None:
        notes.append(
            "There are curves alone: the run has no log of episodes; qrag evaluate writes one, and "
            "so does a training with config.train.log_episodes above 0."
        )
    return ShownRun(name, str(system), curves, tuple(notes))


def section_of(place: Place, most: int) -> Section | None:
    """The episodes of a run; None: it has none.

    Args:
        most: episodes to show, spread evenly over the log; 0: all.
    """
    if place.log is None:
        return None
    rows, before, notes = _read(place.log)
    shown = rows.rows
    if 0 < most < len(shown):
        shown = [shown[at] for at in spread(len(shown), most)]
        notes.append(f"Shown are {len(shown)} of {len(rows.rows)} episodes, spread evenly.")
    if place.others:
        named = ", ".join(map(str, place.others[:_NAMED]))
        more = f" and {len(place.others) - _NAMED} more" if len(place.others) > _NAMED else ""
        notes.append(f"Other logs of this run, each shown by qrag show FILE: {named}{more}.")
    title = f"{place.name}: {_label(place.log, rows)}"
    settings = place.settings
    return make_section(rows.kind, title, shown, before=before, notes=notes, settings=settings)


def make_section(
    kind: str,
    title: str,
    rows: Sequence[Any],
    *,
    before: Sequence[Any] = (),
    notes: Sequence[str] = (),
    settings: Mapping[str, Any],
) -> Section:
    """A section of these rows, which are of the class of their kind's log.

    Args:
        before: rows of the untrained weights.
        settings: fields of the config by dotted names.
    """
    notes = [*notes]
    texts: list[str] = []
    tokens: list[tuple[int, str]] = []
    if kind == CHUNKS:
        chunks = ChunkEpisodes(BestReturn.of(settings))
        episodes = chunks.of(rows, {row.id: row for row in before})
        texts, words = chunks.texts, chunks.words
        steps = settings.get("env.max_steps")
        if isinstance(steps, int) and (beyond := sum(len(set(row.sf_idx)) > steps for row in rows)):
            notes.append(
                f"{_count(beyond, 'question')} of {len(rows)} could never be solved, with more "
                f"supporting facts than steps (config.env.max_steps={steps})."
            )
        without = sum(not row.q_values and bool(row.pred_idx) for row in rows)
        if without:
            notes.append(f"{_count(without, 'episode')} without Q-values: the log has none.")
    elif kind == TOKENS:
        turns = TokenEpisodes()
        early = {(row.id, row.draw): row for row in before}
        masks = settings.get("tools.truncated") == _MASKED
        episodes = turns.of(rows, early, masks_truncated=masks)
        tokens, words = turns.tokens, turns.words
        notes.append(
            "Underlined with dots: sampled by the model. Underlined: sampled, and an update would "
            "learn from it. Not underlined: observed, which no update learns from."
        )
    else:
        episodes = search_episodes(kind, rows, {key_of(row): row for row in before})
        words = WORDS[kind]
        if kind == AGENTS:
            notes.append("Gold passages are not marked: the log does not name them.")
        elif kind == REWRITES:
            notes.append(
                "Nothing is marked as solved and there is no regret: the log has no scores."
            )
    alone = sum(episode["before"] is None for episode in episodes) if before else 0
    if alone:
        notes.append(f"{_count(alone, 'episode')} without an episode before training.")
    return Section(kind, title, tuple(notes), words, episodes, texts, tokens)


def _read(log: Log) -> tuple[Rows, list[Any], list[str]]:
    """The rows of a log, those of the untrained weights, and what is to be said of them."""
    if log.kind == SAMPLE:
        return _read_sample(log.path)
    rows = read_rows(log.path, log.kind)
    notes = [f"Log: {log.path}, {_count(len(rows.rows), 'episode')}.", *_skipped(rows, log.path)]
    if log.path.parent.name in (UNTRAINED, STEP_0):
        return rows, [], [*notes, "These are episodes of the untrained weights."]
    if log.before is None:
        notes.append(f"{_LOST}no log of the untrained weights is beside this one (qrag evaluate).")
        return rows, [], notes
    before = read_rows(log.before, log.kind)
    notes += [f"Before training: {log.before}.", *_skipped(before, log.before)]
    return rows, before.rows, notes


def _read_sample(path: Path) -> tuple[Rows, list[Any], list[str]]:
    steps = read_sample(path)
    if not steps:
        rows = Rows(CHUNKS, [], 0)
        return rows, [], [f"{path} holds no episode that can be read."]
    rows, first = steps[-1], steps[0]
    notes = [
        f"A sample kept in training: {path}, of step {rows.step} "
        f"({_count(len(rows.rows), 'episode')}); qrag evaluate writes all.",
        *_skipped(rows, path),
    ]
    if first.step == 0 != rows.step and first.kind == rows.kind:
        notes.append("Before training: the sample of step 0.")
        return rows, first.rows, notes
    notes.append(f"{_LOST}the sample has no other step than {rows.step}, or none of step 0.")
    return rows, [], notes


def _skipped(rows: Rows, path: Path) -> list[str]:
    return [f"{_count(rows.broken, 'broken line')} of {path} skipped."] if rows.broken else []


def _label(log: Log, rows: Rows) -> str:
    if log.kind == SAMPLE:
        return "episodes" if rows.step is None else f"episodes of step {rows.step}"
    own = log.path.parent.name
    return f"episodes of {own}/{log.path.name}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


POINTS = 400  # of one curve, at most


def curves_of(lines: Sequence[Mapping[str, float]]) -> tuple[Curve, ...]:
    """All metrics that have a finite value, each with at most `POINTS` of its points.

    Args:
        lines: with `step`, oldest first, as `read_metrics` gives them. Of a step that was written
            twice the later value counts.
    """
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and math.isfinite(value):
                found.setdefault(name, {})[int(line["step"])] = float(value)
    return tuple(_curve(name, points) for name, points in found.items())


def _curve(name: str, points: Mapping[int, float]) -> Curve:
    steps = sorted(points)
    kept = steps
    if len(steps) > POINTS:
        kept = [steps[n] for n in np.linspace(0, len(steps) - 1, POINTS).round().astype(int)]
    values = [float(f"{points[step]:.6g}") for step in kept]
    return Curve(name, kept, values, thinned=len(kept) < len(steps))

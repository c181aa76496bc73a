"""What folders of runs hold for people: a table of predictions, curves, a page of episodes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.evaluators.episode_sample import TOKENS, spread
from qrag_jax.evaluators.shown.page import page
from qrag_jax.evaluators.shown.sections import make_section
from qrag_jax.metrics import prediction_scores, predictions
from qrag_jax.metrics.predictions import ScoredEpisode
from qrag_jax.runtime import bounded_json
from qrag_jax.runtime.curve import plot_curve
from qrag_jax.runtime.saved_config import flat
from qrag_jax.runtime.whole_files import reason, write_whole
from qrag_jax.runtime.writers import METRICS_NAME, read_metrics

SUMMARY, TABLE, PAGE = "summary.json", "table.txt", "episodes.html"


@dataclasses.dataclass(frozen=True)
class Found:
    """What there is to show.

    Attributes:
        predictions: files of predictions.
        summaries: those of evaluations with tools.
        metrics: logs of trainings.
    """

    predictions: tuple[Path, ...]
    summaries: tuple[Path, ...]
    metrics: tuple[Path, ...]


def find(places: Sequence[Path]) -> Found:
    """All that is in these folders, or in folders below them; a place may also be one file."""
    found: list[list[Path]] = [[], [], []]
    for place in places:
        if not place.exists():
            raise InputError(f"{place} does not exist; give a folder of a run or of predictions.")
        files = [place] if place.is_file() else sorted(place.rglob("*.json*"))
        own = (
            [file for file in files if predictions.read_record(file) is not None],
            [file for file in files if file.name == SUMMARY and _summary(file)],
            [file for file in files if file.name == METRICS_NAME],
        )
        if not any(own):
            raise InputError(
                f"{place} holds no predictions, no evaluation with tools and no {METRICS_NAME}; "
                "give a folder of `qrag train`, `qrag predict` or `qrag evaluate`."
            )
        for whole, part in zip(found, own):
            known = {os.path.realpath(file) for file in whole}
            whole += [file for file in part if os.path.realpath(file) not in known]
    return Found(*map(tuple, found))


def table(found: Found) -> list[str]:
    """Scores of all predictions, and of evaluations whose predictions are not here."""
    if not (found.predictions or found.summaries):
        return []
    groups: dict[str, dict[str, Any]] = {}  # what each is called → its scores by groups
    for file in found.predictions:
        record = predictions.read_record(file) or {}
        label = f"{file}: {record.get('checkpoint')}, {record.get('retriever')}"
        groups[label] = prediction_scores.summarised(predictions.read_scores(file))
    here = {os.path.realpath(file) for file in found.predictions}
    for file in found.summaries:
        for (retriever, told), (scores, path) in _summary(file).items():
            if path not in here:
                groups[f"{file}: {told}, {retriever}"] = scores
    base = os.path.commonpath([str(each.parent) for each in (*found.predictions, *found.summaries)])
    lines, after = [], []
    for label, scores in groups.items():
        cells, shown = prediction_scores.score_lines(scores), label.removeprefix(f"{base}{os.sep}")
        cells[0][0] = shown
        lines += cells
        of_draws = prediction_scores.draws_text(scores[prediction_scores.ALL])
        after += [f"{shown}: {line}" for line in of_draws]
    return [*prediction_scores.table(lines), *after]


def write_curves(found: Found, out: Path) -> list[Path]:
    """The learning curve of each training, as a PNG."""
    names = _names([file.parent.resolve() for file in found.metrics])
    written = []
    for file, name in zip(found.metrics, names, strict=True):
        written.append(out / f"curve-{name}.png")
        plot_curve(read_metrics(file), written[-1], name)
    return written


def write_page(found: Found, out: Path, most: int) -> Path | None:
    """A page of episodes, those with the highest reward of each file first; None: there are none.

    Args:
        most: episodes to show, spread evenly over the rewards of all files; 0: all.
    """
    episodes: list[tuple[Path, ScoredEpisode]] = []
    for file in found.predictions:
        episodes += [(file, each) for each in predictions.read_scores(file)]
    if not episodes:
        return None
    episodes.sort(key=lambda each: -np.inf if each[1].reward is None else each[1].reward)
    episodes.reverse()
    chosen = [episodes[place] for place in spread(len(episodes), most or len(episodes))]
    sections = []
    for file in found.predictions:
        own = [each for other, each in chosen if other == file]
        rows = [predictions.read_at(file, each.offset) for each in own]
        config = (predictions.read_record(file) or {}).get("config")
        settings = flat(config) if isinstance(config, dict) else {}
        notes = [f"{len(own)} of this file's episodes are shown, by their rewards."]
        section = make_section(TOKENS, str(file), rows, notes=notes, settings=settings)
        sections.append(section)
    about = f"{len(chosen)} of {len(episodes)} episodes, spread evenly over their rewards."
    write_whole(out / PAGE, page("Episodes", about, [], sections))
    return out / PAGE


def _summary(file: Path) -> dict[tuple[str, str], tuple[dict[str, Any], str]]:
    """The scores of an evaluation with tools and its files; {}: it is another one's summary."""
    try:
        summary = bounded_json.load(file, finite=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file} is no summary of an evaluation ({reason(error)}); give `qrag evaluate` "
            "again, or delete it."
        ) from None
    if not isinstance(summary, dict) or not {"scores", "files", "main"} <= summary.keys():
        return {}
    return {
        (retriever, checkpoint): (
            groups,
            os.path.realpath(file.parent / summary["files"][retriever][checkpoint]),
        )
        for retriever, checkpoints in summary["scores"].items()
        for checkpoint, groups in checkpoints.items()
    }


def _names(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: its own, with a number where another has the same."""
    names: list[str] = []
    for folder in folders:
        name, number = folder.name, 2
        while name in names:
            name, number = f"{folder.name}-{number}", number + 1
        names.append(name)
    return names

"""Shows runs on one page of HTML: learning curves, and what each episode did, step by step.

    qrag show runs/one runs/other --out=both.html

A run is its folder, or one log in it. Of a folder the page has the learning curves and the newest
log of its evaluations; without one, the sample of episodes that its training kept. The page needs
no server or network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.evaluators import evaluation
from qrag_jax.metrics.row_log import object_in, read_record
from qrag_jax.runtime import commandline, config_fields, whole_files
from qrag_jax.runtime.writers import EPISODES_NAME, METRICS_NAME, read_metrics

POINTS = 400  # of one curve, at most

Data = dict[str, Any]  # as the page's script takes it
RUNS: list[str] = []  # the words that are no flags


def define_flags(argv: Sequence[str]) -> None:
    flags.DEFINE_string("out", None, "File to write; default RUN/show.html of the first RUN.")
    most = "Episodes shown of each log, spread evenly over it; 0: all."
    flags.DEFINE_integer("episodes", 10_000, most, lower_bound=0)


def main() -> int:
    if not RUNS:
        raise InputError("give the folder of a run, or a log in it, for example runs/quickstart.")
    paths = [*{os.path.realpath(run): Path(run) for run in RUNS}.values()]
    first = paths[0] / "show.html" if paths[0].is_dir() else paths[0].with_name("show.html")
    out = Path(flags.FLAGS.out or first)
    runs, sections = zip(*(shown(path, flags.FLAGS.episodes) for path in paths), strict=True)
    with_episodes = [section for section in sections if section is not None]
    title = ", ".join(dict.fromkeys(run["title"] for run in runs))
    episodes = sum(len(e["episodes"]) for e in with_episodes)
    about = f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {episodes} episodes."
    html_page = page(title, about, runs, with_episodes)
    with whole_files.writing(out, "--out"):
        whole_files.write_whole(out, html_page)
    for part in (*runs, *with_episodes):
        for note in part["notes"]:
            print(f"{part['title']}: {note}")
    print(f"{out}: {about} {len(html_page) / 2**20:.1f} MiB")
    return 0


def shown(path: Path, most: int) -> tuple[Data, Data | None]:
    """A run (its folder, or a log in it) with its curves; and its episodes, so many (0: all)."""
    if not path.exists():
        raise InputError(f"{path} does not exist; {evaluation.GIVE}.")
    parents, log = path.absolute().parents, path
    folder = next((f for f in parents if (f / METRICS_NAME).is_file()), path.parent)
    if path.is_dir():
        folder, log = path, evaluation.newest_log(path) or path / EPISODES_NAME
    has_log = evaluation.kind_of(log) or "row" in evaluation.first_record(log)
    metrics, notes = folder / METRICS_NAME, list[str]()
    if not has_log and (path.is_file() or not metrics.is_file()):
        raise InputError(
            f"{path} has no {METRICS_NAME}, {EPISODES_NAME} or evaluation; {evaluation.GIVE}."
        )
    curves = curves_of(read_metrics(metrics)) if metrics.is_file() else []
    if not curves:
        notes.append(f"There are no curves: {folder} has no metrics yet.")
    elif not has_log:
        notes.append(
            "The page has curves only, since the run has no log of episodes; qrag evaluate writes "
            "one, and so does a training with config.train.log_episodes above 0."
        )
    config, name = object_in(folder / config_fields.CONFIG_NAME), folder.resolve().name
    system = str(config.get("system", ""))
    run = {"title": name, "system": system, "curves": curves, "notes": notes}
    return run, _section(path, name, config_fields.flat(config), log, most) if has_log else None


def curves_of(lines: Sequence[Mapping[str, float]]) -> list[Data]:
    """All metrics that have a finite value, each with at most `POINTS` of its points."""
    by_name: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and math.isfinite(value):
                by_name.setdefault(name, {})[int(line["step"])] = float(f"{value:.6g}")
    curves = []
    for name, points in by_name.items():
        ordered = sorted(points)
        steps = [ordered[at] for at in evaluation.spread(len(ordered), POINTS)]
        curves.append({"name": name, "steps": steps, "values": [points[step] for step in steps]})
    return curves


def _section(path: Path, name: str, settings: dict[str, Any], log: Path, most: int) -> Data:
    """The episodes of a log, spread evenly."""
    early, untrained = None, log.parent.name in evaluation.UNTRAINED
    if kind := evaluation.kind_of(log):
        # The log of the untrained weights that goes with this one.
        places = [log.parent.parent / "untrained" / log.name, log.parent / "untrained.jsonl"]
        others = (file for file in places if not untrained and file.is_file() and file != log)
        label, early = f"{log.parent.name}/{log.name}", next(others, None)
        read = evaluation.KINDS[kind][0].read
        rows, before = read(log), read(early) if early else []
    else:
        kind, label, rows, before = _read_sample(log)
    notes = [f"Log: {log}."] + [f"Before training: {early}."] * bool(early)
    if not untrained and not before:
        notes.append("There is no log of the untrained weights; qrag evaluate writes one.")
    if 0 < most < len(rows):
        notes.append(f"Shown are {most} of {len(rows)} episodes, spread evenly.")
        rows = [rows[at] for at in evaluation.spread(len(rows), most)]
    if further := sorted({*evaluation.logs_of(path)} - {log, early}):
        notes.append(f"Not shown: {len(further)} other logs (qrag show FILE), as {further[0]}.")
    # The record next to a log says what it was made with, by names with dots or as a section.
    recorded = config_fields.flat(read_record(log)).items()
    settings |= {n.removeprefix("config."): v for n, v in recorded if n.startswith("config.")}
    words = evaluation.words_of(kind)
    return {
        "kind": kind,
        "title": f"{name}: episodes of {label}",
        "notes": [*filter(None, [*notes, words["note"]])],
        "words": words,
        "episodes": evaluation.episodes_of(kind, rows, before, settings),
    }


def _read_sample(path: Path) -> tuple[str, str, list[Any], list[Any]]:
    """Of the newest step: the kind of rows, the step, its rows and those of step 0."""
    *lines, _ = path.read_bytes().split(b"\n")  # the last line may be being written
    kept = [json.loads(line) for line in lines]
    kind, last = next(((line["kind"], line["step"]) for line in reversed(kept)), ("chunks", 0))

    def at(step: int) -> list[Any]:
        rows = [line["row"] for line in kept if line["step"] == step]
        return [evaluation.KINDS[kind][0].parsed_row(row, str(path)) for row in rows]

    return kind, f"step {last}", at(last), at(0) if last else []


# ------------------------------------------------------------------------------ the page
# The data stand in the page as JSON. The script makes elements of them and sets their texts, so
# nothing of data or models is read as HTML. A policy in the page lets a browser run this one
# script, known by its digest, and load nothing.


def page(title: str, about: str, runs: Sequence[Data], sections: Sequence[Data]) -> bytes:
    """The page, in UTF-8: the curves of all runs together, and one section below the other."""
    whole = {"about": about, "runs": runs, "sections": sections}
    compact: Data = {"separators": (",", ":"), "default": vars}  # episodes and steps
    data = json.dumps(whole, ensure_ascii=False, allow_nan=False, **compact)
    # The first ones would end the element that holds the data, or begin a comment in it; the last
    # two are line ends of older JavaScript.
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    files = resources.files("qrag_jax.evaluators")
    html_page, style, script = (
        (files / f"run_page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    parts = {"style": style, "script": script, "title": html.escape(title), "data": data}
    hashes = (hashlib.sha256(text.encode()).digest() for text in (style, script))
    digests = [f"sha256-{base64.b64encode(h).decode()}" for h in hashes]
    # Half a surrogate pair is no text.
    return html_page.format(*digests, **parts).encode("utf-8", "replace")


if __name__ == "__main__":
    commandline.run(main, define=define_flags, words=RUNS)

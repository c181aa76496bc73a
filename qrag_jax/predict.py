"""Lets a language model answer with tools, or write queries, and writes what it did.

    qrag predict --workdir=runs/rlvr-quick
    qrag predict --config=configs/rlvr.py:smol --out=untrained.jsonl

The file has one JSON line for each question and draw: the ids that were observed and sampled with
their log-probabilities, the text of each turn, the parts of the reward and the reward. Give the
same command again to go on after a stop. `qrag evaluate` scores a run, `qrag show` shows files.

Of a query writer (LeReT), a line has the queries of a question, and its passages hop by hop. Of a
query rewriter (DeepRetrieval), a line has the original query, what the model wrote, the query that
was read from it and what that found; --questions=queries.txt gives others.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.models.first_language_model import FOLDER
from qrag_jax.runtime import commandline
from qrag_jax.runtime.whole_files import writing
from qrag_jax.systems import run_flags, scoring
from qrag_jax.systems.config import ALL

SAMPLES = flags.DEFINE_integer("samples", 0, "Questions to ask, 0 for all.", lower_bound=0)
SAMPLED = flags.DEFINE_integer(
    "sampled", 0, "Episodes drawn for each question; 0: one, as config.eval.greedy says.", 0
)
QUESTIONS = flags.DEFINE_string(
    "questions",
    None,
    "Questions: bridge, or path,config,split;…; default config.questions.dev. Of DeepRetrieval: "
    "file of queries, .txt, .json or .jsonl; default config.queries.test.",
)
RETRIEVER = flags.DEFINE_string("retriever", None, "Default config.search.engine.")
OUT = flags.DEFINE_string("out", None, "File to write, or to go on with: NAME.jsonl.")
RESTART = flags.DEFINE_bool("restart", False, "Throw the file away instead of going on with it.")


def define_flags(argv: Sequence[str]) -> None:
    run_flags.define(argv, "predict", scoring.CHECKPOINTS, or_experiment=True)


def main() -> int:
    workdir, config = _config()
    file = Path(OUT.value) if OUT.value else None
    if file and file.suffix != ".jsonl":
        raise InputError(f"--out={file} is not named as JSON lines; give a name.jsonl.")
    folder, draws = workdir or _own_folder(Path(str(file))), SAMPLED.value or 1
    kind, options = systems.kind(config), scoring.ScoreOptions("", sampled=SAMPLED.value)
    asked = {"folder": folder, **_asked(kind, workdir, config, file)}
    opened = scoring.open_predictor(kind, config, workdir, options, **asked)
    with writing(file or folder, "--out"), opened as player:
        weights = player.weights(flags.FLAGS.checkpoint if workdir else scoring.FIRST)
        name = "-".join(filter(None, (weights.name, player.name)))
        out = file or folder / "predictions" / f"{name}.jsonl"
        how: Any = (out, player.way(weights), player.stop)
        status = scoring.resumable(lambda: player.into(*how, restart=RESTART.value), str(out))
    if status:
        return status
    count = len(player.asked)
    print(f"{count * draws} rows of {count} questions, {weights.label}: {out}")
    for line in player.system.without_result(player.rows.read(out)):
        print(line)
    return 0


def _asked(kind: Any, workdir: Path | None, config: ConfigDict, out: Path | None) -> dict[str, Any]:
    """Which questions are asked; if they are others than the run's, also what they search."""
    asked, fields = dict[str, Any](), kind.OF_QUESTIONS if kind.SEARCH else ()
    if QUESTIONS.value and (asked := kind.listed(QUESTIONS.value)):
        fields = ()
        if out is None:
            raise InputError("give the file to write, for example --out=rewritten.jsonl.")
    if workdir and scoring.are_others(workdir, config, fields, out) and out:
        asked["search"] = out.with_suffix(".search")
    return asked


def _config() -> tuple[Path | None, ConfigDict]:
    """The run's folder and the config, with the questions and the retriever of the command line."""
    workdir, config = run_flags.experiment_or_run("predict")
    if not workdir and not OUT.value:
        raise InputError("give the file to write, for example --out=predictions.jsonl.")
    run_flags.refuse_flags(("sampled", "retriever"), config.system)
    config = config.copy_and_resolve_references()
    config.eval.samples = SAMPLES.value
    if "part" in config.eval:
        config.eval.part = ALL
    if QUESTIONS.value and "questions" in config:
        config.questions.dev = QUESTIONS.value
    if RETRIEVER.value:
        config.search.engine = RETRIEVER.value
    return workdir, config


def _own_folder(out: Path) -> Path:
    """Where a tiny model is made that no run has; one of an earlier file is deleted."""
    folder = out.with_suffix(".files")
    if RESTART.value or not out.exists():
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
    return folder


if __name__ == "__main__":
    commandline.run(main, define=define_flags)

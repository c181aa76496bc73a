"""A tiny run of DeepRetrieval, and collections for it whose queries have the same ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.entry_points import Commands

SCRIPT, RL, QUERIES = 60, 2, 6
STEPS = SCRIPT + RL
TINY = (
    "--config=configs/deepretrieval.py:tiny",
    "--config.model.tiny.layers=1",
    "--config.model.tiny.copies=False",
    "--config.model.tiny.hidden=32",
    "--config.model.tiny.intermediate=32",
    "--config.model.tiny.vocab=420",
    "--config.queries.held_out=2",
    f"--config.queries.made_test={QUERIES}",
    "--config.writing.query_tokens=64",
    f"--config.script.steps={SCRIPT}",
    "--config.script.learning_rate=0.02",
    "--config.styles.entity=0.8",
    "--config.styles.copy=0",
    "--config.styles.no_stop_words=0.2",
    "--config.styles.some_words=0",
    "--config.styles.wrong_clause=0",
    f"--config.train.steps={RL}",
    "--config.eval.greedy=False",
    "--config.train.eval_every=1000",
    "--config.optimizer.matrices=adam",
)


def train(commands: Commands, workdir: Path) -> Path:
    """Trains it; returns its folder."""
    commands.succeed("train", *TINY, f"--workdir={workdir}")
    return workdir


def collection(folder: Path, documents: Mapping[str, str], queries: Mapping[str, str]) -> Path:
    """A folder in BEIR's layout; the query `n` is judged by the document `n`."""
    folder.mkdir(parents=True)
    rows = [{"_id": name, "title": "", "text": text} for name, text in documents.items()]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"_id": name, "text": text} for name, text in queries.items()]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "qrels_dev.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"{name}\t{name}\t1\n" for name in queries)
    )
    return folder

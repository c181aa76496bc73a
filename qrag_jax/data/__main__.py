"""Checks a data file before training: qrag data --source S --path P.

With --out=FILE.jsonl the usable records are also written in the neutral schema of
`data.sources`, one JSON object a line.

The exit status is 0 if every record is usable (mended records count as usable), 1 if some are
skipped, and 2 if nothing can be read or written. For the source babilong all story files of a
folder are checked, and one bad line gives status 2.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from absl import flags

from qrag_jax.data.long_docs import TASKS, find_story_file, read_stories
from qrag_jax.data.reading import load_samples
from qrag_jax.data.sample import Split
from qrag_jax.data.sources import BABILONG, SOURCES, Columns, neutral_record
from qrag_jax.errors import InputError
from qrag_jax.runtime import commandline, whole_files

SOURCE = flags.DEFINE_string("source", "", f"Layout: {', '.join((*SOURCES, BABILONG))}.")
PATH = flags.DEFINE_string("path", "", "Data file or folder; of own: or hub:NAME.")
SPLIT = flags.DEFINE_enum("split", "train", ["train", "dev"], "Which part.")
COLUMNS = flags.DEFINE_string("columns", "", "Of own: FIELD=NAME,…, such as question=query.")
OUT = flags.DEFINE_string("out", "", "File to write in the neutral schema, NAME.jsonl.")


def main() -> int:
    split: Any = SPLIT.value
    if not (SOURCE.value and PATH.value):
        raise InputError("give --source=LAYOUT and --path=FILE_OR_FOLDER.")
    if OUT.value and not OUT.value.endswith(".jsonl"):
        raise InputError(f"--out is {OUT.value!r}; give a name that ends in .jsonl")
    if SOURCE.value == BABILONG:
        _check_stories(Path(PATH.value), split)
        return 0
    columns = Columns.parse(COLUMNS.value)
    samples, report = load_samples(SOURCE.value, PATH.value, split, columns=columns)
    if OUT.value:
        out = Path(OUT.value)
        if any(out.absolute() == Path(file).absolute() for file in report.files):
            raise InputError(f"--out is {out}, which is read; give another name")
        rows = (json.dumps(neutral_record(s), ensure_ascii=False) for s in samples)
        with whole_files.writing(out, "--out"):
            whole_files.write_whole(out, "".join(f"{row}\n" for row in rows))
    for file in report.files:
        print(f"file     {file}")
    print(f"records  {report.read} read, {report.kept} kept, {report.read - report.kept} skipped")
    for what, counts in (("skipped ", report.skipped), ("mended  ", report.mended)):
        for reason, count in counts.items():
            print(f"{what} {count} {reason}, the first at {report.first[reason]}")
    print(_spread("chunks per question", [len(sample.chunks) for sample in samples]))
    facts = [len(sample.support) for sample in samples if sample.support]
    if without := len(samples) - len(facts):
        print(f"questions without supporting facts: {without}")
    if facts:
        print(_spread("supporting facts per question", facts))
        if split == "train":
            print(f"steps that solve all: {max(facts)} (config.env.max_steps)")
    if without := sum(not sample.answers for sample in samples):
        print(f"questions without answers: {without}")
    words = [len(chunk.split()) for sample in samples for chunk in sample.chunks]
    print(_spread("words per chunk", words))
    return 1 if report.skipped else 0


def _check_stories(folder: Path, split: Split) -> None:
    """Reads the story files of all tasks, and prints what is in them."""
    pairs = [find_story_file(folder, task, split) for task in TASKS]
    files = [pair[0] for pair in pairs if pair is not None]
    if not files:
        raise InputError(f"the folder {folder} has no bAbI {split} file; put qa1_{split}.txt there")
    for file in files:
        stories = read_stories(file)
        print(f"file     {file}")
        print(f"records  {len(stories)} questions")
        print(_spread("facts per question", [len(s.chunks) for s in stories]))
        print(_spread("supporting facts per question", [len(s.support) for s in stories]))


def _spread(what: str, counts: list[int]) -> str:
    middle = statistics.median(counts)
    return f"{what}: min {min(counts)}, median {middle:g}, max {max(counts)}"


if __name__ == "__main__":
    commandline.run(main)

"""Splits evaluation questions into two halves: one selects the checkpoint, one is reported.

A checkpoint's score is too optimistic on the questions that selected it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.data.files.records import read_records, split_files
from qrag_jax.data.sources.registry import SOURCES
from qrag_jax.runtime.digests import half


class Halves(NamedTuple):
    """Files of records; `train` has no question of the other two files."""

    train: Path
    selects: Path
    reported: Path


def write_halves(source: str, folder: Path, out: Path) -> Halves:
    """Writes three files of a data folder's records: "train", half 0 and half 1 of "dev".

    Training questions that are also in "dev", in either half, are left out.

    Raises:
        InputError: `folder` has no files of a split, or one cannot be read.
    """
    files = Halves(*(out / f"{source}-{name}.jsonl" for name in ("train", "half0", "half1")))
    dev = list(_records(source, folder, "dev"))
    asked = {record["question"] for record in dev}
    train = (r for r in _records(source, folder, "train") if r.get("question") not in asked)
    out.mkdir(parents=True, exist_ok=True)
    _write(files.train, train)
    for number, path in enumerate((files.selects, files.reported)):
        _write(path, (record for record in dev if half(_id(record)) == number))
    return files


def _records(source: str, folder: Path, split: str) -> Iterable[dict[str, Any]]:
    for path in split_files(folder, split, SOURCES[source].OFFICIAL[split]):
        yield from (record for _, record in read_records(path))


def _id(record: dict[str, Any]) -> str:
    return str(record.get("_id") or record["id"])


def _write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    building = path.with_suffix(".partial")
    with building.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    os.replace(building, path)

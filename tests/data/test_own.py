"""Data of one's own: the neutral schema, other names of its fields, and what is wrong with it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.config import DataConfig
from qrag_jax.data.loading import load_split
from qrag_jax.data.reading import load_samples
from qrag_jax.data.sample import BadRecord
from qrag_jax.data.sources import Columns, parse_own
from qrag_jax.errors import InputError
from qrag_jax.runtime.config_fields import fill
from tests.support.worlds import write_lines

RECORDS: list[dict[str, Any]] = [
    {"id": "a", "question": "Who?", "chunks": ["Ada is.", "Bo is."], "support": [0]},
    {"id": 7, "question": "Where?", "chunks": ["In Oslo."], "answers": ["Oslo", "Oslo city"]},
    {"question": "When?", "chunks": ["In 1999.", "No."], "support": [1, 0, 1], "answers": "1999"},
]
NAMES = {"question": "query", "chunks": "passages", "support": "gold", "answers": "truth"}


def renamed(record: dict[str, Any]) -> dict[str, Any]:
    return {NAMES.get(name, name): value for name, value in record.items()}


def table(path: Path, records: list[dict[str, Any]]) -> Path:
    """Lists as JSON in a cell, what is missing as an empty one."""
    names = list(dict.fromkeys(name for record in records for name in record))
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, names)
        rows.writeheader()
        for record in records:
            cells = {k: json.dumps(v) if isinstance(v, list) else v for k, v in record.items()}
            rows.writerow(cells)
    return path


def test_the_schema() -> None:
    first, second, third = map(parse_own, RECORDS)
    assert (first.id, first.question, first.chunks) == ("a", "Who?", ("Ada is.", "Bo is."))
    assert (first.support, first.answers, first.source) == ((0,), (), "own")
    assert (second.id, second.support, second.answers) == ("7", (), ("Oslo", "Oslo city"))
    assert (third.support, third.answers) == ((1, 0), ("1999",))
    assert third.id == parse_own(RECORDS[2]).id  # its content decides
    assert third.id != parse_own(RECORDS[2] | {"question": "Why?"}).id
    # Facts or answers can be hidden; what has neither teaches nothing.
    assert parse_own(RECORDS[2], columns=Columns(support="")).support == ()
    assert parse_own(RECORDS[2], columns=Columns(answers="")).answers == ()
    with pytest.raises(BadRecord, match="'support'"):
        parse_own(RECORDS[1], columns=Columns(answers="truth"))


@pytest.mark.parametrize(("write", "name"), [(write_lines, "r.jsonl"), (table, "r.csv")])
@pytest.mark.parametrize("other", [False, True])
def test_every_kind_of_file_and_name_gives_the_same_samples(tmp_path, write, name, other) -> None:
    records = [renamed(record) for record in RECORDS] if other else RECORDS
    path = write(tmp_path / name, records)
    columns = Columns(**NAMES) if other else Columns()
    samples, report = load_samples("own", str(path), "train", columns=columns)
    assert samples == [parse_own(record) for record in RECORDS]
    assert (report.read, report.kept) == (3, 3)


def test_a_part_of_one_file_or_one_split_of_the_hub_is_held_out(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    many = [RECORDS[0] | {"id": f"r{number}"} for number in range(60)]
    path = write_lines(tmp_path / "train.jsonl", many)
    for where in (str(path), f"hub:{tmp_path},,train"):
        config = DataConfig(sources={"own": 1.0}, path=where)
        train, dev = (
            {s.id for s in load_split(config, split, hold_out=True).all}
            for split in ("train", "dev")
        )
        assert train | dev == {record["id"] for record in many}
        assert not train & dev
        assert 1 <= len(dev) <= 20
    for path, named in (("hub:a,b,c,d", "hub:NAME,CONFIG,SPLIT"), ("", r"data\.path")):
        with pytest.raises(InputError, match=named):
            load_samples("own", path, "train")


FUNCTION = """
def records(split):
    for number in range(3 if split == "train" else 1):
        yield {"query": f"{split} {number}?", "chunks": ["In Oslo."], "answers": "Oslo"}

def raises(split):
    yield {"query": "Who?", "chunks": ["a"], "answers": "a"}
    raise KeyError("passages")

def lists(split):
    return [["Who?", ["a"]]]

def nothing(split):
    return ()
"""


def test_columns() -> None:
    assert Columns.parse("question=query, support=") == Columns(question="query", support="")
    for wrong in ("questions=query", "question"):
        with pytest.raises(InputError, match=f"--columns has '{wrong}'"):
            Columns.parse(wrong)
    for fields in ({"question": ""}, {"chunks": ""}, {"question": "chunks"}):
        with pytest.raises(InputError, match=r"config\.data\.columns"):
            fill(Columns, fields, "data.columns")


def test_records_of_a_function(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTION)
    columns = Columns(question="query")
    samples, report = load_samples("own", f"{path}:records", "train", columns=columns)
    assert [sample.question for sample in samples] == ["train 0?", "train 1?", "train 2?"]
    assert report.kept == 3
    config = DataConfig(sources={"own": 1.0}, path=f"{path}:records", columns=columns)
    (dev,) = load_split(config, "dev", hold_out=True).all  # its own split, nothing is held out
    assert dev.question == "dev 0?"
    for name in ("raises", "lists", "nothing", "other"):
        with pytest.raises(InputError, match=name) as caught:
            load_samples("own", f"{path}:{name}", "train", columns=columns)
        assert "\n" not in str(caught.value)

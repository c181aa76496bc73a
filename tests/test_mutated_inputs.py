"""Each reader reads or refuses damaged inputs; any text gives a value or the documented error."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qrag_jax.data.files.records import read_records
from qrag_jax.errors import InputError
from qrag_jax.retrieval.boolean_query import BooleanError, parse_boolean
from tests.support import mutated_readers as readers
from tests.support.mutated import Reader, faults, mutants

FEW = 6
READERS = [
    *(*readers.data_readers(), *readers.model_readers()),
    *(*readers.server_readers(), *readers.text_readers()),
]
QUICK = settings(max_examples=60, deadline=None, derandomize=True, database=None)
# Texts that are near to what is read: marks in any order, and any characters.
MARKS = st.sampled_from(
    [
        *("<think>", "</think>", "<answer>", "</answer>", '{"query": "', '"}', "{", "}", "[", "]"),
        *("<tool_call>", "</tool_call>", '"name"', '"arguments"', ":", ",", '<tool name="find">'),
        *(
            "</tool>",
            "<query>",
            "</query>",
            "(",
            ")",
            " AND ",
            " OR ",
            " NOT ",
            '"',
            "*",
            "[Title]",
        ),
    ]
)
NEAR = st.lists(MARKS | st.text(max_size=8), max_size=25).map("".join)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_no_damaged_input_is_a_fault(reader: Reader, tmp_path: Path) -> None:
    assert faults(reader, tmp_path / "sample", FEW) == []


def test_a_fault_is_found(tmp_path: Path) -> None:
    """The check itself can fail: by errors, by empty sentences, and by too much memory."""

    def careless(folder: Path) -> object:
        return json.loads((folder / "a.json").read_bytes())["a"] + 1

    def make(folder: Path) -> list[Path]:
        (folder / "a.json").write_text('{"a": 1}')
        return [folder / "a.json"]

    found = " ".join(faults(Reader("x", make, careless), tmp_path, 60))
    for error in ("TypeError", "JSONDecodeError", "MemoryError"):
        assert error in found

    def silent(text: str) -> None:
        if text != "sound":
            raise InputError

    assert "an empty sentence" in faults(Reader("y", ("sound",), silent), tmp_path, 20)[0]


def test_the_seed_decides() -> None:
    def drawn(seed: int) -> list[bytes]:
        return [data for _, data in mutants(b'{"a": [1]}', random.Random(seed), 30, "a.json")]

    assert drawn(1) == drawn(1) != drawn(2)


@QUICK
@given(st.binary(max_size=200) | NEAR.map(str.encode))
def test_any_bytes_are_records_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes):
    folder = tmp_path_factory.mktemp("any")
    for name in ("a.jsonl", "a.json", "a.jsonl.gz"):
        (folder / name).write_bytes(data)
        with contextlib.suppress(InputError):
            list(read_records(folder / name))


@QUICK
@given(NEAR)
def test_any_text_is_a_query_an_answer_or_calls(text: str) -> None:
    readers.rewritten(text)
    readers.called(text)
    readers.answered(text)
    with contextlib.suppress(BooleanError):
        parse_boolean(text)

"""Each reader reads or refuses damaged inputs; any text gives a value or the documented error."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.input_readers import data, indexes, logs, runs, servers, texts
from benchmarks.mutations import mutants
from benchmarks.tried_inputs import FAULT, REFUSED, FileReader, Reader, TextReader, try_reader
from qrag_jax.data.files.records import read_records
from qrag_jax.errors import InputError
from qrag_jax.metrics import answer_log, hop_log, retrieval_log
from qrag_jax.metrics.reward_log import RewardRow
from qrag_jax.retrieval.boolean_query import BooleanError

FEW = 6
READERS = [r for group in (data, logs, indexes, runs, servers, texts) for r in group.readers()]
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
    tried = try_reader(reader, tmp_path / "sample", FEW)
    assert tried.smallest() == []
    assert tried.inputs >= FEW


def test_a_fault_is_found(tmp_path: Path) -> None:
    """The check itself can fail: by errors, by empty sentences, and by too much memory."""

    def careless(folder: Path) -> object:
        return json.loads((folder / "a.json").read_bytes())["a"] + 1

    def make(folder: Path) -> list[Path]:
        (folder / "a.json").write_text('{"a": 1}')
        return [folder / "a.json"]

    told = " ".join(
        f.what for f in try_reader(FileReader("x", make, careless), tmp_path, 60).faults
    )
    assert "TypeError" in told
    assert "JSONDecodeError" in told
    assert "MemoryError" in told

    def silent(text: str) -> None:
        if text != "sound":
            raise InputError

    tried = try_reader(TextReader("y", ("sound",), silent), tmp_path / "y", 20)
    assert "an empty sentence" in tried.faults[0].what
    assert tried.counts[REFUSED] == 0 < tried.counts[FAULT]


def test_the_seed_decides() -> None:
    def made(seed: int) -> list[bytes]:
        return [each.data for each in mutants(b'{"a": [1]}', random.Random(seed), 30, "a.json")]

    assert made(1) == made(1) != made(2)


@QUICK
@given(st.binary(max_size=200) | NEAR.map(str.encode))
def test_any_bytes_are_records_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes):
    folder = tmp_path_factory.mktemp("any")
    for name in ("a.jsonl", "a.json", "a.jsonl.gz"):
        (folder / name).write_bytes(data)
        with contextlib.suppress(InputError):
            list(read_records(folder / name))


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(["id", "question", "answers", "hops", "mean", "rewards", "kept", "return"])


@QUICK
@given(VALUES | st.dictionaries(FIELDS, VALUES))
def test_any_line_is_a_row_or_refused(
    tmp_path_factory: pytest.TempPathFactory, value: object
) -> None:
    path = tmp_path_factory.mktemp("any") / "log.jsonl"
    path.write_text(json.dumps(value) + "\n")
    for read in (hop_log.read, retrieval_log.read, retrieval_log.read_partial):
        with contextlib.suppress(InputError):
            read(path)
    with contextlib.suppress(InputError):
        answer_log.read_partial(path, RewardRow)


@QUICK
@given(NEAR)
def test_any_text_is_a_query_an_answer_or_calls(text: str) -> None:
    texts.rewritten(text)
    texts.called(text)
    texts.answered(text)
    with contextlib.suppress(BooleanError):
        texts.boolean(text)

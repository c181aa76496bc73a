"""Rows of passages: the same alone, in pieces, and made ahead."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.systems import passage_rows
from qrag_jax.systems.passage_rows import PassageRows
from tests.systems.corpora import records, write_tower

COUNT = 50


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> PassageRows:
    folder = tmp_path_factory.mktemp("rows")
    passages = [
        Passage(str(record["id"]), str(record["text"]), str(record["title"]))
        for record in records(COUNT)
    ]
    passages.append(Passage("odd", "half a pair \ud800 of surrogates"))
    write_corpus(folder / "corpus", passages)
    tokenizer = TextTokenizer.load(write_tower(folder / "model"))
    assert tokenizer.cls_id is not None
    return PassageRows(folder / "corpus", tokenizer, (tokenizer.cls_id, 11), 12)


def test_rows_hold_title_and_text(rows: PassageRows) -> None:
    found = rows.of(range(COUNT + 1))
    cut = 0
    for record, row in zip(records(COUNT), found.each(), strict=False):
        whole = f"{record['title']} {record['text']}".strip()
        ids = rows.tokenizer.encode([whole])[0]
        cut += len(ids) > 9
        assert row.tolist() == [*rows.opening, *ids[:9], rows.tokenizer.sep_id]
    assert 0 < cut <= found.cut <= cut + 1  # the odd one may be long
    assert found.lengths.tolist() == [len(row) for row in found.each()]
    assert max(found.lengths) == 12


def test_rows_join_titles_as_the_run_did(rows: PassageRows) -> None:
    record = records(COUNT)[3]
    (row,) = dataclasses.replace(rows, title_separator=". ").of([3]).each()
    ids = rows.tokenizer.encode([f"{record['title']}. {record['text']}"])[0]
    assert row.tolist() == [*rows.opening, *ids[:9], rows.tokenizer.sep_id]


@pytest.mark.parametrize("groups", [[range(0, 7), range(7, 51)], [range(3, 3), range(40, 51)]])
def test_rows_made_ahead_are_the_same(
    rows: PassageRows, monkeypatch: pytest.MonkeyPatch, groups: list[range]
) -> None:
    monkeypatch.setattr(passage_rows, "PIECE", 5)
    for group, found in zip(groups, rows.ahead(groups, workers=0), strict=True):
        wanted = rows.of(group)
        np.testing.assert_array_equal(found.tokens, wanted.tokens)
        np.testing.assert_array_equal(found.lengths, wanted.lengths)
        assert found.cut == wanted.cut
        assert len(found.each()) == len(group)


def test_workers_open_the_corpus_for_themselves(rows: PassageRows) -> None:
    """Grain sends the object to its worker processes."""
    rows.of([1])
    copied = pickle.loads(pickle.dumps(rows))  # noqa: S301  (our own)
    assert "_corpus" not in vars(copied)
    np.testing.assert_array_equal(copied.of([1, 4]).tokens, rows.of([1, 4]).tokens)

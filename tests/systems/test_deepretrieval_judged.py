"""Judgements that are not of the corpus that is searched: what is told, and what mends it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

from qrag_jax.errors import InputError
from qrag_jax.systems.deepretrieval_config import RewriteConfig
from qrag_jax.systems.deepretrieval_inputs import load_inputs
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from tests.systems.collections_maker import (
    Judged,
    write_collection,
    write_documents,
    write_lines,
    write_rows,
)
from tests.systems.rewrite_play import small

TEXTS = {f"d{n}": f"text number {n}" for n in range(4)}
OF_ROWS = "give the corpus that they are about in"
OF_FOLDERS = "put the corpus that they are about into that folder, or name another in"
RAISING = ", or raise config.search.max_missing_share, 0.1"


def judged(name: str, *documents: str) -> Judged:
    """Queries of which one document each is relevant."""
    return {f"{name}{n}": (f"what is {name} {n}?", {d: 1}) for n, d in enumerate(documents)}


FITS, LACKS = judged("fit", "d0", "d1", "d2", "d3"), judged("lack", "e0", "e1", "e2", "e3")


def refusal(workdir: Path, fields: Mapping[str, Any], **given: Any) -> str:
    """What is told of inputs that are refused before a model is read."""
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    with pytest.raises(InputError) as caught:
        load_inputs(RewriteConfig.of(small(**fields)), workdir, mesh, **given)
    return str(caught.value)


def lacking(field: str, where: str, number: str = "4 of 4", first: str = "lack0") -> str:
    """How a corpus without the relevant documents is told; the fix follows."""
    return (
        f"config.queries.{field}: {where} has no relevant document of {number} queries (the first "
        f"is {first!r}, with document 'e0'), so these seem to be judgements of another collection; "
    )


def test_a_folder_whose_judgements_are_of_another(tmp_path: Path) -> None:
    north = write_collection(tmp_path / "north", TEXTS, {"test": FITS})
    some = {**LACKS, **judged("fit", "d1")}
    south = write_collection(tmp_path / "south", TEXTS, {"all": LACKS, "some": some})
    dev, where = {"queries__dev": f"{north},test"}, f"the corpus of {south}"
    told = refusal(tmp_path / "run", {**dev, "queries__train": f"{south},all"})
    # No share of missing documents would leave a query.
    assert told == f"{lacking('train', where)}{OF_FOLDERS} config.queries.train."
    told = refusal(tmp_path / "run", {**dev, "queries__train": f"{south},some"})
    fix = f"{OF_FOLDERS} config.queries.train{RAISING}."
    assert told == lacking("train", where, "4 of 5") + fix
    # As `evaluate` and `predict` read them.
    told = refusal(tmp_path / "test", {}, test=f"{south},some", trains=False)
    fix = f"{OF_FOLDERS} config.queries.test{RAISING}."
    assert told == lacking("test", where, "4 of 5") + fix


@pytest.mark.parametrize("field", ["corpus", "index"])
def test_rows_about_another_corpus(tmp_path: Path, field: str) -> None:
    fits, lacks = (
        write_rows(
            tmp_path / f"{name}.jsonl",
            [(each, text, [*grades]) for each, (text, grades) in queries.items()],
        )
        for name, queries in (("fits", FITS), ("lacks", LACKS))
    )
    # DeepRetrieval's rows of PubMed, on a corpus of one's own.
    of_pico = {"pico": dict.fromkeys("PICO", "x"), "publication_pmids": ["e0"], "pub_date": "2001"}
    pico = write_lines(tmp_path / "pico.jsonl", [{"id": f"p{n}", **of_pico} for n in range(4)])
    path = write_documents(tmp_path / "corpus.jsonl", TEXTS)
    if field == "index":
        source, path = path, tmp_path / "index"
        index_corpus(source, path, None, IndexSettings(engine="bm25"))
    where = f"config.search.{field}, {path},"
    data = {f"search__{field}": str(path), "queries__train": f"{fits},all"}
    with_dev = {**data, "queries__dev": f"{fits},all"}
    for name, first, fields, test in (
        ("train", "p0", {**with_dev, "queries__train": f"{pico},all"}, None),
        ("dev", "lack0", {**data, "queries__dev": f"{lacks},all"}, None),
        ("test", "lack0", {**data, "queries__held_out": 1}, f"{lacks},all"),
    ):
        told = refusal(tmp_path / "run", fields, test=test)
        assert told == f"{lacking(name, where, first=first)}{OF_ROWS} config.search.{field}."
    told = refusal(tmp_path / "run", data, test=f"{lacks},all", trains=False)
    assert told == f"{lacking('test', where)}{OF_ROWS} config.search.{field}."


def test_queries_that_are_held_out_are_named_as_those_of_training(tmp_path: Path) -> None:
    splits = {"train": {**FITS, **judged("lack", "e0")}}
    folder = write_collection(tmp_path / "south", TEXTS, splits)
    fields = {"seed": 0, "queries__held_out": 3, "queries__train": f"{folder},train"}
    told = refusal(tmp_path / "run", fields)
    # With this seed it is among the 3 that are held out, and not among the 2 others.
    assert told.startswith(lacking("train", f"the corpus of {folder}", "1 of 3"))

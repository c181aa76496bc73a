"""Indexes of corpora: the vectors of the tower, in order, also when the work was broken off."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.data.files.corpora import Columns
from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.manifest import read_manifest
from qrag_jax.retrieval.protocol import NONE, Queries
from qrag_jax.rollouts.chunks import CHUNK
from qrag_jax.runtime.interrupt import Stopped
from qrag_jax.systems import indexing
from qrag_jax.systems.indexing import BM25, EXACT, IndexSettings, index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder
from tests.devices import mesh_of
from tests.systems.corpora import ONE_SHAPE, records, tree, write_corpus_file, write_tower
from tests.systems.stopping import StopAfter

COUNT = 70  # three parts of 24, the last one smaller
SETTINGS = IndexSettings(part=24)


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> PassageEncoder:
    folder = write_tower(tmp_path_factory.mktemp("tower") / "model")
    return PassageEncoder.of_folder(str(folder), ONE_SHAPE, mesh_of(), 32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus_file(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", COUNT)


@pytest.fixture(scope="module")
def built(tower: PassageEncoder, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "index"
    indexed = index_corpus(source, out, tower, SETTINGS)
    assert indexed.folder == out / EXACT
    assert indexed.embedded == len(indexed.corpus) == COUNT
    return out


def vectors_of(out: Path) -> np.ndarray:
    index = ExactIndex.open(out / EXACT, StoredCorpus(out / "corpus"), mesh_of())
    return index.vectors(range(len(index.corpus)))


def wholes() -> list[str]:
    return [f"{record['title']} {record['text']}".strip() for record in records(COUNT)]


def test_vectors_are_those_of_the_tower(tower: PassageEncoder, built: Path) -> None:
    """Each passage alone, in a row of its own, without packing."""
    encoder = tower.encoder
    params = encoder.tower(tower.params, CHUNK)
    embed = jax.jit(encoder.embed)
    expected = []
    for ids in tower.tokenizer.encode(wholes()):
        row = np.zeros((1, 32), np.int32)
        kept = [encoder.opening_id, *ids[:30], encoder.sep_id]
        row[0, : len(kept)] = kept
        expected.append(embed(params, jnp.asarray(row), jnp.array([len(kept)]))[0])
    np.testing.assert_allclose(vectors_of(built), np.stack(expected), atol=2e-6)


def test_what_was_cut_is_counted(tower: PassageEncoder, source: Path, tmp_path: Path) -> None:
    long = sum(len(ids) > 30 for ids in tower.tokenizer.encode(wholes()))
    assert 0 < long < COUNT
    assert index_corpus(source, tmp_path / "out", tower, SETTINGS).cut == long


def test_passages_keep_names_titles_and_fields(built: Path) -> None:
    stored = StoredCorpus(built / "corpus")
    for record, passage in zip(records(COUNT), stored, strict=True):
        found = {"id": passage.name, "title": passage.title, "text": passage.text}
        assert {**found, **passage.metadata} == record


def test_the_manifest_says_what_the_index_is(tower: PassageEncoder, built: Path) -> None:
    manifest = read_manifest(built / EXACT, engine=EXACT, encoder=tower.digest(), count=COUNT)
    assert manifest.corpus == StoredCorpus(built / "corpus").digest
    assert (manifest.width, manifest.dtype) == (16, "float32")
    assert list(manifest.files) == [f"vectors.{number}.float32" for number in range(3)]
    found = {path.name for path in (built / EXACT).iterdir()}
    assert found == {"manifest.json", *manifest.files}  # no notes, nothing half written


@pytest.mark.parametrize("looks", [1, 30, COUNT, COUNT + 1])
def test_what_was_broken_off_goes_on_to_the_same_bytes(
    tower: PassageEncoder, source: Path, built: Path, tmp_path: Path, looks: int
) -> None:
    """Broken off while the corpus is read (a look for each passage), or after a part."""
    out = tmp_path / "index"
    with pytest.raises(Stopped):
        index_corpus(source, out, tower, SETTINGS, StopAfter(looks))
    assert not (out / EXACT / "manifest.json").exists()
    parts = {p.name: p.stat().st_mtime_ns for p in (out / EXACT).glob("vectors.*")}
    assert bool(parts) == (looks >= COUNT)
    indexed = index_corpus(source, out, tower, SETTINGS)
    assert tree(out) == tree(built)
    assert indexed.cut == sum(len(ids) > 30 for ids in tower.tokenizer.encode(wholes()))
    if parts:  # those that were finished are not written again
        assert indexed.embedded == COUNT - 24 * (looks - COUNT + 1)
        for name in parts:
            if name.endswith(".float32"):
                assert (out / EXACT / name).stat().st_mtime_ns == parts[name]


@pytest.mark.parametrize("damage", ["cut", "note", "partial"])
def test_unfinished_parts_are_embedded_again(
    tower: PassageEncoder, source: Path, built: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "index"
    with pytest.raises(Stopped):
        index_corpus(source, out, tower, SETTINGS, StopAfter(COUNT + 1))
    part = out / EXACT / "vectors.0.float32"
    if damage == "cut":
        part.write_bytes(part.read_bytes()[:-4])
    elif damage == "note":
        part.with_name(part.name + ".json").unlink()
    else:
        (out / EXACT / ".vectors.1.float32.77.partial").write_bytes(b"half")
    index_corpus(source, out, tower, SETTINGS)
    assert tree(out) == tree(built)


def test_an_index_begun_with_something_else_is_refused(
    tower: PassageEncoder, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "index"
    with pytest.raises(Stopped):
        index_corpus(source, out, tower, SETTINGS, StopAfter(COUNT + 1))
    shorter = dataclasses.replace(tower, row_tokens=20)
    for encoder, settings, field in (
        (shorter, SETTINGS, "encoder"),
        (tower, IndexSettings(part=10), "part"),
        (tower, IndexSettings(part=24, dtype="bfloat16"), "dtype"),
    ):
        with pytest.raises(InputError, match=f"in the field {field}, but"):
            index_corpus(source, out, encoder, settings)
    other = write_corpus_file(tmp_path / "corpus.jsonl", COUNT, seed=1)
    with pytest.raises(InputError, match="holds another corpus"):
        index_corpus(other, out, tower, SETTINGS)
    with pytest.raises(InputError, match="holds another corpus"):
        index_corpus(source, out, tower, IndexSettings(part=24, columns=Columns(title="")))


def test_a_finished_index_is_returned_or_refused(tower: PassageEncoder, built: Path) -> None:
    before = tree(built)
    indexed = index_corpus(None, built, tower, SETTINGS)
    assert (indexed.embedded, indexed.cut) == (0, None)
    with pytest.raises(InputError, match="in the field encoder"):
        index_corpus(None, built, dataclasses.replace(tower, row_tokens=20), SETTINGS)
    with pytest.raises(InputError, match="in the field dtype"):
        index_corpus(None, built, tower, IndexSettings(dtype="bfloat16"))
    assert tree(built) == before


def test_an_index_without_its_corpus_is_refused(tower: PassageEncoder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no finished corpus"):
        index_corpus(None, tmp_path / "nothing", tower)
    with pytest.raises(InputError, match="give an encoder"):
        index_corpus(None, tmp_path / "nothing", None)


def test_a_corpus_that_was_changed_on_disk_is_refused(
    tower: PassageEncoder, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "index"
    with pytest.raises(Stopped):
        index_corpus(source, out, tower, SETTINGS, StopAfter(COUNT + 1))
    path = out / "corpus" / "passages.jsonl"
    path.write_bytes(path.read_bytes().replace(b"river", b"RIVER"))
    with pytest.raises(InputError, match=r"is not what corpus\.json was written for"):
        index_corpus(source, out, tower, SETTINGS)


def test_several_devices_give_the_same_vectors(
    tower: PassageEncoder, source: Path, built: Path, tmp_path: Path
) -> None:
    expected = vectors_of(built)
    for sizes in ((8, 1, 1), (2, 2, 2)):
        spread = PassageEncoder.of_folder(tower.origin, ONE_SHAPE, mesh_of(*sizes), 32)
        assert spread.digest() == tower.digest()
        out = tmp_path / f"index{sizes[0]}"
        index_corpus(source, out, spread, SETTINGS)
        np.testing.assert_allclose(vectors_of(out), expected, atol=2e-6)


@pytest.mark.parametrize(("dtype", "bytes_of"), [("bfloat16", 2), ("int8", 2)])
def test_dtypes(
    tower: PassageEncoder, source: Path, built: Path, tmp_path: Path, dtype: str, bytes_of: int
) -> None:
    out = tmp_path / "index"
    index_corpus(source, out, tower, IndexSettings(dtype=dtype))
    (file,) = (out / EXACT).glob("vectors.*")
    assert file.stat().st_size == COUNT * 16 * bytes_of
    expected = vectors_of(built)
    np.testing.assert_allclose(vectors_of(out), expected, rtol=2**-8)
    index = ExactIndex.open(out / EXACT, StoredCorpus(out / "corpus"), mesh_of())
    assert index.settings.storage == dtype
    index_corpus(None, out, tower, IndexSettings(dtype="int8"))  # the files are the same
    opened = ExactIndex.open(out / EXACT, StoredCorpus(out / "corpus"), mesh_of())
    assert opened.settings.storage == "int8"
    own = index.search(Queries(["q"] * COUNT, expected), 1).numbers[:, 0]
    best = np.argmax(expected @ expected.T, axis=1)
    assert np.mean(own == best) > 0.9


def test_workers_give_the_same_bytes(
    tower: PassageEncoder, source: Path, built: Path, tmp_path: Path
) -> None:
    out = tmp_path / "index"
    index_corpus(source, out, tower, dataclasses.replace(SETTINGS, workers=2))
    assert tree(out / EXACT) == tree(built / EXACT)


def test_words_are_indexed_over_the_same_corpus(built: Path, tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    out = Path(shutil.copytree(built, tmp_path / "index"))
    for _ in range(2):
        indexed = index_corpus(None, out, None, IndexSettings(engine=BM25))
        assert indexed.folder == out / BM25
    index = BM25Index.open(indexed.folder, indexed.corpus)
    passage = indexed.corpus.passages([5])[0]
    assert index.search(Queries([passage.whole]), 1).numbers[0, 0] == 5


def test_words_are_of_a_language(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bm25s")
    corpus = tmp_path / "corpus.jsonl"
    texts = ["die Häuser und der Wald", "running houses", "H u n d K a t z e " * 3]
    corpus.write_text("".join(json.dumps({"id": t, "text": t}) + "\n" for t in texts))

    def found(language: str, query: str) -> list[int]:
        settings = IndexSettings(engine=BM25, language=language)
        indexed = index_corpus(corpus, tmp_path / language, None, settings)
        index = BM25Index.open(indexed.folder, indexed.corpus)
        return index.search(Queries([query]), 1).numbers[0].tolist()

    assert [found("german", query) for query in ("Haus", "und")] == [[0], [NONE]]
    assert "%" in capsys.readouterr().out  # of letters that are in no word
    assert [found("none", query) for query in ("Haus", "und", "run")] == [[NONE], [0], [NONE]]
    assert [found("english", query) for query in ("Haus", "und", "run")] == [[NONE], [0], [1]]
    with pytest.raises(InputError, match="--language"):
        IndexSettings(engine=BM25, language="klingon")
    with pytest.raises(InputError, match="--language"):
        index_corpus(corpus, tmp_path / "german", None, IndexSettings(engine=BM25))


def test_an_id_that_is_there_twice_is_named_with_both_places(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    made = [{"id": f"p{n}", "text": "" if n == 1 else f"word {n}"} for n in range(7)]
    lines = [json.dumps(record) + "\n" for record in made[:4]]
    with gzip.open(corpus / "a.jsonl.gz", "wt") as file:
        file.write("".join([*lines[:2], "\n", *lines[2:]]))
    parquet.write_table(table.from_pylist([*made[4:], made[2]]), corpus / "b.parquet")
    settings = IndexSettings(engine=BM25, skip_empty=True)
    told = r"^a\.jsonl\.gz:4 and b\.parquet, row 4 both have the id 'p2'; give each its own, or "
    for _ in range(2):  # the second call goes on with what is stored
        with pytest.raises(InputError, match=told):
            index_corpus(corpus, tmp_path / "index", None, settings)
    parquet.write_table(table.from_pylist(made[4:]), corpus / "b.parquet")
    assert len(index_corpus(corpus, tmp_path / "index", None, settings).corpus) == 6


def test_bad_records_leave_nothing_that_opens(
    tower: PassageEncoder, source: Path, built: Path, tmp_path: Path
) -> None:
    lines = source.read_text().splitlines(keepends=True)
    path, out = tmp_path / "corpus.jsonl", tmp_path / "index"
    empty = json.dumps({"id": "e", "title": "", "text": " ", "page": 0}) + "\n"
    for extra, told in (
        (empty, f"corpus.jsonl:{COUNT + 1}, with the id 'e', has no text"),
        (lines[3], f"corpus.jsonl:4 and corpus.jsonl:{COUNT + 1} both have the id 'p3'; give"),
        ('{"id": "c", "text"', "is not JSON"),
    ):
        path.write_text("".join([*lines, extra]))
        with pytest.raises(InputError, match=told):
            index_corpus(path, out, tower, SETTINGS)
        with pytest.raises(InputError, match="holds no finished corpus"):
            StoredCorpus(out / "corpus")
    # The file is mended, or its empty passages are left out.
    path.write_text("".join([empty, *lines]))
    index_corpus(path, out, tower, dataclasses.replace(SETTINGS, skip_empty=True))
    assert tree(out / EXACT) == tree(built / EXACT)


def test_settings_are_checked() -> None:
    for wrong in ({"engine": "best"}, {"dtype": "float16"}, {"part": -1}, {"workers": -2}):
        with pytest.raises(InputError, match=r"config\.index"):
            IndexSettings(**wrong)
    assert set(indexing.DTYPES) == {"float32", "bfloat16", "int8"}

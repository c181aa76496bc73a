"""Indexes of corpora: which tower embeds which rows, in order, also when broken off."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.models.files.sentence_transformers import write_tokenizer
from qrag_jax.models.first_encoder import (
    EncoderConfig,
    load_encoder,
    make_scratch_folder,
    save_encoder,
)
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.protocol import NONE, Queries
from qrag_jax.rollouts.chunks import CHUNK
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.systems import indexing
from qrag_jax.systems.indexing import (
    BM25,
    EXACT,
    IndexSettings,
    PassageEncoder,
    index_corpus,
    own_prefix,
)
from qrag_jax.systems.q_rag.run import write_tower as write_tower_of
from tests import reference
from tests.devices import mesh_of
from tests.support.worlds import write_lines
from tests.systems.corpora import (
    ONE_SHAPE,
    TINY,
    WORDS,
    records,
    tree,
    write_corpus_file,
    write_tower,
)


class StopAfter(StopSignal):
    """Asks to stop when it has been looked at so many times."""

    def __init__(self, looks: int) -> None:
        self._left = looks
        super().__init__()

    @property
    def requested(self) -> bool:
        self._left -= 1
        return self._left < 0

    @requested.setter
    def requested(self, value: bool) -> None:
        assert not value


COUNT = 70  # three parts of 24, the last one smaller
SETTINGS = IndexSettings(part=24)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tower(tmp_path_factory.mktemp("tower") / "model")


@pytest.fixture(scope="module")
def tower(model: Path) -> PassageEncoder:
    return PassageEncoder.of_folder(str(model), ONE_SHAPE, mesh_of(), 32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus_file(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", COUNT)


@pytest.fixture(scope="module")
def built(tower: PassageEncoder, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "index"
    assert index_corpus(source, out, tower, SETTINGS).embedded == COUNT
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
    embed = jax.jit(partial(reference.embed, encoder))
    expected = []
    for ids in tower.tokenizer.encode(wholes()):
        row = np.zeros((1, 32), np.int32)
        kept = [*encoder.chunk_opening, *ids[:30], encoder.sep_id]
        row[0, : len(kept)] = kept
        expected.append(embed(params, jnp.asarray(row), jnp.array([len(kept)]))[0])
    np.testing.assert_allclose(vectors_of(built), np.stack(expected), atol=2e-6)


@pytest.mark.parametrize("looks", [30, COUNT + 1])
def test_what_was_broken_off_goes_on_to_the_same_bytes(
    tower: PassageEncoder, source: Path, built: Path, tmp_path: Path, looks: int
) -> None:
    """Broken off while the corpus is read (a look for each passage), or after two parts."""
    out = tmp_path / "index"
    with pytest.raises(Stopped):
        index_corpus(source, out, tower, SETTINGS, StopAfter(looks))
    parts = [*(out / EXACT).glob("vectors.*.json")]
    assert len(parts) == 2 * (looks > COUNT)
    if parts:
        with pytest.raises(InputError, match="dtype"):
            index_corpus(source, out, tower, IndexSettings(part=24, dtype="bfloat16"))
        other = write_corpus_file(tmp_path / "corpus.jsonl", COUNT, seed=1)
        with pytest.raises(InputError, match="corpus"):
            index_corpus(other, out, tower, SETTINGS)
    with indexing.locked(out), pytest.raises(InputError, match=str(out)):  # it is being written
        index_corpus(source, out, tower, SETTINGS)
    indexed = index_corpus(source, out, tower, SETTINGS)
    assert tree(out) == tree(built)
    assert indexed.cut == sum(len(ids) > 30 for ids in tower.tokenizer.encode(wholes()))
    # What was finished is not embedded again; a finished index is returned as it is, or refused.
    assert indexed.embedded == COUNT - 24 * len(parts)
    assert index_corpus(None, out, tower, SETTINGS).embedded == 0
    with pytest.raises(InputError, match="encoder"):
        index_corpus(None, out, dataclasses.replace(tower, row_tokens=20), SETTINGS)


def test_unfinished_parts_are_embedded_again(
    tower: PassageEncoder, source: Path, built: Path, tmp_path: Path
) -> None:
    """One without its note; and all, where the file of the vectors was cut."""
    out, cut = tmp_path / "index", tmp_path / "cut"
    with pytest.raises(Stopped):
        index_corpus(source, out, tower, SETTINGS, StopAfter(COUNT + 1))
    (out / EXACT / "vectors.0.json").unlink()
    shutil.copytree(out, cut)
    file = cut / EXACT / "vectors.float32"
    file.write_bytes(file.read_bytes()[:-4])
    for folder, embedded in ((out, COUNT - 24), (cut, COUNT)):
        assert index_corpus(source, folder, tower, SETTINGS).embedded == embedded
        assert tree(folder) == tree(built)


def test_several_devices_and_pieces_of_a_part_give_the_same_vectors(
    model: Path, built: Path, source: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(indexing, "PIECE", 5)  # of rows that are made at once
    spread = PassageEncoder.of_folder(str(model), ONE_SHAPE, mesh_of(2, 2, 2), 32)
    assert spread.digest() == opened(model, 32, dtype="auto").digest()
    index_corpus(source, tmp_path / "index", spread, SETTINGS)
    np.testing.assert_allclose(vectors_of(tmp_path / "index"), vectors_of(built), atol=2e-6)


def test_dtypes(tower: PassageEncoder, source: Path, built: Path, tmp_path: Path) -> None:
    """`int8` is a way to search the files of bfloat16."""
    out = tmp_path / "index"
    index_corpus(source, out, tower, IndexSettings(dtype="bfloat16"))
    (file,) = (out / EXACT).glob("vectors.*")
    assert file.stat().st_size == COUNT * 16 * 2
    np.testing.assert_allclose(vectors_of(out), vectors_of(built), rtol=2**-8)
    index_corpus(None, out, tower, IndexSettings(dtype="int8"))
    index = ExactIndex.open(out / EXACT, StoredCorpus(out / "corpus"), mesh_of())
    assert index.storage == "int8"


def test_words_are_of_a_language(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    texts = ["die Häuser und der Wald", "running houses"]
    corpus = write_lines(tmp_path / "corpus.jsonl", ({"id": text, "text": text} for text in texts))
    for language, expected in (
        ("german", [[0], [NONE], [NONE]]),
        ("none", [[NONE], [0], [NONE]]),
        ("english", [[NONE], [0], [1]]),
    ):
        settings = IndexSettings(engine=BM25, language=language)
        indexed = index_corpus(corpus, tmp_path / language, None, settings)
        index = BM25Index.open(indexed.folder, indexed.corpus)
        assert index.search(Queries(["Haus", "und", "run"]), 1).numbers.tolist() == expected
    with pytest.raises(InputError, match="--language"):
        index_corpus(corpus, tmp_path / "german", None, IndexSettings(engine=BM25))


PREFIX = "stone river: "


def opened(folder: str | Path, max_tokens: int = 0, **config: Any) -> PassageEncoder:
    given = dataclasses.replace(ONE_SHAPE, **{"dtype": "float32"} | config)
    return PassageEncoder.of_folder(str(folder), given, mesh_of(), max_tokens)


def test_the_digest_changes_with_the_vectors(model: Path, tmp_path: Path) -> None:
    plain = opened(model)
    params = jax.tree.map(lambda leaf: leaf + 1e-6, plain.params)
    others = [
        opened(model, 40),
        opened(model, dtype="bfloat16"),
        opened(model, chunk_prefix=PREFIX),
        opened(model, pooling="cls"),
        opened(model, normalise=True),
        opened(model, scale=0.5),
        opened(write_tower(tmp_path / "other", seed=1)),
        dataclasses.replace(plain, params=params),
    ]
    digests = {plain.digest(), *(other.digest() for other in others)}
    assert len(digests) == 1 + len(others)
    # What leaves vectors as they are leaves it, too: how rows are packed, the prefix of queries.
    same = opened(model, block_tokens=128, state_prefix="query: ")
    assert same.digest() == plain.digest()


def test_the_prefix_of_an_exports_tokenizer_is_found(model: Path, tmp_path: Path) -> None:
    """An export's tokenizer adds the prefix by itself; ours must add the same."""
    prefixed = opened(model, chunk_prefix=PREFIX)
    assert own_prefix(opened(model).tokenizer) == ()
    exported = Path(shutil.copytree(model, tmp_path / "exported" / "chunk"))
    opening = prefixed.encoder.chunk_opening
    write_tokenizer(exported, prefixed.tokenizer, opening, max_tokens=50, plain=True)
    found = opened(exported.parent)  # the export's folder, or the tower's own
    assert found.encoder.chunk_opening == opening == opened(exported).encoder.chunk_opening


TEXTS = ["stone river", "STONE River", " ".join(WORDS * 9)]


CASES = (  # folder of the first module, a file of it, settings of the tokenizer; what comes of them
    (
        *("", "sentence_roberta_config.json", {"max_seq_length": 20}),
        *({"do_lower_case": True, "model_max_length": 9}, 20, False),
    ),
    (
        *("0_Transformer", "sentence_bert_config.json", {"do_lower_case": True}),
        *({"model_max_length": 130}, 130, True),
    ),
)


@pytest.mark.parametrize("case", CASES)
def test_texts_are_read_as_sentence_transformers_reads_them(case: Any, tmp_path: Path) -> None:
    """The folder itself, a run's copy of it, and its export; the library judges if it is there.

    The model has 160 positions and a tokenizer with case.
    """
    name, file, settings, of_tokenizer, longest, lowers = case
    folder, trunk = tmp_path / "model", tmp_path / "model" / name
    sizes = dataclasses.replace(TINY, positions=160)
    make_scratch_folder(trunk, [" ".join(WORDS)] * 3, sizes, 0)
    pooling, module = folder / "1_Pooling", "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": name, "type": f"{module}.Transformer"},
        {"idx": 1, "name": "1", "path": pooling.name, "type": f"{module}.Pooling"},
    ]
    pooling.mkdir()
    for path, fields in (
        (trunk / file, settings),
        (trunk / "tokenizer.json", {"normalizer": None}),
        (trunk / "tokenizer_config.json", of_tokenizer),
        (
            pooling / "config.json",
            {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True},
        ),
    ):
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | fields))
    (folder / "modules.json").write_text(json.dumps(modules))

    encoder = opened(folder, scale=1.0)
    vectors = encoder(TEXTS)
    assert encoder.row_tokens == longest
    assert bool((vectors[0] == vectors[1]).all()) == lowers
    plain = EncoderConfig(dtype="float32", scale=1.0)
    loaded, kept, exported = load_encoder(folder, plain), tmp_path / "kept", tmp_path / "chunk"
    save_encoder(loaded, folder, kept)
    write_tower_of(loaded, "chunk", encoder.form, encoder.params, exported)
    assert opened(kept, scale=1.0).digest() == encoder.digest()
    again = opened(exported)
    assert again.row_tokens == longest
    assert again.tokenizer.encode(TEXTS) == encoder.tokenizer.encode(TEXTS)
    library = pytest.importorskip("sentence_transformers")
    for written in (folder, kept, exported):
        judge = library.SentenceTransformer(str(written), device="cpu")
        assert judge.max_seq_length == longest
        np.testing.assert_allclose(judge.encode(TEXTS), vectors, atol=1e-5)

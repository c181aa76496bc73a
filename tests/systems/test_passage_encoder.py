"""Which tower embeds passages, and what its digest is of."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.models.files.sentence_transformers_tokenizer import write_tokenizer
from qrag_jax.models.pretrained import load_encoder, save_encoder
from qrag_jax.models.scratch import make_scratch_folder
from qrag_jax.rollouts.chunks import CHUNK
from qrag_jax.systems.passage_encoder import USUAL_TOKENS, PassageEncoder, own_prefix
from qrag_jax.systems.plain_search import QuestionTower
from qrag_jax.systems.towers_export import Tower
from qrag_jax.systems.towers_export import write_tower as write_tower_of
from tests.devices import mesh_of
from tests.systems.corpora import TINY, WORDS, write_tower

PREFIX = "stone river: "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tower(tmp_path_factory.mktemp("tower") / "model")


def opened(folder: Path, max_tokens: int = 0, **config: object) -> PassageEncoder:
    given = EncoderConfig(**config)  # type: ignore[arg-type]
    return PassageEncoder.of_folder(str(folder), given, mesh_of(), max_tokens)


def test_the_digest_changes_with_all_that_changes_vectors(model: Path, tmp_path: Path) -> None:
    plain = opened(model, dtype="float32")
    assert opened(model, dtype="float32").digest() == plain.digest()
    others = [
        opened(model, 40, dtype="float32"),
        opened(model, dtype="bfloat16"),
        opened(model, dtype="float32", chunk_prefix=PREFIX),
        opened(model, dtype="float32", pooling="cls"),
        opened(model, dtype="float32", normalise=True),
        opened(model, dtype="float32", scale=0.5),
        opened(write_tower(tmp_path / "other", seed=1), dtype="float32"),
        dataclasses.replace(plain, params=jax.tree.map(lambda leaf: leaf + 1e-6, plain.params)),
    ]
    digests = {plain.digest(), *(other.digest() for other in others)}
    assert len(digests) == 1 + len(others)
    # What leaves vectors as they are leaves it, too: how rows are packed, the prefix of queries.
    same = opened(model, dtype="float32", block_tokens=128, state_prefix="query: ")
    assert same.digest() == plain.digest()


def test_rows_open_with_the_prefix_and_are_cut(model: Path) -> None:
    encoder = opened(model, 8, chunk_prefix=PREFIX)
    prefix = encoder.tokenizer.encode([PREFIX])[0]
    cls_id, sep_id = encoder.tokenizer.cls_id, encoder.tokenizer.sep_id
    assert encoder.row([7, 9]).tolist() == [cls_id, *prefix, 7, 9, sep_id]
    long = encoder.row(range(100, 200)).tolist()
    kept = 8 - len(prefix) - 2
    assert long == [cls_id, *prefix, *range(100, 100 + kept), sep_id]


def test_the_prefix_of_an_exports_tokenizer_is_found(model: Path, tmp_path: Path) -> None:
    """An export's tokenizer adds the prefix by itself; ours must add the same."""
    told = opened(model, dtype="float32", chunk_prefix=PREFIX)
    assert own_prefix(opened(model).tokenizer) == ()
    exported = tmp_path / "exported" / "chunk"
    shutil.copytree(model, exported)
    opening = told.encoder.chunk_opening
    write_tokenizer(exported, told.tokenizer, opening, max_tokens=50, plain=True)
    found = opened(exported.parent, dtype="float32")  # the export's folder, or the tower's own
    assert found.encoder.chunk_opening == opening == opened(exported).encoder.chunk_opening
    assert found.origin == str(exported)


def test_rows_are_as_long_as_they_are_asked_for(model: Path) -> None:
    assert opened(model).row_tokens == 64 < USUAL_TOKENS  # its positions
    assert opened(model, 60).row_tokens == 60
    for wrong in (2, 65):
        with pytest.raises(InputError, match=f"--max_chunk_tokens is {wrong}, but rows of"):
            opened(model, wrong)


# The first module's folder, its file of settings, the tokenizer's settings → the longest row, and
# whether texts are made lower case. The model has 640 positions and a tokenizer with case.
MODULES: list[tuple[str, str, dict[str, Any], dict[str, Any], int, bool]] = [
    ("", "sentence_bert_config.json", {"max_seq_length": 33, "do_lower_case": True}, {}, 33, True),
    (
        "",
        "sentence_bert_config.json",
        {"do_lower_case": False},
        {"model_max_length": 32},
        32,
        False,
    ),
    ("", "sentence_bert_config.json", {}, {"model_max_length": 600}, 600, False),
    ("", "sentence_bert_config.json", {"max_seq_length": None}, {}, 640, False),
    ("", "sentence_bert_config.json", {"max_seq_length": 50}, {"model_max_length": 9}, 50, False),
    ("", "sentence_bert_config.json", {"tokenizer_args": {"model_max_length": 24}}, {}, 24, False),
    (
        "",
        "sentence_roberta_config.json",
        {"max_seq_length": 20},
        {"do_lower_case": True},
        20,
        False,
    ),
    ("0_Transformer", "sentence_bert_config.json", {"do_lower_case": True}, {}, 640, True),
    ("0_BERT", "sentence_bert_config.json", {"max_seq_length": 40}, {}, 40, False),
]
TEXTS = ["stone river", "STONE River", " ".join(WORDS * 40)]


@pytest.mark.parametrize("case", MODULES)
def test_texts_are_read_as_sentence_transformers_reads_them(
    case: tuple[str, str, dict[str, Any], dict[str, Any], int, bool], tmp_path: Path
) -> None:
    """The folder itself, a run's copy of it, and its export; the library judges if it is there."""
    name, file, settings, tokenizer_settings, longest, lowers = case
    folder, trunk = tmp_path / "model", tmp_path / "model" / name
    sizes = dataclasses.replace(TINY, positions=640)
    make_scratch_folder(trunk, [" ".join(WORDS)] * 3, sizes, 0)
    (trunk / file).write_text(json.dumps(settings))
    for changed, fields in (
        ("tokenizer.json", {"normalizer": None}),
        ("tokenizer_config.json", {}),
    ):
        told = json.loads((trunk / changed).read_text())
        (trunk / changed).write_text(json.dumps(told | (fields or tokenizer_settings)))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True})
    )
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(((name, "Transformer"), ("1_Pooling", "Pooling")))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))

    encoder = opened(folder, scale=1.0, dtype="float32")
    vectors = QuestionTower(encoder)(TEXTS)
    assert encoder.row_tokens == longest
    assert bool((vectors[0] == vectors[1]).all()) == lowers
    loaded, kept, exported = load_encoder(folder, scale=1.0), tmp_path / "kept", tmp_path / "chunk"
    save_encoder(loaded, folder, kept)
    tower = Tower("chunk", CHUNK, encoder.encoder.chunk_opening, longest, plain=True)
    write_tower_of(loaded, tower, encoder.params, exported)
    assert opened(kept, scale=1.0, dtype="float32").digest() == encoder.digest()
    again = opened(exported)
    assert again.row_tokens == longest
    assert again.tokenizer.encode(TEXTS) == encoder.tokenizer.encode(TEXTS)
    library = pytest.importorskip("sentence_transformers")
    for written in (folder, kept, exported):
        judge = library.SentenceTransformer(str(written), device="cpu")
        assert judge.max_seq_length == longest
        np.testing.assert_allclose(judge.encode(TEXTS), vectors, atol=1e-5)


def test_prompts_that_are_not_used_are_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    told = {"prompts": {"query": "query: ", "document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(told))
    opened(folder)
    assert "prompts are not used (query 'query: '); --chunk_prefix" in capsys.readouterr().out
    opened(folder, chunk_prefix="passage: ")
    assert capsys.readouterr().out == ""

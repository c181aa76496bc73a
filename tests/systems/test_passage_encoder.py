"""Which tower embeds passages, and what its digest is of."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import pytest

from qrag_jax.errors import InputError
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.models.files.sentence_transformers_tokenizer import write_tokenizer
from qrag_jax.systems.passage_encoder import USUAL_TOKENS, PassageEncoder, own_prefix
from tests.devices import mesh_of
from tests.systems.corpora import write_tower

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


def test_rows_are_as_long_as_the_folder_says(model: Path, tmp_path: Path) -> None:
    assert opened(model).row_tokens == 64 < USUAL_TOKENS  # its positions
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 33}))
    assert opened(folder).row_tokens == 33
    assert opened(folder, 60).row_tokens == 60
    for wrong in (2, 65):
        with pytest.raises(InputError, match=f"--max_chunk_tokens is {wrong}, but rows of"):
            opened(folder, wrong)


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

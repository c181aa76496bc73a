"""An encoder from scratch: a model folder like any other, the same for the same texts and seed."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.models.pretrained import load_encoder
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder

CONFIG = ScratchConfig(layers=1, hidden=16, heads=2, vocab=120, positions=32)
SENTENCE = "the river flows past Oslo and Zürich where Ada wrote her first 42 letters"
ROOT = Path(__file__).parents[2]


def texts(seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    words = SENTENCE.split()
    return [" ".join(draw.choices(words, k=9)) + "." for _ in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    make_scratch_folder(folder, iter(texts()), CONFIG, seed=1)
    return folder


def test_folder_loads_as_any_model(folder: Path) -> None:
    loaded = load_encoder(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "bert"
    assert config["vocab_size"] == loaded.tokenizer.vocab_size <= CONFIG.vocab
    assert loaded.encoder.width == 16
    assert loaded.encoder.max_positions == 32
    assert loaded.params["layers"]["query"]["kernel"].shape == (1, 16, 16)
    # The ids the encoder was given are those of its tokenizer.
    ids = (loaded.encoder.opening_id, loaded.encoder.sep_id, loaded.encoder.pad_id)
    names = [loaded.tokenizer.backend.id_to_token(index) for index in ids]
    assert names == ["[CLS]", "[SEP]", "[PAD]"]


def test_tokenizer_knows_its_texts(folder: Path) -> None:
    tokenizer = load_encoder(folder).tokenizer
    backend = tokenizer.backend
    for text, ids in zip(texts(), tokenizer.encode(texts()), strict=True):
        pieces = [backend.id_to_token(index) for index in ids]
        assert "[UNK]" not in pieces
        words = " ".join(pieces).replace(" ##", "")
        assert words == text.lower().replace("ü", "u").replace(".", " .")
    (frequent,) = tokenizer.encode(["river"])
    (rare,) = tokenizer.encode(["vorrei"])
    assert len(frequent) < len(rare)
    # Marks of the format inside a text are text.
    (marks,) = tokenizer.encode(["[SEP] ada"])
    assert tokenizer.sep_id not in marks


def test_same_texts_and_seed_give_the_same_folder_in_every_process(
    folder: Path, tmp_path: Path
) -> None:
    code = (
        "import sys, pathlib; from tests.models.test_scratch import *;"
        "make_scratch_folder(pathlib.Path(sys.argv[1]), texts(), CONFIG, seed=1)"
    )
    for name in ("one", "two"):  # the trainer's own order differs from process to process
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], cwd=ROOT, check=True)
        for file in ("tokenizer.json", "config.json", "model.safetensors"):
            assert (tmp_path / name / file).read_bytes() == (folder / file).read_bytes()


def test_other_seed_gives_other_weights(folder: Path, tmp_path: Path) -> None:
    make_scratch_folder(tmp_path, texts(), CONFIG, seed=2)
    same = (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert same
    one, two = (load_encoder(path).params["word_embeddings"] for path in (folder, tmp_path))
    assert one.shape == two.shape
    assert np.abs(one - two).max() > 0.01


def test_texts_in_other_scripts(tmp_path: Path) -> None:
    mixed = ["Москва и 東京", "東京 (Tokyo)", "Ωμέγα", "naïve café"] * 5
    make_scratch_folder(tmp_path, mixed, CONFIG, seed=0)
    tokenizer = load_encoder(tmp_path).tokenizer
    unknown = tokenizer.backend.token_to_id("[UNK]")
    for ids in tokenizer.encode(mixed):
        assert ids
        assert unknown not in ids


def test_weights_embed_different_texts_differently(folder: Path) -> None:
    loaded = load_encoder(folder)
    rows = [[2, *ids[:20], 3] for ids in loaded.tokenizer.encode(texts()[:2])]
    width = max(map(len, rows))
    tokens = np.array([row + [0] * (width - len(row)) for row in rows], np.int32)
    lengths = np.array([len(row) for row in rows], np.int32)
    hidden = jax.jit(loaded.encoder.module.hidden_states)(loaded.params, tokens, lengths)
    assert np.isfinite(np.asarray(hidden)).all()
    assert np.abs(np.asarray(hidden[0] - hidden[1])).max() > 1e-3


@pytest.mark.parametrize(("hidden", "heads"), [(16, 3), (15, 3)])
def test_width_that_does_not_split(tmp_path: Path, hidden: int, heads: int) -> None:
    sizes = dataclasses.replace(CONFIG, hidden=hidden, heads=heads)
    with pytest.raises(InputError, match=f"scratch.hidden is {hidden}; it must be even and"):
        make_scratch_folder(tmp_path / "model", texts(), sizes, seed=0)
    assert not (tmp_path / "model").exists()

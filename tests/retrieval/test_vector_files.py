"""Vectors in files part by part, their manifest, and in parts on devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.index_folder import (
    Manifest,
    PartNote,
    VectorParts,
    open_vectors,
    read_manifest,
    write_manifest,
)

WIDTH, COUNT = 3, 10
VECTORS = np.arange(COUNT * WIDTH, dtype=np.float32).reshape(COUNT, WIDTH)
MANIFEST = Manifest("exact", "c0", COUNT, encoder="e0")

# ---------------------------------------------------------------------- files


def parts_of(folder: Path, **other: Any) -> VectorParts:
    settings = {"count": COUNT, "part": 4, "width": WIDTH, "dtype": "float32"} | other
    return VectorParts(folder, {"encoder": "e"}, **settings)


def write_all(parts: VectorParts) -> None:
    for number in parts.numbers:
        rows = parts.passages(number)
        parts.write(number, VECTORS[rows.start : rows.stop], PartNote(len(rows), 5, 1))


@pytest.fixture
def index(tmp_path: Path) -> Path:
    parts = parts_of(tmp_path / "index")
    parts.begin()
    write_all(parts)
    parts.finish(MANIFEST)
    return tmp_path / "index"


def test_parts_become_an_index(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    assert [list(parts.passages(n)) for n in (0, 2, 3)] == [[0, 1, 2, 3], [8, 9], []]
    parts.begin()
    write_all(parts)
    assert parts.finished() == {n: PartNote(len(parts.passages(n)), 5, 1) for n in range(3)}
    path = tmp_path / "vectors.1.float32"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert parts.finished().keys() == {0, 2}
    path.write_bytes(data)
    with pytest.raises(InputError, match="encoder"):
        dataclasses.replace(parts, made_of={"encoder": "other"}).begin()
    notes = {p: p.read_bytes() for p in tmp_path.iterdir() if p.name.endswith(".json")}
    parts.finish(MANIFEST)
    for path, data in notes.items():  # as a kill between manifest and notes leaves them
        path.write_bytes(data)
    parts.tidy()
    manifest, vectors = open_vectors(tmp_path, count=COUNT)
    np.testing.assert_array_equal(vectors.rows(range(COUNT)), VECTORS)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*manifest.files, "manifest.json"])


@pytest.mark.parametrize(
    "wanted", [{"engine": "faiss"}, {"corpus": "c1"}, {"encoder": "e1"}, {"width": 6}, {"count": 4}]
)
def test_an_index_is_opened_with_what_it_was_built_from(wanted: dict, index: Path) -> None:
    assert read_manifest(index, engine="exact", corpus="c0", encoder="e0").count == COUNT
    with pytest.raises(InputError, match=rf"manifest\.json.* field {next(iter(wanted))}"):
        open_vectors(index, **wanted)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/b", "..", "", ".hidden", "a\\b"])
def test_a_file_outside_the_folder_is_not_looked_at(name: str, index: Path) -> None:
    """Not even its size is told; nor is a link followed."""
    (index.parent / "secret").write_bytes(b"x" * 60)
    manifest = read_manifest(index)
    write_manifest(index, dataclasses.replace(manifest, files={name: 60}))
    with pytest.raises(InputError, match="plain name") as error:
        open_vectors(index)
    assert "bytes" not in str(error.value)
    write_manifest(index, manifest)
    path = index / next(iter(manifest.files))
    path.rename(index.parent / "mine")
    path.symlink_to("../mine")
    with pytest.raises(InputError, match=path.name):
        open_vectors(index)

"""Vectors written part by part; the rest is tested with `index_corpus`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.manifest import Manifest, read_manifest, write_manifest
from qrag_jax.retrieval.vector_files import NAME, PartNote, VectorParts, open_vectors

WIDTH, COUNT = 3, 10
VECTORS = np.arange(COUNT * WIDTH, dtype=np.float32).reshape(COUNT, WIDTH)
MANIFEST = Manifest(engine="exact", corpus="c", count=COUNT)


def parts_of(folder: Path, **other: object) -> VectorParts:
    given = {"count": COUNT, "part": 4, "width": WIDTH, "dtype": "float32"} | other
    return VectorParts(folder, {"encoder": "e"}, **given)  # type: ignore[arg-type]


def write_all(parts: VectorParts) -> None:
    for number in parts.numbers:
        rows = parts.passages(number)
        parts.write(number, VECTORS[rows.start : rows.stop], PartNote(len(rows), 5, 1))


def test_parts_become_an_index(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    assert [list(parts.passages(n)) for n in (0, 2, 3)] == [[0, 1, 2, 3], [8, 9], []]
    parts.begin()
    write_all(parts)
    assert parts.finished() == {n: PartNote(len(parts.passages(n)), 5, 1) for n in range(3)}
    parts.finish(MANIFEST)
    manifest, vectors = open_vectors(tmp_path, count=COUNT)
    np.testing.assert_array_equal(vectors.rows(range(COUNT)), VECTORS)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*manifest.files, "manifest.json"])


def test_an_index_is_finished_only_with_all_its_parts(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    parts.begin()
    write_all(parts)
    for path in tmp_path.glob("vectors.*"):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match="parts are finished"):
            parts.finish(MANIFEST)
        path.write_bytes(data)
    parts.finish(MANIFEST)
    with pytest.raises(InputError, match="holds a finished"):
        parts.begin()


def test_a_kill_between_manifest_and_notes_leaves_an_index(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    parts.begin()
    write_all(parts)
    notes = {p: p.read_bytes() for p in tmp_path.iterdir() if p.name.endswith(".json")}
    parts.finish(MANIFEST)
    for path, data in notes.items():
        path.write_bytes(data)
    parts.tidy()
    assert not any(path.exists() for path in notes)
    open_vectors(tmp_path, count=COUNT)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_no_numbers_are_refused(tmp_path: Path, value: float) -> None:
    parts = parts_of(tmp_path)
    wrong = VECTORS[4:8].copy()
    wrong[2, 1] = value
    with pytest.raises(InputError, match="vector 6, counted"):
        parts.write(1, wrong, PartNote(4, 5, 0))
    with pytest.raises(ValueError, match="instead of"):
        parts.write(0, VECTORS[:3], PartNote(3, 5, 0))
    assert not any(tmp_path.iterdir())


def test_what_was_begun_otherwise_is_refused(tmp_path: Path) -> None:
    parts_of(tmp_path).begin()
    parts_of(tmp_path).begin()
    for name, value in (("part", 5), ("width", 4), ("dtype", "bfloat16")):
        with pytest.raises(InputError, match=f"in the field {name}, but"):
            parts_of(tmp_path, **{name: value}).begin()
    (tmp_path / NAME).write_text("[")
    with pytest.raises(InputError, match=r"building\.json is damaged"):
        parts_of(tmp_path).begin()


@pytest.fixture
def index(tmp_path: Path) -> Path:
    parts = parts_of(tmp_path / "index")
    parts.begin()
    write_all(parts)
    parts.finish(MANIFEST)
    return tmp_path / "index"


def test_what_is_not_whole_is_refused(index: Path) -> None:
    path = index / next(iter(read_manifest(index).files))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match=f"{path.name} is cut short"):
        open_vectors(index)
    path.unlink()
    with pytest.raises(InputError, match=f"{path.name} is missing"):
        open_vectors(index)


@pytest.mark.parametrize(
    ("change", "field"), [({"count": 11}, "count"), ({"width": 0}, "width"), ({"dtype": "x"}, "x")]
)
def test_a_manifest_that_is_not_that_of_the_files(index: Path, change: dict, field: str) -> None:
    write_manifest(index, dataclasses.replace(read_manifest(index), **change))
    with pytest.raises(InputError, match=field):
        open_vectors(index)


def test_files_outside_the_folder_are_not_mapped(index: Path) -> None:
    manifest = read_manifest(index)
    files = {f"../index/{name}": size for name, size in manifest.files.items()}
    write_manifest(index, dataclasses.replace(manifest, files=files))
    with pytest.raises(InputError, match="no plain name"):
        open_vectors(index)

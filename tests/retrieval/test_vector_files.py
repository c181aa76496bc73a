"""Vectors in files part by part, their manifest, and in parts on devices."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import device_vectors
from qrag_jax.retrieval.device_vectors import (
    STORAGES,
    Layout,
    check_room,
    layout_of,
    load,
    on_devices,
    to_int8,
)
from qrag_jax.retrieval.manifest import Manifest, read_manifest, write_manifest
from qrag_jax.retrieval.vectors import (
    DTYPES,
    PartNote,
    VectorParts,
    Vectors,
    check_finite,
    checked,
    open_vectors,
)
from tests.devices import mesh_of

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
    for path in tmp_path.glob("vectors.*"):  # only with all its parts
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match="parts"):
            parts.finish(MANIFEST)
        path.write_bytes(data)
    notes = {p: p.read_bytes() for p in tmp_path.iterdir() if p.name.endswith(".json")}
    parts.finish(MANIFEST)
    with pytest.raises(InputError, match=str(tmp_path)):
        parts.begin()
    for path, data in notes.items():  # as a kill between manifest and notes leaves them
        path.write_bytes(data)
    parts.tidy()
    manifest, vectors = open_vectors(tmp_path, count=COUNT)
    np.testing.assert_array_equal(vectors.rows(range(COUNT)), VECTORS)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*manifest.files, "manifest.json"])


def test_what_was_begun_otherwise_is_refused(tmp_path: Path) -> None:
    parts_of(tmp_path).begin()
    parts_of(tmp_path).begin()
    for name, value in (("part", 5), ("width", 4), ("dtype", "bfloat16")):
        with pytest.raises(InputError, match=f"field {name}"):
            parts_of(tmp_path, **{name: value}).begin()


def test_vectors_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    for value in (np.nan, np.inf):
        wrong = VECTORS[4:8].copy()
        wrong[2, 1] = value
        with pytest.raises(InputError, match="vector 6"):
            parts.write(1, wrong, PartNote(4, 5, 0))
    with pytest.raises(ValueError, match="instead of"):
        parts.write(0, VECTORS[:3], PartNote(3, 5, 0))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wanted", [{"engine": "faiss"}, {"corpus": "c1"}, {"encoder": "e1"}, {"width": 6}, {"count": 4}]
)
def test_an_index_is_opened_with_what_it_was_built_from(wanted: dict, index: Path) -> None:
    assert read_manifest(index, engine="exact", corpus="c0", encoder="e0").count == COUNT
    with pytest.raises(InputError, match=rf"manifest\.json.* field {next(iter(wanted))}"):
        open_vectors(index, **wanted)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": 1}, "format"),
        ({"count": "3"}, "count"),
        ({"count": True}, "count"),
        ({"files": None}, "files"),
        ({"shards": 3}, "shards"),
    ],
)
def test_a_manifest_that_is_not_that_of_the_files(index: Path, change: dict, field: str) -> None:
    path = index / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    with pytest.raises(InputError, match=field):
        open_vectors(index)


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


# ---------------------------------------------------------------------- in memory

WHOLE = np.arange(60, dtype=np.float32).reshape(20, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_in_parts_are_as_if_they_were_in_one(dtype: str) -> None:
    parts = [WHOLE[:4], WHOLE[4:4], WHOLE[4:5], WHOLE[5:]]
    vectors = Vectors([part.astype(DTYPES[dtype]) for part in parts])
    assert (len(vectors), vectors.width, vectors.dtype) == (20, 3, DTYPES[dtype])
    wanted = np.array([19, 4, 4, 0, 3, 5])
    assert vectors.rows(wanted).dtype == np.float32
    np.testing.assert_array_equal(vectors.rows(wanted), WHOLE[wanted])
    assert vectors.rows([]).shape == (0, 3)
    for start, stop, size in ((0, 20, 100), (2, 11, 3), (5, 5, 3), (0, 1, 1)):
        found = list(vectors.blocks(start, stop, size))
        assert all(0 < len(block) <= size for _, block in found)
        assert [row.tolist() for _, block in found for row in block] == WHOLE[start:stop].tolist()
        assert all(int(block[0, 0]) == 3 * first for first, block in found)


def test_what_is_no_array_of_finite_vectors() -> None:
    assert checked([[1, 2]], "here").dtype == np.float32
    assert checked(np.ones((1, 2), DTYPES["bfloat16"]), "here").dtype == DTYPES["bfloat16"]
    for vectors in ([["a"]], [1.0], [[1.0]], np.zeros((3, 0))):
        with pytest.raises(InputError, match="here"):
            checked(vectors, "here", 2)
    for dtype in DTYPES:
        bad = np.ones((200_000, 3), DTYPES[dtype])  # longer than what is looked at side by side
        bad[190_009, 2], bad[190_017, 0] = -np.inf, np.nan
        with pytest.raises(InputError, match="vector 190109"):
            check_finite(bad, "the file", 100)
        check_finite(bad[:190_009], "the file")


# ---------------------------------------------------------------------- on devices

ROWS = np.random.default_rng(0).integers(-127, 128, (101, 6)).astype(np.float32)
ROWS[:, 0] = 127  # so that scales are 1


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (1, 3, 1)])
def test_parts_on_devices_are_equal_and_in_order(
    sizes: tuple[int, int, int], storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_vectors, "_BLOCK_BYTES", 7 * 6 * 4)  # several blocks of few rows
    mesh = mesh_of(*sizes)
    vectors = Vectors([ROWS[:50], ROWS[50:]])
    layout = layout_of(vectors, storage, mesh.size, 4)
    part = load(vectors, layout, mesh, 0)
    rows = np.asarray(part.rows, np.float32)
    assert rows.shape == (layout.rows * mesh.size, 6)
    assert layout.rows % 4 == 0
    assert layout.rows * mesh.size < 101 + 4 * mesh.size
    np.testing.assert_array_equal(rows[:101], ROWS)
    assert not rows[101:].any()
    assert np.asarray(part.allowed).tolist() == [True] * 101 + [False] * (len(rows) - 101)
    assert {shard.data.shape for shard in part.rows.addressable_shards} == {(layout.rows, 6)}
    leaves = [leaf for leaf in part if leaf is not None]
    assert len(leaves) == 2 + (storage == "int8")
    assert sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) == layout.bytes
    mask = np.arange(101) % 3 == 0
    there = np.asarray(on_devices(mask, layout, mesh))
    assert there.tolist() == [*mask.tolist(), *[False] * (len(rows) - 101)]
    bad = ROWS.copy()
    bad[77, 3] = np.inf
    with pytest.raises(InputError, match="vector 77"):
        load(Vectors([bad]), layout, mesh, 0)


def test_int8_is_near() -> None:
    rows = np.random.default_rng(1).standard_normal((50, 20)).astype(np.float32)
    rows[3] = 0
    numbers, scales = to_int8(rows)
    assert (numbers.dtype, scales.dtype) == (np.int8, np.float32)
    assert (np.abs(numbers * scales[:, None] - rows) <= scales[:, None] / 2 + 1e-7).all()
    assert np.abs(numbers[4:]).max(axis=1).tolist() == [127] * 46
    assert scales[3] == 0


def test_no_room() -> None:
    layout = Layout(10**6, 1024, 10**6, "float32")
    needed = 10**6 * (4096 + 1) + 2**30
    check_room(layout, 2**30, needed)
    check_room(layout, 2**30, None)
    for small, room in ((layout, needed - 2**30), (dataclasses.replace(layout, storage="int8"), 9)):
        with pytest.raises(InputError, match="devices"):
            check_room(small, 2**30, room)

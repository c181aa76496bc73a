"""Vectors in files part by part, their manifest, and in parts on devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import device_vectors
from qrag_jax.retrieval.device_vectors import (
    STORAGES,
    layout_of,
    load,
    on_devices,
)
from qrag_jax.retrieval.manifest import Manifest, read_manifest, write_manifest
from qrag_jax.retrieval.vectors import (
    PartNote,
    VectorParts,
    Vectors,
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


# ---------------------------------------------------------------------- in memory


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

"""A reader has the vectors of one version; what does not fit or is not whole is refused."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import vector_files
from qrag_jax.retrieval.manifest import Manifest, read_manifest, write_manifest
from qrag_jax.retrieval.vector_files import (
    append_vectors,
    create_vectors,
    open_vectors,
    replace_vectors,
)

MANIFEST = Manifest(engine="exact", corpus="c", count=0, encoder="e", width=3, dtype="float32")


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3)).astype(np.float32)


def content(folder: Path) -> np.ndarray:
    manifest, vectors = open_vectors(folder)
    return vectors.rows(np.arange(manifest.count))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("vectors*")}


def test_append_and_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_files, "PART_BYTES", 4 * 3 * 4)  # four rows a file
    create_vectors(tmp_path, MANIFEST)
    assert content(tmp_path).shape == (0, 3)
    wanted = np.concatenate([rows(10), rows(3, 1)])
    assert append_vectors(tmp_path, wanted[:10]).count == 10
    assert append_vectors(tmp_path, wanted[10:]).count == 13
    np.testing.assert_array_equal(content(tmp_path), wanted)
    kept = names(tmp_path)
    assert len(kept) == 4
    wanted[3:9] = rows(6, 2)
    new = replace_vectors(tmp_path, 3, wanted[3:9])
    assert (new.version, new.count) == (3, 13)
    np.testing.assert_array_equal(content(tmp_path), wanted)
    assert len(names(tmp_path)) == 4
    assert len(names(tmp_path) & kept) == 1  # the others held a row that was replaced
    for start in (0, 12):
        wanted[start] = rows(1, 5 + start)[0]
        replace_vectors(tmp_path, start, wanted[start : start + 1])
        np.testing.assert_array_equal(content(tmp_path), wanted)


def test_an_open_reader_keeps_its_version(tmp_path: Path) -> None:
    create_vectors(tmp_path, MANIFEST)
    append_vectors(tmp_path, rows(5))
    manifest, vectors = open_vectors(tmp_path)
    replace_vectors(tmp_path, 0, rows(5, 1))
    np.testing.assert_array_equal(vectors.rows(np.arange(5)), rows(5))
    np.testing.assert_array_equal(content(tmp_path), rows(5, 1))
    with pytest.raises(InputError, match="has 2 in the field version, but 1 is asked for; the vec"):
        open_vectors(tmp_path, version=manifest.version)


def test_readers_see_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread replaces all vectors, in three files, again and again; readers look meanwhile."""
    monkeypatch.setattr(vector_files, "PART_BYTES", 4 * 3 * 4)
    create_vectors(tmp_path, MANIFEST)
    append_vectors(tmp_path, np.zeros((12, 3)))
    done = threading.Event()

    def write() -> None:
        for value in range(1, 60):
            replace_vectors(tmp_path, 0, np.full((12, 3), value))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        found = content(tmp_path)
        assert (found == found[0, 0]).all()
        seen.add(float(found[0, 0]))
    writer.join()
    assert len(seen) > 1
    assert (content(tmp_path) == 59).all()


def test_a_write_that_fails_changes_nothing(full_disk: Path) -> None:
    create_vectors(full_disk, MANIFEST)
    append_vectors(full_disk, rows(5))
    before = names(full_disk)
    with pytest.raises(OSError, match="No space"):
        append_vectors(full_disk, rows(200_000))
    np.testing.assert_array_equal(content(full_disk), rows(5))
    assert names(full_disk) == before
    append_vectors(full_disk, rows(2, 1))
    assert len(content(full_disk)) == 7


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    create_vectors(tmp_path, MANIFEST)
    append_vectors(tmp_path, rows(5))
    (name,) = read_manifest(tmp_path).files
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match=f"{name} is cut short: it has 56 bytes instead of 60"):
        open_vectors(tmp_path)
    path.unlink()
    with pytest.raises(InputError, match=f"{name} is missing"):
        open_vectors(tmp_path)


def test_a_count_that_is_not_that_of_the_files(tmp_path: Path) -> None:
    create_vectors(tmp_path, MANIFEST)
    append_vectors(tmp_path, rows(5))
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"count": 5', '"count": 6'))
    with pytest.raises(InputError, match=r"counts 6 vectors .field count., which is not what"):
        open_vectors(tmp_path)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="width 0 and dtype 'float32'"):
        create_vectors(tmp_path, Manifest("exact", "c", 0, dtype="float32"))
    with pytest.raises(InputError, match=r"dtype 'int8'; give .* one of float32, bfloat16"):
        create_vectors(tmp_path, Manifest("exact", "c", 0, width=3, dtype="int8"))
    create_vectors(tmp_path, MANIFEST)
    with pytest.raises(InputError, match="holds an index already"):
        create_vectors(tmp_path, MANIFEST)
    append_vectors(tmp_path, rows(5))
    for bad, message in (
        (np.zeros((2, 4)), r"shape \[2, 4\], not \[number, 3\]"),
        (np.full((2, 3), np.nan), "the vector 0, counted from 0, holds NaN"),
    ):
        for write in (append_vectors, lambda folder, v: replace_vectors(folder, 0, v)):
            with pytest.raises(InputError, match=message):
                write(tmp_path, bad)
    for start in (-1, 4):
        with pytest.raises(InputError, match=r"has 5 vectors, but .* append those beyond"):
            replace_vectors(tmp_path, start, rows(2))
    np.testing.assert_array_equal(content(tmp_path), rows(5))


def test_files_outside_the_folder_are_not_mapped(tmp_path: Path) -> None:
    create_vectors(tmp_path / "mine", MANIFEST)
    append_vectors(tmp_path / "mine", rows(2))
    create_vectors(tmp_path / "theirs", MANIFEST)
    manifest = append_vectors(tmp_path / "theirs", rows(2, 1))
    (name,) = manifest.files
    stolen = dataclasses.replace(manifest, files={f"../mine/{name}": manifest.files[name]})
    write_manifest(tmp_path / "theirs", stolen)
    with pytest.raises(InputError, match="no plain name"):
        open_vectors(tmp_path / "theirs")

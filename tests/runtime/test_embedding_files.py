"""Vectors that are kept on disk: what is added is loaded, what is broken is dropped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.embedding_files import EmbeddingFiles, encoder_key
from tests.disks import read_only

WIDTH = 4


def group(seed: int, count: int) -> tuple[list[bytes], np.ndarray]:
    rng = np.random.default_rng(seed)
    digests = [rng.bytes(16) for _ in range(count)]
    return digests, rng.standard_normal((count, WIDTH)).astype(np.float32)


GROUPS = group(0, 5), group(1, 7)


def everything(folder: Path) -> dict[bytes, list[float]]:
    found = {}
    for digests, rows in EmbeddingFiles(folder, WIDTH).load():
        assert rows.dtype == np.float32
        found |= dict(zip(digests, rows.tolist(), strict=True))
    return found


def as_dict(*groups: tuple[list[bytes], np.ndarray]) -> dict[bytes, list[float]]:
    return {d: r for digests, rows in groups for d, r in zip(digests, rows.tolist(), strict=True)}


def test_a_broken_file_is_dropped_and_the_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "key"
    assert everything(folder) == {}
    EmbeddingFiles(folder, WIDTH).add(*GROUPS[0])
    (path,) = folder.iterdir()
    files = EmbeddingFiles(folder, WIDTH)
    files.add(*GROUPS[1])
    assert everything(folder) == as_dict(*GROUPS)
    data = path.read_bytes()
    flipped = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    for broken in (data[: len(data) // 5 * 4], flipped, b"", bytes(len(data))):
        path.write_bytes(broken)
        assert everything(folder) == as_dict(GROUPS[1])
        assert not path.exists()
    files.add(*GROUPS[0])
    assert everything(folder) == as_dict(*GROUPS)


def test_a_folder_that_cannot_be_written_is_read_and_named(tmp_path: Path) -> None:
    files = EmbeddingFiles(tmp_path, WIDTH)
    files.add(*GROUPS[0])
    (path,) = tmp_path.iterdir()
    files.add(*GROUPS[1])
    path.write_bytes(b"broken")
    with read_only(tmp_path):
        assert everything(tmp_path) == as_dict(GROUPS[1])
        assert path.read_bytes() == b"broken"
        with pytest.raises(InputError, match=str(tmp_path)):
            files.add(*GROUPS[0])
    with pytest.raises(InputError, match=str(path)):
        EmbeddingFiles(path / "key", WIDTH)


def test_encoder_key_differs_between_encoders() -> None:
    def params(scale: float = 1.0, name: str = "kernel") -> dict:
        return {"layer": {name: scale * np.arange(6, dtype=np.float32).reshape(2, 3)}}

    settings = {"row_tokens": 10, "tokenizer": "abc"}
    key = encoder_key(params(), settings)
    assert key == encoder_key(params(), dict(reversed(settings.items())))
    others = [
        encoder_key(params(2.0), settings),
        encoder_key(params(name="bias"), settings),
        encoder_key({"layer": {"kernel": params()["layer"]["kernel"].reshape(3, 2)}}, settings),
        encoder_key(params(), settings | {"row_tokens": 11}),
        encoder_key(params(), settings | {"tokenizer": "abd"}),
    ]
    assert len({key, *others}) == 6


def test_a_table_on_disk_grows_and_leaves_nothing(tmp_path: Path) -> None:
    mapped = EmbeddingFiles(tmp_path, WIDTH).table()
    mapped.reserve(4)
    _, rows = group(0, 7)
    mapped.put(1, rows[:3])
    before = mapped.rows
    mapped.reserve(8)
    mapped.put(4, rows[3:])
    np.testing.assert_array_equal(mapped.rows, [[0.0] * WIDTH, *rows])
    np.testing.assert_array_equal(before[1:], rows[:3])
    assert list(tmp_path.iterdir()) == []

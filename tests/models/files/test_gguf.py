"""Reading GGUF: dequantised tensors against the format's definition, and what is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from qrag_jax.errors import InputError
from qrag_jax.models.files.gguf import read_gguf
from qrag_jax.runtime.digests import sha256

ROWS, BLOCK = 3, 32  # a row holds two blocks
BYTES = {Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q8_0: 34}  # of a block


def half(data: bytes) -> float:
    return float(np.frombuffer(data, "<f2")[0])


def definition(block: bytes, kind: Kind) -> list[float]:
    """The values of a block, one at a time, as ggml's documentation of the format has them."""
    if kind == Kind.Q8_0:
        return [half(block[:2]) * number for number in np.frombuffer(block[2:], "i1")]
    low = half(block[2:4]) if kind == Kind.Q4_1 else -8 * half(block[:2])
    packed = block[-16:]  # the low halves of the bytes come first, then the high ones
    numbers = [byte % 16 for byte in packed] + [byte // 16 for byte in packed]
    return [half(block[:2]) * number + low for number in numbers]


def random_blocks(kind: Kind) -> np.ndarray:
    draw = np.random.default_rng(int(kind))
    blocks = draw.integers(0, 256, (ROWS * 2, BYTES[kind]), dtype=np.uint8)
    scales = 2 if kind == Kind.Q4_1 else 1
    blocks[:, : 2 * scales] = draw.normal(size=(ROWS * 2, scales)).astype("<f2").view(np.uint8)
    return blocks


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes the file of what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file with one tensor of each kind, and fields of several types."""
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_uint32("a.count", 7)
    writer.add_array("a.words", ["ä", "", "x y"])
    writer.add_array("a.numbers", [3, -1, 2])
    for kind in BYTES:
        data = random_blocks(kind).reshape(ROWS, -1)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
    plain = np.random.default_rng(0).normal(size=(ROWS, 5))
    writer.add_tensor("F32", plain.astype(np.float32))
    writer.add_tensor("F16", plain.astype(np.float16))
    finish(writer)
    return tmp_path / "small.gguf"


def test_tensors_and_fields(small: Path) -> None:
    found = read_gguf(small, sha256(small))
    for kind in BYTES:
        expected = [definition(block.tobytes(), kind) for block in random_blocks(kind)]
        assert found.shape(kind.name) == (ROWS, 2 * BLOCK)
        tensor = found.tensor(kind.name)
        assert tensor.dtype == np.float32
        np.testing.assert_allclose(tensor, np.reshape(expected, (ROWS, -1)), rtol=1e-6, atol=1e-6)
    plain = np.random.default_rng(0).normal(size=(ROWS, 5))
    np.testing.assert_array_equal(found.tensor("F32"), plain.astype(np.float32))
    np.testing.assert_array_equal(found.tensor("F16"), plain.astype(np.float16).astype(np.float32))
    assert found.field("a.words", list) == ["ä", "", "x y"]
    assert found.field("a.numbers", list) == [3, -1, 2]
    assert found.field("a.count", int) == 7
    for name, kind in {"a.count": str, "a.nothing": int}.items():
        with pytest.raises(InputError, match=rf"small\.gguf: the field {name}, of type"):
            found.field(name, kind)


def test_another_file_is_refused_before_it_is_read(small: Path, tmp_path: Path) -> None:
    # An array of 2**40 numbers in a file of 44 bytes: the reader itself would not come back.
    huge = b"GGUF" + b"".join(
        number.to_bytes(size, "little")
        for number, size in [(3, 4), (0, 8), (1, 8), (1, 8), (65, 1), (9, 4), (0, 4), (2**40, 8)]
    )
    (tmp_path / "huge.gguf").write_bytes(huge)
    with pytest.raises(InputError, match=r"huge\.gguf: refused, its sha256 is .* and not"):
        read_gguf(tmp_path / "huge.gguf", sha256(small))
    with pytest.raises(InputError, match=r"absent\.gguf: cannot be read \(No such file"):
        read_gguf(tmp_path / "absent.gguf", sha256(small))


@pytest.mark.parametrize("kept", [0, 3, 20, 60, 200, -8])
def test_a_broken_file_of_that_digest(small: Path, kept: int) -> None:
    small.write_bytes(small.read_bytes()[:kept])
    with pytest.raises(InputError, match=r"small\.gguf: not a readable GGUF file \(.+\)\.$"):
        read_gguf(small, sha256(small))


def test_a_kind_that_cannot_be_dequantised(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("whole", np.zeros((2, 2), np.int32))
    finish(writer)
    found = read_gguf(tmp_path / "a.gguf", sha256(tmp_path / "a.gguf"))
    with pytest.raises(InputError, match=r"a\.gguf: whole is stored as I32"):
        found.tensor("whole")

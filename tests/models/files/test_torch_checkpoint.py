"""Files of torch read without it: bit for bit, and without code."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from qrag_jax.errors import InputError
from qrag_jax.models.files import torch_checkpoint
from qrag_jax.models.files.torch_checkpoint import read_torch_file

NUMPY_OF = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}
both_formats = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def save(obj: object, path: Path, zipped: bool = True, protocol: int = 2) -> Path:
    torch.save(obj, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    return path


def assert_same(found: dict[str, np.ndarray], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == NUMPY_OF[tensor.dtype], name
        assert found[name].shape == tuple(tensor.shape), name
        assert found[name].flags.c_contiguous, name
        reference = tensor.detach().to(torch.float64).numpy()
        np.testing.assert_array_equal(found[name].astype(np.float64), reference, err_msg=name)


def refused(path: Path) -> str:
    """What the refusal says: one short line with the file's name."""
    with pytest.raises(InputError) as caught:
        read_torch_file(path)
    text = str(caught.value)
    assert path.name in text
    assert "\n" not in text
    assert len(text) < 700
    return text


# ---------------------------------------------------------------------- what torch writes


@both_formats
def test_every_dtype_and_view_is_read_bit_for_bit(tmp_path: Path, zipped: bool) -> None:
    torch.manual_seed(0)
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "base": base,
        "transposed": base.T,
        "column": base[:, 2],
        "block": base[1:3, 2:5],
        "every_other": base.flatten()[3::2],
        "permuted": base.reshape(2, 3, 4).permute(2, 0, 1),
        "tied": base,
    }
    for dtype in NUMPY_OF:
        tensors[f"{dtype} matrix"] = (torch.randn(3, 5) * 50).to(dtype)
        tensors[f"{dtype} scalar"] = torch.tensor(1).to(dtype)
        tensors[f"{dtype} empty"] = torch.zeros(0, 4, dtype=dtype)
    assert_same(read_torch_file(save(tensors, tmp_path / "x.bin", zipped)), tensors)


@both_formats
@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_training_checkpoint_with_optimizer_state(tmp_path: Path, key: str, zipped: bool) -> None:
    layer = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    other = {"half": [(torch.ones(5).bfloat16(), torch.arange(7))]}
    saved = {"epoch": 3, "optimizer": optimizer.state_dict(), key: layer.state_dict()} | other
    path = save(saved, tmp_path / "x.bin", zipped)
    assert_same(read_torch_file(path), layer.state_dict())
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 8)
    refused(path)


# ---------------------------------------------------------------------- code in a pickle


class Reduce:
    """An object whose pickle calls `function(*arguments)` when it is loaded."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.reduced


def with_pickle(data: bytes, path: Path) -> Path:
    """A real file of torch.save whose data.pkl is replaced by `data`."""
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(4)}, buffer)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, data if name.endswith("data.pkl") else source.read(name))
    return path


def as_legacy(data: bytes, path: Path) -> Path:
    head = [
        torch_checkpoint.LEGACY_MAGIC,
        torch_checkpoint.LEGACY_PROTOCOL,
        {"little_endian": True},
    ]
    path.write_bytes(b"".join(pickle.dumps(h, 2) for h in head) + data + pickle.dumps([], 2))
    return path


both_wraps = pytest.mark.parametrize("wrap", [with_pickle, as_legacy])


def attacks(canary: Path) -> dict[str, tuple[object, str]]:
    """Name → (object to pickle, the global that the refusal must name)."""
    touch = f"touch '{canary}'"
    write = f"open({str(canary)!r}, 'w').close()"
    return {
        "os.system": (Reduce(os.system, touch), f"{os.system.__module__}.system"),
        "eval": (Reduce(eval, write), "builtins.eval"),
        "exec": (Reduce(exec, write), "builtins.exec"),
        "getattr": (Reduce(getattr, "x", "upper"), "builtins.getattr"),
        "nested": ({"w": [OrderedDict(a=(1, Reduce(os.system, touch)))]}, ".system"),
        "torch": (Reduce(torch.load, "x"), "torch.serialization.load"),
        "argument": ({"w": Reduce(OrderedDict, Reduce(eval, write))}, "builtins.eval"),
    }


@both_wraps
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_code_in_the_pickle_is_refused_and_not_run(
    tmp_path: Path, protocol: int, wrap: Callable[..., Path]
) -> None:
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(attacks(canary)["eval"][0], 2))  # noqa: S301
    assert canary.exists()  # the attack works on a plain unpickler
    canary.unlink()
    for payload, forbidden in attacks(canary).values():
        text = refused(wrap(pickle.dumps(payload, protocol), tmp_path / "evil.bin"))
        assert not canary.exists()
        text = text.replace("__builtin__.", "builtins.")  # its name in protocols 0 to 2
        assert forbidden in text, text


# ---------------------------------------------------------------------- files that lie

KEY = (
    b"\x80\x02}X\x01\x00\x00\x00w"
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
)
ONE = b"K\x00K\x01\x85K\x01\x85\x89NtRs."  # the first element of a storage
CRAFTED = {
    "offset": KEY + b"K\x02K\x03\x85K\x01\x85\x89NtRs.",
    "stride": KEY + b"K\x00K\x03\x85K\x02\x85\x89NtRs.",
    "repeat": KEY + b"K\x00J\xff\xff\xff\x7f\x85K\x00\x85\x89NtRs.",
    "negative": KEY + b"K\x00K\x03\x85J\xff\xff\xff\xff\x85\x89NtRs.",
    "rank": KEY + b"K\x00K\x03\x85K\x01K\x01\x86\x89NtRs.",
    "list as size": KEY + b"K\x00](K\x01K\x02e\x85K\x01\x85\x89NtRs.",
    "numel": KEY.replace(b"K\x04tQ", b"K\x05tQ") + ONE,
    "no entry": KEY.replace(b"\x000X", b"\x009X") + ONE,
    "storage called": b"\x80\x02ctorch\nFloatStorage\n)R.",
    "complex": b"\x80\x02ctorch\nComplexFloatStorage\n.",
    "list": b"\x80\x02]K\x01a.",
    "no tensor": b"\x80\x02}X\x01\x00\x00\x00wK\x01s.",
    "cut": b"\x80\x02K",
    "empty": b"",
}


@both_wraps
def test_crafted_pickles_are_refused(tmp_path: Path, wrap: Callable[..., Path]) -> None:
    for data in CRAFTED.values():
        refused(wrap(data, tmp_path / "evil.bin"))


@both_formats
def test_broken_bytes_never_escape_as_another_error(tmp_path: Path, zipped: bool) -> None:
    random = np.random.default_rng(0)
    path = save(torch.nn.Linear(20, 20).state_dict(), tmp_path / "x.bin", zipped)
    whole = path.read_bytes()
    for kept in (len(whole) - 1, len(whole) // 2, 30):
        path.write_bytes(whole[:kept])
        refused(path)
    for _ in range(50):
        data = bytearray(whole)
        for place in random.integers(0, min(len(data), 900), 3):
            data[place] = random.integers(256)
        path.write_bytes(data)
        try:
            read_torch_file(path)
        except InputError as error:
            assert "x.bin" in str(error)  # noqa: PT017


def test_what_is_no_weight_file(tmp_path: Path) -> None:
    (tmp_path / "text.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "hello")
    for path in (*(tmp_path / name for name in ("text.bin", "other.zip", "absent.bin")), tmp_path):
        refused(path)

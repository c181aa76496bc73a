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


def save(obj: object, path: Path, zipped: bool) -> Path:
    torch.save(obj, path, _use_new_zipfile_serialization=zipped)
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
    """The message: one short line with the file's name."""
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


@pytest.mark.parametrize(("key", "zipped"), [("state_dict", True), ("model", False)])
def test_a_training_checkpoint_with_optimizer_state(tmp_path: Path, key: str, zipped: bool) -> None:
    layer = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    other = {"half": [(torch.ones(5).bfloat16(), torch.arange(7))]}
    saved = {"epoch": 3, "optimizer": optimizer.state_dict(), key: layer.state_dict()} | other
    path = save(saved, tmp_path / "x.bin", zipped)
    assert_same(read_torch_file(path), layer.state_dict())


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
    head = [torch_checkpoint.LEGACY_MAGIC, torch_checkpoint.LEGACY_PROTOCOL, {"little_endian": 1}]
    path.write_bytes(b"".join(pickle.dumps(h, 2) for h in head) + data + pickle.dumps([], 2))
    return path


both_wraps = pytest.mark.parametrize("wrap", [with_pickle, as_legacy])


@both_wraps
def test_code_in_the_pickle_is_refused_and_not_run(
    tmp_path: Path, wrap: Callable[..., Path]
) -> None:
    """The message names the global that would be called."""
    canary = tmp_path / "canary"
    touch, write = f"touch '{canary}'", f"open({str(canary)!r}, 'w').close()"
    attacks: list[tuple[object, str]] = [
        (Reduce(eval, write), "builtins.eval"),
        (Reduce(getattr, "x", "upper"), "builtins.getattr"),
        ({"w": [OrderedDict(a=(1, Reduce(os.system, touch)))]}, ".system"),
        (Reduce(torch.load, "x"), "torch.serialization.load"),
        ({"w": Reduce(OrderedDict, Reduce(eval, write))}, "builtins.eval"),
    ]
    pickle.loads(pickle.dumps(attacks[0][0], 2))  # noqa: S301
    assert canary.exists()  # the attack works on a plain unpickler
    canary.unlink()
    for payload, forbidden in attacks:
        for protocol in (0, 2, 4):
            text = refused(wrap(pickle.dumps(payload, protocol), tmp_path / "evil.bin"))
            assert not canary.exists()
            # Its name in protocols 0 to 2 is another.
            assert forbidden in text.replace("__builtin__.", "builtins."), text


# ---------------------------------------------------------------------- files that lie

KEY = (
    b"\x80\x02}X\x01\x00\x00\x00w"
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
)
ONE = b"K\x00K\x01\x85K\x01\x85\x89NtRs."  # the first element of a storage
CRAFTED = (
    KEY + b"K\x02K\x03\x85K\x01\x85\x89NtRs.",  # behind the end: by its offset,
    KEY + b"K\x00K\x03\x85K\x02\x85\x89NtRs.",  # by its stride,
    KEY + b"K\x00J\xff\xff\xff\x7f\x85K\x00\x85\x89NtRs.",  # or of any size without one
    KEY + b"K\x00K\x03\x85J\xff\xff\xff\xff\x85\x89NtRs.",  # a negative stride
    KEY + b"K\x00K\x03\x85K\x01K\x01\x86\x89NtRs.",  # more strides than sizes
    KEY + b"K\x00](K\x01K\x02e\x85K\x01\x85\x89NtRs.",  # a list as a size
    KEY.replace(b"K\x04tQ", b"K\x05tQ") + ONE,  # a storage of another size
    KEY.replace(b"\x000X", b"\x009X") + ONE,  # that is not there
    b"\x80\x02ctorch\nFloatStorage\n)R.",  # that is called
    b"\x80\x02ctorch\nComplexFloatStorage\n.",
    *(b"\x80\x02]K\x01a.", b"\x80\x02}X\x01\x00\x00\x00wK\x01s.", b"\x80\x02K", b""),  # no tensors
)


@both_wraps
def test_crafted_pickles_are_refused(tmp_path: Path, wrap: Callable[..., Path]) -> None:
    for data in CRAFTED:
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

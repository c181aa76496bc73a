from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
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


@both_formats
@pytest.mark.parametrize("dtype", NUMPY_OF, ids=str)
def test_every_dtype_is_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype, zipped: bool) -> None:
    torch.manual_seed(0)
    tensors = {
        "matrix": (torch.randn(3, 5) * 50).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
    }
    assert_same(read_torch_file(save(tensors, tmp_path / "x.bin", zipped)), tensors)


@both_formats
def test_views_of_one_storage(tmp_path: Path, zipped: bool) -> None:
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
    assert_same(read_torch_file(save(tensors, tmp_path / "x.bin", zipped)), tensors)


@both_formats
def test_state_dict_with_metadata_and_parameters(tmp_path: Path, zipped: bool) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    state = module.state_dict()
    state["parameter"] = torch.nn.Parameter(torch.ones(2))
    assert hasattr(state, "_metadata")  # the attribute that makes the pickle use BUILD
    assert_same(read_torch_file(save(state, tmp_path / "x.bin", zipped)), state)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_pickle_protocols(tmp_path: Path, protocol: int) -> None:
    state = torch.nn.Linear(2, 3).state_dict()
    assert_same(read_torch_file(save(state, tmp_path / "x.bin", protocol=protocol)), state)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_one_level_of_wrapping(tmp_path: Path, key: str) -> None:
    state = torch.nn.Linear(2, 3).state_dict()
    path = save({"epoch": 3, "name": "x", key: state}, tmp_path / "x.bin")
    assert_same(read_torch_file(path), state)


def trained() -> tuple[torch.nn.Linear, torch.optim.Adam]:
    """A layer after one step, with an optimizer that holds moments and a step count."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return layer, optimizer


@both_formats
@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_training_checkpoint_with_optimizer_state(tmp_path: Path, key: str, zipped: bool) -> None:
    layer, optimizer = trained()
    other = {"half": [(torch.ones(5).bfloat16(), torch.arange(7))]}
    saved = {"epoch": 3, "optimizer": optimizer.state_dict(), key: layer.state_dict()} | other
    path = save(saved, tmp_path / "x.bin", zipped)
    assert_same(read_torch_file(path), layer.state_dict())
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 8)
    with pytest.raises(InputError, match=r"x\.bin: .*truncated"):
        read_torch_file(path)


def test_byteorder_entry_is_honoured(tmp_path: Path) -> None:
    tensors = {"f": torch.randn(5), "b": torch.randn(5).bfloat16(), "i": torch.arange(5)}
    little = save(tensors, tmp_path / "little.bin")
    big = tmp_path / "big.bin"
    width = {"0": 4, "1": 2, "2": 8}
    with zipfile.ZipFile(little) as source, zipfile.ZipFile(big, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            folder, _, last = name.rpartition("/")
            if last == "byteorder":
                data = b"big"
            elif folder.endswith("/data") and last in width:
                data = np.frombuffer(data, f"u{width[last]}").byteswap().tobytes()
            target.writestr(name, data)
    assert_same(read_torch_file(big), tensors)


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


@both_formats
@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("attack", attacks(Path("x")))
def test_code_in_the_pickle_is_refused_and_not_run(
    tmp_path: Path, attack: str, protocol: int, zipped: bool
) -> None:
    canary = tmp_path / "canary"
    payload, forbidden = attacks(canary)[attack]
    data = pickle.dumps(payload, protocol)
    path = (with_pickle if zipped else as_legacy)(data, tmp_path / "evil.bin")
    with pytest.raises(InputError, match=r"evil\.bin") as caught:
        read_torch_file(path)
    assert not canary.exists()
    # Protocol 0 writes text operations; those are refused before any name is looked up.
    told = str(caught.value).replace("__builtin__.", "builtins.")  # its name in protocols 0 to 2
    assert forbidden in told or (protocol == 0 and "operation" in told)


def test_the_attack_would_work_on_a_plain_unpickler(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(attacks(canary)["eval"][0], 2))  # noqa: S301
    assert canary.exists()


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
)
HOOKS = b"\x89ccollections\nOrderedDict\n)R"
KEY = b"\x80\x02}X\x01\x00\x00\x00w"


def tensor(offset: bytes, size: bytes, stride: bytes) -> bytes:
    return KEY + TENSOR + offset + size + stride + HOOKS + b"tR"


def test_hand_written_pickle_is_read(tmp_path: Path) -> None:
    data = tensor(b"K\x01", b"K\x03\x85", b"K\x01\x85") + b"s."
    found = read_torch_file(with_pickle(data, tmp_path / "x.bin"))
    np.testing.assert_array_equal(found["w"], np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (tensor(b"K\x02", b"K\x03\x85", b"K\x01\x85") + b"s.", "element 4 of a storage of 4"),
        (tensor(b"K\x00", b"K\x03\x85", b"K\x02\x85") + b"s.", "element 4 of a storage of 4"),
        (tensor(b"K\x00", b"J\xff\xff\xff\x7f\x85", b"K\x00\x85") + b"s.", "repeats"),
        (tensor(b"K\x00", b"K\x03\x85", b"J\xff\xff\xff\xff\x85") + b"s.", "-1"),
        (tensor(b"K\x00", b"K\x03\x85", b"K\x01K\x01\x86") + b"s.", "do not fit together"),
        (tensor(b"K\x00", b"K\x03\x85", b"K\x01\x85") + b"}X\x06\x00\x00\x00strideN" + b"sbs.",
         "given a state"),
        (KEY + TENSOR.replace(b"K\x04tQ", b"K\x05tQ") + b"K\x00K\x01\x85K\x01\x85" + HOOKS
         + b"tRs.", "too few for 5 float32"),
        (KEY + TENSOR.replace(b"\x000X", b"\x009X") + b"K\x00K\x01\x85K\x01\x85" + HOOKS
         + b"tRs.", "data/9 is missing"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "memo number"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "storage kind is called"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x04\x00\x00\x00callNsb.",
         "given a state"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "operation NEWOBJ"),
        (b"\x80\x02ctorch\nComplexFloatStorage\n.", "torch.ComplexFloatStorage"),
        (b"\x80\x02]K\x01a.", "holds no tensors"),
        (b"\x80\x02}X\x01\x00\x00\x00wK\x01s.", "holds no tensors"),
        (b"\x80\x02K", "truncated or corrupt"),
        (b"", "truncated or corrupt"),
    ],
    ids=["offset", "stride", "repeat", "negative", "rank", "state on tensor", "numel", "no entry",
         "memo", "storage called", "state on name", "newobj", "complex", "list", "no tensor",
         "cut", "empty"],
)  # fmt: skip
def test_crafted_pickles_are_refused(tmp_path: Path, data: bytes, told: str) -> None:
    with pytest.raises(InputError, match=r"evil\.bin") as caught:
        read_torch_file(with_pickle(data, tmp_path / "evil.bin"))
    assert told in str(caught.value)


def test_expanded_tensor_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = save({"w": torch.ones(1).expand(7)}, tmp_path / "x.bin")
    with pytest.raises(InputError, match="contiguous"):
        read_torch_file(path)


@both_formats
def test_truncated_file(tmp_path: Path, zipped: bool) -> None:
    path = save(torch.nn.Linear(20, 20).state_dict(), tmp_path / "x.bin", zipped)
    whole = path.read_bytes()
    for kept in (len(whole) - 1, len(whole) * 3 // 4, len(whole) // 2, 200, 30):
        path.write_bytes(whole[:kept])
        with pytest.raises(InputError, match=r"x\.bin: .*(truncated|not a PyTorch)"):
            read_torch_file(path)


def test_changed_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for zipped in (True, False):
        whole = save(torch.nn.Linear(3, 3).state_dict(), tmp_path / "x.bin", zipped).read_bytes()
        for _ in range(150):
            data = bytearray(whole)
            for place in random.integers(0, min(len(data), 900), 3):
                data[place] = random.integers(256)
            (tmp_path / "y.bin").write_bytes(data)
            try:
                read_torch_file(tmp_path / "y.bin")
            except InputError as error:
                assert "y.bin" in str(error)  # noqa: PT017


def test_legacy_storage_that_lies_about_its_size(tmp_path: Path) -> None:
    path = save({"w": torch.ones(4)}, tmp_path / "x.bin", zipped=False)
    size = struct.pack("<q", 4)
    data = path.read_bytes()
    assert data.count(size) == 1
    path.write_bytes(data.replace(size, struct.pack("<q", 1 << 60)))
    with pytest.raises(InputError, match="truncated or corrupt"):
        read_torch_file(path)


def test_what_is_no_weight_file(tmp_path: Path) -> None:
    text = tmp_path / "text.bin"
    text.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(InputError, match=r"text\.bin: not a PyTorch weight file"):
        read_torch_file(text)
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a.txt", "hello")
    with pytest.raises(InputError, match="without data"):
        read_torch_file(other)
    packed = tmp_path / "packed.bin"
    source = save({"w": torch.ones(4)}, tmp_path / "x.bin")
    with (
        zipfile.ZipFile(source) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(InputError, match="compressed"):
        read_torch_file(packed)
    with pytest.raises(InputError, match="cannot be read"):
        read_torch_file(tmp_path / "absent.bin")
    with pytest.raises(InputError, match="cannot be read"):
        read_torch_file(tmp_path)

"""Files of torch read without it: bit for bit, without code, and within limits of work."""

from __future__ import annotations

import io
import os
import pickle
import struct
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
def test_state_dict_with_metadata_and_parameters(tmp_path: Path, zipped: bool) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    state = module.state_dict()
    state["parameter"] = torch.nn.Parameter(torch.ones(2))
    assert hasattr(state, "_metadata")  # the attribute that makes the pickle use BUILD
    for protocol in (2, 3, 4):
        path = save(state, tmp_path / "x.bin", zipped, protocol)
        assert_same(read_torch_file(path), state)


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
        # Protocol 0 writes text operations; those are refused before any name is looked up.
        text = text.replace("__builtin__.", "builtins.")  # its name in protocols 0 to 2
        assert forbidden in text or (protocol == 0 and "operation" in text), text


# ---------------------------------------------------------------------- files that lie

TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
)
HOOKS = b"\x89ccollections\nOrderedDict\n)R"
KEY = b"\x80\x02}X\x01\x00\x00\x00w"
ONE = b"K\x00K\x01\x85K\x01\x85" + HOOKS  # the first element of a storage


def tensor(offset: bytes, size: bytes, stride: bytes) -> bytes:
    return KEY + TENSOR + offset + size + stride + HOOKS + b"tR"


def test_hand_written_pickle_is_read(tmp_path: Path) -> None:
    data = tensor(b"K\x01", b"K\x03\x85", b"K\x01\x85") + b"s."
    found = read_torch_file(with_pickle(data, tmp_path / "x.bin"))
    np.testing.assert_array_equal(found["w"], np.ones(3, np.float32))


CRAFTED = {
    "offset": tensor(b"K\x02", b"K\x03\x85", b"K\x01\x85") + b"s.",
    "stride": tensor(b"K\x00", b"K\x03\x85", b"K\x02\x85") + b"s.",
    "repeat": tensor(b"K\x00", b"J\xff\xff\xff\x7f\x85", b"K\x00\x85") + b"s.",
    "negative": tensor(b"K\x00", b"K\x03\x85", b"J\xff\xff\xff\xff\x85") + b"s.",
    "rank": tensor(b"K\x00", b"K\x03\x85", b"K\x01K\x01\x86") + b"s.",
    "list as size": KEY + TENSOR + b"K\x00](K\x01K\x02e\x85K\x01\x85" + HOOKS + b"tRs.",
    "state on tensor": tensor(b"K\x00", b"K\x03\x85", b"K\x01\x85")
    + b"}X\x06\x00\x00\x00strideNsbs.",
    "numel": KEY + TENSOR.replace(b"K\x04tQ", b"K\x05tQ") + ONE + b"tRs.",
    "no entry": KEY + TENSOR.replace(b"\x000X", b"\x009X") + ONE + b"tRs.",
    "memo": b"\x80\x02}r\xff\xff\xff\x7f.",
    "storage called": b"\x80\x02ctorch\nFloatStorage\n)R.",
    "state on name": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x04\x00\x00\x00callNsb.",
    "newobj": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
    "complex": b"\x80\x02ctorch\nComplexFloatStorage\n.",
    "list": b"\x80\x02]K\x01a.",
    "no tensor": b"\x80\x02}X\x01\x00\x00\x00wK\x01s.",
    "cut": b"\x80\x02K",
    "empty": b"",
    **{
        f"broken stack {i}": b"\x80\x02" + data
        for i, data in enumerate((b"a.", b"h\x05.", b"t.", b"(\x86.", b"q\x00."))
    },
    "two sizes of a storage": KEY + TENSOR + ONE + b"tRsX\x01\x00\x00\x00v"
    + TENSOR.replace(b"K\x04tQ", b"K\x03tQ") + ONE + b"tRs.",
    "keys that are no names": b"\x80\x02}K\x01K\x02\x86K\x01s.",
    # Hashing this key overflows the stack, hashing the next one takes 2^60 steps.
    "deep key": b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",
    "shared key": b"\x80\x02})q\x00" + b"h\x00\x86q\x00" * 60 + b"K\x01s.",
    # Python 2 wrote an OrderedDict's items so: [["w", 1]].
    "key in an argument": b"\x80\x02ccollections\nOrderedDict\n]]K\x01\x85aK\x01aa\x85R.",
    # As Python writes lists and dictionaries: a walk over these takes 2^60 steps.
    "shared lists": b"\x80\x02(]q\x00"
    + b"".join(b"]q%c(h%ch%ce" % (i, i - 1, i - 1) for i in range(1, 60)) + b"t.",
    "shared dictionaries": b"\x80\x02(}q\x00"
    + b"".join(b"}q%c(K\x01h%cK\x02h%cu" % (i, i - 1, i - 1) for i in range(1, 60)) + b"t.",
    "deep lists in a list": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "deep key of a storage": b"\x80\x02](" + b")" + b"\x85" * 200_000 + b"e.",
    "deep lists": b"\x80\x02(]q\x00"
    + b"".join(b"]q%ch%ca" % (i, i - 1) for i in range(1, 70)) + b"t.",
    # The outer lists are filled first, with lists that are still empty; or a list with itself.
    "filled later": b"\x80\x02(" + b"".join(b"]q%c" % i for i in range(60))
    + b"".join(b"h%c(h%ch%ce" % (i, i - 1, i - 1) for i in range(59, 0, -1)) + b"t.",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a list within itself": b"\x80\x02]q\x00]h\x00aa.",
}  # fmt: skip


@both_wraps
def test_crafted_pickles_are_refused(tmp_path: Path, wrap: Callable[..., Path]) -> None:
    for data in CRAFTED.values():
        refused(wrap(data, tmp_path / "evil.bin"))


def test_a_list_that_is_filled_before_it_is_used_is_fine(tmp_path: Path) -> None:
    twice = b"\x80\x02(]q\x00K\x01ah\x00h\x00t."
    items = b"\x80\x02ccollections\nOrderedDict\n]]X\x01\x00\x00\x00waK\x01aa\x85R."
    for data in (twice, items):  # the second as Python 2 wrote an OrderedDict's items
        assert "no tensors" in refused(with_pickle(data, tmp_path / "d.bin"))


def test_objects_that_are_named_often_take_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk over each, or a copy of each, would take 10^10 steps."""
    n = 100_000
    keys = b"".join(b"J" + struct.pack("<i", i) + b"h\x00" for i in range(n))
    data = b"\x80\x02}q\x00(" + keys + b"u."  # a dictionary of itself
    assert "no tensors" in refused(with_pickle(data, tmp_path / "a.bin"))
    monkeypatch.setattr(torch_checkpoint, "MOST_ITEMS", 1000)
    items = b"\x80\x02](K\x01K\x02\x86K\x03K\x04\x86e\x85q\x00]("
    data = items + b"ccollections\nOrderedDict\nh\x00R" * 501 + b"e."
    assert "1000" in refused(with_pickle(data, tmp_path / "b.bin"))


def test_entries_that_overlap(tmp_path: Path) -> None:
    path = save({"w": torch.ones(1000)}, tmp_path / "a.bin")
    with zipfile.ZipFile(path, "a") as archive:
        (weights,) = [entry for entry in archive.filelist if entry.filename.endswith("data/0")]
        archive.filelist += [weights] * 50
        archive._didModify = True  # type: ignore[attr-defined]  (the directory is written again)
    refused(path)


def test_many_looks_at_one_storage(tmp_path: Path) -> None:
    """Each would be copied: a file of 200 KB asked for 40 MB, one of 2 GB for all there is."""
    base = torch.ones(100, 100)
    many = {f"w{i}": base.T for i in range(1000)}
    for tensors in (many, {"w": torch.ones(1).expand(7)}):
        assert "contiguous" in refused(save(tensors, tmp_path / "a.bin"))
    tied = save({f"w{i}": base for i in range(1000)}, tmp_path / "b.bin")  # no copies: fine
    assert len(read_torch_file(tied)) == 1000


def test_legacy_storage_that_lies_about_its_size(tmp_path: Path) -> None:
    path, size = save({"w": torch.ones(4)}, tmp_path / "x.bin", zipped=False), struct.pack("<q", 4)
    data = path.read_bytes()
    assert data.count(size) == 1
    path.write_bytes(data.replace(size, struct.pack("<q", 1 << 60)))
    refused(path)


@both_formats
def test_truncated_or_changed_bytes_never_escape_as_another_error(
    tmp_path: Path, zipped: bool
) -> None:
    random = np.random.default_rng(0)
    path = save(torch.nn.Linear(20, 20).state_dict(), tmp_path / "x.bin", zipped)
    whole = path.read_bytes()
    for kept in (len(whole) - 1, len(whole) * 3 // 4, len(whole) // 2, 200, 30):
        path.write_bytes(whole[:kept])
        refused(path)
    for _ in range(150):
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
    source = save({"w": torch.ones(4)}, tmp_path / "x.bin")
    packed = zipfile.ZipFile(tmp_path / "packed.bin", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(source) as old, packed as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    for name in ("text.bin", "other.zip", "packed.bin", "absent.bin"):
        refused(tmp_path / name)
    refused(tmp_path)

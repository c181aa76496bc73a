"""Small files that ask for a lot: refused in one sentence, by the limits of the reader."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from qrag_jax.errors import InputError
from qrag_jax.models.files import pickle_scan, torch_checkpoint
from qrag_jax.models.files.torch_checkpoint import read_torch_file
from tests.models.files.test_torch_checkpoint import (
    HOOKS,
    KEY,
    TENSOR,
    as_legacy,
    save,
    with_pickle,
)

NESTED = b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s."  # hashing it overflows the stack
SHARED = b"\x80\x02})q\x00" + b"h\x00\x86q\x00" * 60 + b"K\x01s."  # hashing takes 2^60 steps


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_torch_file(path)
    told = str(caught.value)
    assert path.name in told
    assert "\n" not in told
    assert len(told) < 700
    return told


@pytest.mark.parametrize("wrap", [with_pickle, as_legacy])
def test_nested_and_shared_objects(wrap, tmp_path: Path) -> None:
    """As keys of a dictionary they are hashed: a crash of the interpreter, and no end."""
    assert "nests its objects more than 64 deep" in refused(wrap(NESTED, tmp_path / "a.bin"))
    assert "holds more than 10000000 objects" in refused(wrap(SHARED, tmp_path / "b.bin"))
    of_two = b"\x80\x02}K\x01K\x02\x86K\x01s."
    assert "keys are not plain" in refused(wrap(of_two, tmp_path / "c.bin"))


@pytest.mark.parametrize("wrap", [with_pickle, as_legacy])
def test_shared_objects_that_were_memoised_while_they_were_empty(wrap, tmp_path: Path) -> None:
    """As Python writes lists and dictionaries: a walk over these takes 2^60 steps."""
    lists = b"\x80\x02(]q\x00" + b"".join(b"]q%c(h%ch%ce" % (i, i - 1, i - 1) for i in range(1, 60))
    assert "holds more than 10000000 objects" in refused(wrap(lists + b"t.", tmp_path / "a.bin"))
    dicts = b"\x80\x02(}q\x00" + b"".join(
        b"}q%c(K\x01h%cK\x02h%cu" % (i, i - 1, i - 1) for i in range(1, 60)
    )
    assert "holds more than 10000000 objects" in refused(wrap(dicts + b"t.", tmp_path / "b.bin"))
    deep = b"\x80\x02(]q\x00" + b"".join(b"]q%ch%ca" % (i, i - 1) for i in range(1, 70))
    assert "nests its objects more than 64 deep" in refused(wrap(deep + b"t.", tmp_path / "c.bin"))


def test_objects_that_are_filled_after_their_first_use(tmp_path: Path) -> None:
    """The outer lists are filled first, with lists that are still empty; or a list with itself."""
    later = b"\x80\x02(" + b"".join(b"]q%c" % i for i in range(60))
    later += b"".join(b"h%c(h%ch%ce" % (i, i - 1, i - 1) for i in range(59, 0, -1)) + b"t."
    told = "fills an object that it has used already"
    assert told in refused(with_pickle(later, tmp_path / "a.bin"))
    assert told in refused(with_pickle(b"\x80\x02]q\x00h\x00a.", tmp_path / "b.bin"))
    within = b"\x80\x02]q\x00]h\x00aa."
    assert told in refused(with_pickle(within, tmp_path / "c.bin"))
    twice = b"\x80\x02(]q\x00K\x01ah\x00h\x00t."  # filled before it is used: fine
    assert "holds no tensors" in refused(with_pickle(twice, tmp_path / "d.bin"))


def test_keys_that_are_given_as_an_argument(tmp_path: Path) -> None:
    """Python 2 wrote an OrderedDict's items so: [["w", 1]]; keys that are hashed long are not."""
    begin = b"\x80\x02ccollections\nOrderedDict\n]]"
    good = begin + b"X\x01\x00\x00\x00waK\x01aa\x85R."
    assert "holds no tensors" in refused(with_pickle(good, tmp_path / "a.bin"))
    bad = begin + b"K\x01\x85aK\x01aa\x85R."
    assert "keys are not plain" in refused(with_pickle(bad, tmp_path / "b.bin"))


def test_too_many_objects_and_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = b"\x80\x02]" + b"]a" * 500 + b"."
    monkeypatch.setattr(pickle_scan, "MAX_OPERATIONS", 1000)
    assert "more than 1000 operations" in refused(with_pickle(lists, tmp_path / "a.bin"))
    monkeypatch.setattr(pickle_scan, "MAX_OPERATIONS", 10_000)
    assert "holds no tensors" in refused(with_pickle(lists, tmp_path / "b.bin"))
    monkeypatch.setattr(pickle_scan, "MAX_OBJECTS", 300)
    assert "more than 300 objects" in refused(with_pickle(lists, tmp_path / "c.bin"))


def test_large_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\x80\x02X" + (2**21).to_bytes(4, "little") + b"a" * 2**21 + b"."
    monkeypatch.setattr(pickle_scan, "MAX_BYTES", 2**20)
    monkeypatch.setattr(torch_checkpoint, "MAX_BYTES", 2**20)
    assert "data.pkl has more than 1 MiB" in refused(with_pickle(data, tmp_path / "a.bin"))
    assert "its pickle has more than 1 MiB" in refused(as_legacy(data, tmp_path / "b.bin"))


def test_broken_stack(tmp_path: Path) -> None:
    for data in (
        b"\x80\x02a.",
        b"\x80\x02h\x05.",
        b"\x80\x02t.",
        b"\x80\x02(\x86.",
        b"\x80\x02q\x00.",
    ):
        assert "truncated or corrupt" in refused(with_pickle(data, tmp_path / "a.bin"))


def test_one_storage_with_two_sizes_is_not_read_twice(tmp_path: Path) -> None:
    one = TENSOR + b"K\x00K\x03\x85K\x01\x85" + HOOKS + b"tRs"
    other = one.replace(b"K\x04tQ", b"K\x03tQ")
    data = KEY + one + b"X\x01\x00\x00\x00v" + other + b"."
    assert "two sizes or dtypes" in refused(with_pickle(data, tmp_path / "a.bin"))


def test_entries_that_overlap(tmp_path: Path) -> None:
    path = save({"w": torch.ones(1000)}, tmp_path / "a.bin")
    with zipfile.ZipFile(path, "a") as archive:
        (weights,) = [entry for entry in archive.filelist if entry.filename.endswith("data/0")]
        archive.filelist += [weights] * 50
        archive._didModify = True  # type: ignore[attr-defined]  (the directory is written anew)
    assert "overlap" in refused(path)


def test_many_looks_at_one_storage(tmp_path: Path) -> None:
    """Each would be copied: a file of 200 KB asked for 40 MB, one of 2 GB for all there is."""
    base = torch.ones(100, 100)
    path = save({f"w{i}": base.T for i in range(1000)}, tmp_path / "a.bin")
    assert "save them with .contiguous()" in refused(path)
    tied = save({f"w{i}": base for i in range(1000)}, tmp_path / "b.bin")  # no copies: fine
    assert len(read_torch_file(tied)) == 1000


def test_sizes_that_are_no_numbers_are_not_printed(tmp_path: Path) -> None:
    """A list may be long."""
    data = KEY + TENSOR + b"K\x00](K\x01K\x02e\x85K\x01\x85" + HOOKS + b"tRs."
    assert "a tensor with list in its size" in refused(with_pickle(data, tmp_path / "a.bin"))

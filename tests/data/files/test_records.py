"""Reading record files, and every way in which one can be broken."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from qrag_jax.data.files.records import read_records, split_files
from qrag_jax.errors import InputError
from tests.data.real_data import real

RECORDS = [{"_id": "a", "n": 1}, {"_id": "b", "n": "zwölf\u2028drei"}, {"_id": "c", "n": None}]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def message(path: Path) -> str:
    """The one-sentence error that reading `path` to the end raises."""
    with pytest.raises(InputError) as caught:
        list(read_records(path))
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.json", "r.json.gz"])
def test_json_lines_are_read_under_every_name(tmp_path: Path, name: str) -> None:
    read = list(read_records(write(tmp_path / name, LINES)))
    assert read == [(f"{name}:{number}", record) for number, record in enumerate(RECORDS, 1)]


@pytest.mark.parametrize("name", ["r.json", "r.json.gz"])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_document_is_a_list_or_has_one_under_data(
    tmp_path: Path, name: str, indent: int | None, wrapped: bool
) -> None:
    value = {"version": 1, "data": RECORDS} if wrapped else RECORDS
    path = write(tmp_path / name, json.dumps(value, indent=indent).encode())
    read = list(read_records(path))
    assert read == [(f"{name}:{number}", record) for number, record in enumerate(RECORDS, 1)]


@pytest.mark.parametrize("name", ["r.jsonl", "r.json"])
def test_byte_order_mark_blank_lines_and_windows_line_ends_are_no_matter(
    tmp_path: Path, name: str
) -> None:
    data = b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\r\n")
    read = list(read_records(write(tmp_path / name, data)))
    assert [record for _, record in read] == RECORDS
    assert [where for where, _ in read] == [f"{name}:1", f"{name}:3", f"{name}:5"]


def test_json_lines_are_streamed(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", LINES + b"broken\n")
    records = read_records(path)
    assert [next(records)[1] for _ in RECORDS] == RECORDS
    with pytest.raises(InputError, match="line 4"):
        next(records)


def test_missing_file(tmp_path: Path) -> None:
    assert "does not exist" in message(tmp_path / "none.jsonl")


def test_other_format_by_name(tmp_path: Path) -> None:
    assert ".jsonl.gz" in message(write(tmp_path / "train.pdf", b"PDF"))


@pytest.mark.parametrize("data", [b"", b" \n\n"])
@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.json", "r.json.gz"])
def test_empty_file(tmp_path: Path, name: str, data: bytes) -> None:
    assert "is empty" in message(write(tmp_path / name, data))


def test_file_of_no_bytes_named_gzip(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    path.touch()
    assert "is empty" in message(path)


def test_empty_list(tmp_path: Path) -> None:
    assert "is empty" in message(write(tmp_path / "r.json", b"[]"))


def test_truncated_gzip_names_the_last_whole_record(tmp_path: Path) -> None:
    # Stored, not deflated, so that the cut leaves exactly the first two lines and half the third.
    whole = gzip.compress(LINES, compresslevel=0)
    header = whole.index(LINES)
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(whole[: header + len(LINES) - 5])
    assert "truncated after record 2; download it again" in message(path)
    path.rename(tmp_path / "r.json.gz")
    assert "truncated after record 0; download it again" in message(tmp_path / "r.json.gz")


def test_corrupt_gzip(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(LINES))
    whole[len(whole) // 2] ^= 0xFF
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(bytes(whole))
    assert "download it again" in message(path)


def test_plain_text_named_gzip(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(LINES)
    assert "is not sound gzip after record 0" in message(path)


def test_gzip_named_plain(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(gzip.compress(LINES))
    assert "line 1, is not UTF-8" in message(path)


def test_not_utf8_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", LINES + '{"_id": "Zürich"}'.encode("latin-1"))
    assert "line 4, is not UTF-8 at byte 10" in message(path)
    path = write(tmp_path / "r.json", '[{"_id": "Zürich"}]'.encode("latin-1"))
    assert "is not UTF-8 at byte 11" in message(path)


@pytest.mark.parametrize("broken", [b'{"_id": "d", "n"\n', b"{'_id': 'd'}\n", b"[" * 100_000])
def test_first_broken_line_is_named(tmp_path: Path, broken: bytes) -> None:
    text = message(write(tmp_path / "r.jsonl", LINES + broken + b"also broken\n"))
    assert "line 4, is not JSON" in text


def test_broken_document_names_the_place(tmp_path: Path) -> None:
    text = b'[\n{"_id": "a"},\n{"_id": "b"\n'
    assert "is not JSON (" in message(write(tmp_path / "r.json", text))
    assert "at line 4 column 1)" in message(write(tmp_path / "r.json", text))


@pytest.mark.parametrize("value", [7, "text", {"records": RECORDS, "version": 1}])
def test_document_without_a_list(tmp_path: Path, value: object) -> None:
    path = write(tmp_path / "r.json", json.dumps(value, indent=1).encode())
    assert 'under "data"' in message(path)


def test_record_that_is_no_object(tmp_path: Path) -> None:
    assert "record 2, is not a JSON object" in message(write(tmp_path / "r.json", b'[{"a": 1}, 3]'))
    assert "record 1, is not a JSON object" in message(write(tmp_path / "r.jsonl", b"[]\n"))


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"x")


def names(files: list[Path]) -> list[str]:
    return [file.name for file in files]


OFFICIAL = ("hotpot_train_v1.1.json",)


def test_a_file_is_its_own_split(tmp_path: Path) -> None:
    touch(tmp_path, "mine.jsonl")
    assert split_files(tmp_path / "mine.jsonl", "dev", OFFICIAL) == [tmp_path / "mine.jsonl"]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".json.gz", ".jsonl.gz"])
def test_the_official_file_is_read_alone(tmp_path: Path, suffix: str) -> None:
    touch(tmp_path, "hotpot_train_v1.1" + suffix, "train_more.jsonl", "dev.jsonl")
    assert names(split_files(tmp_path, "train", OFFICIAL)) == ["hotpot_train_v1.1" + suffix]


def test_else_all_files_that_begin_with_the_split(tmp_path: Path) -> None:
    touch(tmp_path, "train_titles.jsonl.gz", "train.json", "train.txt", "open_train.jsonl")
    touch(tmp_path, "dev.jsonl.gz", "train_b.json.gz", "train_c.jsonl.gz.part")
    (tmp_path / "train_folder.json").mkdir()
    found = names(split_files(tmp_path, "train", OFFICIAL))
    assert found == ["train.json", "train_b.json.gz", "train_titles.jsonl.gz"]
    assert names(split_files(tmp_path, "dev", OFFICIAL)) == ["dev.jsonl.gz"]


def test_a_file_and_its_gzip_are_read_once(tmp_path: Path) -> None:
    touch(tmp_path, "train.jsonl", "train.jsonl.gz", "hotpot_dev.json", "hotpot_dev.json.gz")
    assert names(split_files(tmp_path, "train", OFFICIAL)) == ["train.jsonl"]
    assert names(split_files(tmp_path, "dev", ("hotpot_dev.json",))) == ["hotpot_dev.json"]


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere does not exist"):
        split_files(tmp_path / "nowhere", "train", OFFICIAL)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"hotpot_train_v1\.1\.json"):
        split_files(tmp_path, "train", OFFICIAL)


def test_folder_without_the_split_names_both_sides(tmp_path: Path) -> None:
    touch(tmp_path, "dev.jsonl", "notes.md", *(f"z{number}" for number in range(9)))
    with pytest.raises(InputError) as caught:
        split_files(tmp_path, "train", OFFICIAL)
    text = str(caught.value)
    assert "looked for hotpot_train_v1.1.json and train*.jsonl, .json, .csv (.gz) or" in text
    assert "found dev.jsonl, notes.md, z0" in text
    assert text.endswith("and 3 more")


def test_real_folder() -> None:
    folder = real("hotpotqa")
    train = split_files(folder, "train", OFFICIAL)
    dev = split_files(folder, "dev", ("hotpot_dev_distractor_v1.json",))
    assert names(train) == ["train.jsonl.gz", "train_titles.jsonl.gz"]
    assert names(dev) == ["dev.jsonl.gz", "dev_titles.jsonl.gz"]
    assert [sum(1 for _ in read_records(file)) for file in (*train, *dev)] == [991, 244, 189, 465]
    wiki = split_files(real("2wikimultihopqa"), "dev", ("dev.json",))
    assert names(wiki) == ["dev.jsonl.gz"]

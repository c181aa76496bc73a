from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qrag_jax.data.files import strict_json
from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_files


def loaded(folder: Path, text: str | bytes) -> object:
    path = folder / "file.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return strict_json.load(path)


def test_a_value_is_read_as_it_was_written(tmp_path: Path) -> None:
    value = {"a": [1, 1.0, 0.1 + 0.2, True, None, "wo \udc80 東京\u2028"], "b": {"": -1e-308}}
    text = strict_json.dumps(value)
    assert text.isascii()
    again = loaded(tmp_path, text)
    assert again == value
    assert repr(again) == repr(value)
    assert loaded(tmp_path, b"\xef\xbb\xbf[]") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'a': 1}", "is Python from line 1 column 2 on, and not JSON; it is not evaluated"),
        ('{"a": None}', "is Python from line 1 column 7"),
        ('{"a":\n [True]}', "is Python from line 2 column 3"),
        ('[("a", 1)]', "is Python from line 1 column 2"),
        ('{"a": [dspy.Example({})]}', "is Python from line 1 column 8"),
        ("__import__('os').abort()", "is Python from line 1 column 1"),
        ('{"a": 1,}', "is not JSON ("),
        ('{"a": 1 "b": 2}', "is not JSON (Expecting ',' delimiter at line 1 column 9)"),
        ("", "is not JSON (Expecting value at line 1 column 1)"),
        ('{"a": 1, "b": 2, "a": 3}', 'is not JSON that can be used (it has the key "a" twice)'),
        ('{"a": NaN}', "it has the number NaN"),
        ('{"a": -Infinity}', "it has the number -Infinity"),
        ("[" * 100_000, "is not JSON that can be used (maximum recursion depth"),
        (b'"\xff"', "is not UTF-8 at byte 1; save it as UTF-8"),
    ],
)
def test_what_is_not_json_is_told(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        loaded(tmp_path, text)
    assert str(tmp_path / "file.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match=re.escape(f"{path} is no file")):
            strict_json.load(path)


def test_a_file_that_is_too_large_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_files, "MAX_WHOLE_BYTES", 10)
    with pytest.raises(InputError, match="too much to read whole"):
        loaded(tmp_path, json.dumps("a long text"))


def test_numbers_that_are_not_finite_are_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        strict_json.dumps([float("inf")])


def test_keys() -> None:
    strict_json.check_keys("here", {"a": 1, "c": 2}, ("a",), ("b", "c"))
    for value, message in (
        ([1], "here is [1], no object; write one."),
        ({}, 'here has no key "a"; write a.'),
        ({"a": 1, "x": 2}, 'here has the key "x", which is none of a, b; drop it.'),
        ({"a": 1, "x" * 99: 2}, 'here has the key "' + "x" * 58 + "…, which is none of a, b"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            strict_json.check_keys("here", value, ("a",), ("b",))


def test_parts() -> None:
    value = {"text": "t", "texts": ["a", 1], "number": "1", "list": ["b"], "huge": 10**400}
    assert strict_json.text_of("here", value, "text") == "t"
    assert strict_json.texts_of("here", value, "list") == ("b",)
    assert strict_json.number_of("here", value, "huge") == 10**400
    for read, name, message in (
        (strict_json.text_of, "list", 'here has list ["b"], no text; write one.'),
        (strict_json.texts_of, "texts", "here has 1 in texts, no text; write texts."),
        (strict_json.list_of, "text", 'here has text "t", no list; write one.'),
        (strict_json.number_of, "number", 'here has number "1", no finite number; write one.'),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            read("here", value, name)
    for wrong in (True, float("inf"), None):
        with pytest.raises(InputError, match="no finite number"):
            strict_json.number_of("here", {"n": wrong}, "n")

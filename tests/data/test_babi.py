"""bAbI's files, and generated stories against a slow reader that knows the sentences alone."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from qrag_jax.data.babi import Story, read_stories, story_file
from qrag_jax.errors import InputError

TEXT = """\
1 Ada went to the hall.
2 Ada got the lamp there.
3 Where is Ada? \thall\t1
4 Ada moved to the yard.
5 Where is the lamp? \tyard\t4 2
1 Bo is in the hall.
2 Where is Bo?\thall\t1
"""


def write(folder: Path, text: str, name: str = "qa1_train.txt") -> Path:
    path = folder / name
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def test_one_story_a_question(tmp_path: Path) -> None:
    one, two = "Ada went to the hall.", "Ada got the lamp there."
    expected = [
        Story((one, two), "Where is Ada?", "hall", (0,)),
        Story((one, two, "Ada moved to the yard."), "Where is the lamp?", "yard", (2, 1)),
        Story(("Bo is in the hall.",), "Where is Bo?", "hall", (0,)),
    ]
    assert read_stories(write(tmp_path, TEXT)) == expected
    assert read_stories(write(tmp_path, TEXT, "a.txt.gz")) == expected
    windows = "\ufeff" + TEXT.replace("\n", "\r\n") + "\r\n"
    assert read_stories(write(tmp_path, windows)) == expected


def test_file_of_a_split(tmp_path: Path) -> None:
    (tmp_path / "babi").mkdir()  # under a parent that several sources share
    for task, split, name, part in (
        ("qa11", "train", "qa11_train.txt", "train"),
        ("qa11", "dev", "qa11_test.txt.gz", "test"),
        ("qa11", "dev", "qa11_valid.txt", "valid"),  # goes before the test
        ("qa1", "train", "qa1_single-supporting-fact_train.txt", "train"),
        ("qa2", "train", "babi/qa2_train.txt", "train"),
    ):
        path = write(tmp_path, TEXT, name)
        assert story_file(tmp_path, task, split) == (path, part)


def test_bad_lines_are_named(tmp_path: Path) -> None:
    for text, line in (
        ("Ada went.\n", "1"),
        ("1 Ada went.\n2\n", "2"),
        ("2 Ada went.\n", "1"),
        ("1 A.\n2 B.\n2 C.\n", "3"),
        ("1 A.\n2 Where is A?\n", "2"),
        ("1 A.\n2 Where is A?\t\t1\n", "2"),
        ("1 A.\n2 \thall\t1\n", "2"),
        ("1 A.\n2 Where?\thall\t2\n", "2"),
        (TEXT + "3 Where?\thall\t2\n", "8"),
        ("1 Ada went.\n", ""),
    ):
        path = write(tmp_path, text)
        with pytest.raises(InputError, match=rf"{re.escape(str(path))}.*{line}"):
            read_stories(path)
    for task, named in (("qa1", r"qa1_valid\.txt"), ("qa21", "'qa21'")):
        with pytest.raises(InputError, match=named):
            story_file(tmp_path, task, "dev")

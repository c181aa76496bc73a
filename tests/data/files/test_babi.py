"""bAbI story files: what a question becomes, and every way in which a line can be wrong."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from qrag_jax.data.files.babi import TASKS, Story, read_stories, story_file
from qrag_jax.errors import InputError
from tests.data.real_data import real

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


def refusal(tmp_path: Path, text: str) -> str:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_stories(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert message.endswith(".")
    return message


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ada went.\n", "line 1, is not a number and a text; start it with its story's id"),
        ("1 Ada went.\n2\n", "line 2, is not a number and a text"),
        ("2 Ada went.\n", "line 1, has the id 2; the first story must start at 1"),
        ("1 A.\n2 B.\n2 C.\n", "line 3, has the id 2 after 2; number a story's lines upwards"),
        ("1 A.\n2 Where is A?\n", "line 2, is a question without an answer; write question, tab"),
        ("1 A.\n2 Where is A?\t\t1\n", "line 2, is a question line without answer"),
        ("1 A.\n2 Where is A?\thall\n", "line 2, is a question line without supporting ids"),
        ("1 A.\n2 \thall\t1\n", "line 2, is a question line without question"),
        ("1 A.\n2 Where?\thall\t7\n", "line 2, names the supporting id 7, which is no statement"),
        ("1 A.\n2 Where?\thall\tone\n", "line 2, names the supporting id one, which is no"),
        ("1 A.\n2 Where?\thall\t2\n", "line 2, names the supporting id 2, which is no statement"),
        (TEXT + "3 Where?\thall\t2\n", "line 8, names the supporting id 2, which is no statement"),
        ("1 Ada went.\n", "has no question; give a bAbI file"),
        ("", "has no question"),
    ],
)
def test_bad_lines(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_unreadable_files(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT * 50, "qa1_train.txt.gz")
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(InputError, match="truncated gzip"):
        read_stories(path)
    path = write(tmp_path, TEXT)
    path.write_bytes(TEXT.replace("Bo", "Bö").encode("latin-1"))
    with pytest.raises(InputError, match="line 6, is not UTF-8"):
        read_stories(path)


def test_file_of_a_split(tmp_path: Path) -> None:
    write(tmp_path, TEXT, "qa11_train.txt")
    write(tmp_path, TEXT, "qa11_test.txt.gz")
    write(tmp_path, TEXT, "qa1_single-supporting-fact_train.txt")
    write(tmp_path, TEXT, "qa1_single-supporting-fact_test.txt")
    assert story_file(tmp_path, "qa11", "train") == (tmp_path / "qa11_train.txt", "train")
    assert story_file(tmp_path, "qa11", "dev") == (tmp_path / "qa11_test.txt.gz", "test")
    official = tmp_path / "qa1_single-supporting-fact_train.txt"
    assert story_file(tmp_path, "qa1", "train") == (official, "train")
    valid = write(tmp_path, TEXT, "qa11_valid.txt")
    assert story_file(tmp_path, "qa11", "dev") == (valid, "valid")
    # Under a parent that several sources share.
    (tmp_path / "babi").mkdir()
    inner = write(tmp_path / "babi", TEXT, "qa2_train.txt")
    assert story_file(tmp_path, "qa2", "train") == (inner, "train")


def test_no_file_for_a_task(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"qa1_valid.txt"):
        story_file(tmp_path, "qa1", "dev")
    with pytest.raises(InputError, match="none does not exist"):
        story_file(tmp_path / "none", "qa1", "dev")
    with pytest.raises(InputError, match="'qa21'"):
        story_file(tmp_path, "qa21", "dev")


def test_all_tasks_of_the_real_data() -> None:
    folder = real("babi")
    support = {"qa1": 1, "qa2": 2, "qa3": 3, "qa4": 1, "qa5": 1}
    for task in TASKS:
        path, part = story_file(folder, task, "dev")
        stories = read_stories(path)
        assert part == "valid"
        assert 990 <= len(stories) <= 1010
        for story in stories:
            assert all(0 <= i < len(story.facts) for i in story.support)
            assert len(story.support) == support.get(task, len(story.support))
            assert not any("\t" in fact or fact.endswith("?") for fact in story.facts)


def test_real_support_holds_the_answer() -> None:
    for task in ("qa1", "qa2", "qa4", "qa5"):
        for story in read_stories(story_file(real("babi"), task, "train")[0]):
            assert any(story.answer in story.facts[i] for i in story.support)

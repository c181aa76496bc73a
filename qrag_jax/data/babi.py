"""Reads the story files of the bAbI tasks (Weston et al., 2015), one `Story` per question.

A line of a file is `ID sentence` or `ID question<TAB>answer<TAB>supporting ids`. Ids start again at
1 with each story. A story has several questions.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from qrag_jax.data.records import read_text, text_files
from qrag_jax.data.sample import Split
from qrag_jax.errors import InputError

TASKS = tuple(f"qa{number}" for number in range(1, 21))
FOLDER = "babi"  # name of the stories' folder in a parent folder that sources share
# The names of the parts that may serve as a split; the first one found is read. Of the official 1k
# and 10k sets only the `en-valid` forms have a validation part.
PARTS: dict[str, tuple[str, ...]] = {"train": ("train",), "dev": ("valid", "dev", "test")}

_LINE = re.compile(r"([0-9]{1,9}) +(\S.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Story:
    """One question with the statements before it.

    Attributes:
        facts: the statements before the question, in order, without the questions in between.
    """

    facts: tuple[str, ...]
    question: str
    answer: str
    support: tuple[int, ...]  # indices into `facts`, in the order of the supporting ids in the file


def story_file(folder: Path, task: str, split: Split) -> tuple[Path, str]:
    """Returns the file of a task's split, and the name of the part: train, valid, dev or test."""
    if task not in TASKS:
        raise InputError(f"the bAbI task is {task!r}; give one from qa1 to qa20.")
    if found := find_story_file(folder, task, split):
        return found
    wanted = " or ".join(f"{task}_{part}.txt" for part in PARTS[split])
    raise InputError(f"the folder {folder} has no {wanted} (or .txt.gz); put the file there.")


def find_story_file(folder: Path, task: str, split: Split) -> tuple[Path, str] | None:
    """Returns the same as `story_file`, but None if the folder has no such file.

    It finds both `qa1_train.txt` and the official `qa1_single-supporting-fact_train.txt`, gzip'd
    or not, in `folder` or in its sub-folder `babi`.
    """
    for place in (folder, folder / FOLDER):
        files = text_files(place) if place == folder or place.is_dir() else []
        for part in PARTS[split]:
            pattern = re.compile(rf"{task}(_.*)?_{part}\.txt(\.gz)?")
            found = [file for file in files if pattern.fullmatch(file.name)]
            if found:
                return found[0], part
    return None


def read_stories(path: Path) -> list[Story]:
    """Returns one story for each question of a file, in its order."""
    stories = list(_stories(path))
    if not stories:
        raise InputError(f"{path} has no question; give a bAbI file.")
    return stories


def _stories(path: Path) -> Iterator[Story]:
    facts: list[str] = []
    places: dict[str, int] = {}  # id of a statement → its index in `facts`
    last = 0
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        found = _LINE.fullmatch(line.strip())
        if not found:
            raise InputError(f"{where}, is not a number and a text; start it with its story's id.")
        this, text = int(found[1]), found[2]
        if this == 1:
            facts, places = [], {}
        elif not 0 < last < this:
            raise InputError(
                f"{where}, has the id {this} after {last}; number a story's lines from 1 upwards."
            )
        last = this
        question, *rest = (part.strip() for part in text.split("\t"))
        if not rest and not question.endswith("?"):
            places[str(this)] = len(facts)
            facts.append(question)
            continue
        answer, named = (*rest, "", "")[:2]
        if not question or not answer or not named:
            raise InputError(
                f"{where}, has not all of a question; write question, tab, answer, tab, "
                "supporting ids."
            )
        for name in named.split():
            if name not in places:
                raise InputError(
                    f"{where}, names the supporting id {name}, which is no statement before it in "
                    "its story; give the id of one."
                )
        support = tuple(places[name] for name in named.split())
        yield Story(tuple(facts), question, answer, support)

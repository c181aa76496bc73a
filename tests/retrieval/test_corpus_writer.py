"""Writers refuse bad passages, and go on where a killed one stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import corpus_writer
from qrag_jax.retrieval.corpus import INDEX, LINES, StoredCorpus
from qrag_jax.retrieval.corpus_writer import PROGRESS, CorpusWriter, write_corpus
from qrag_jax.retrieval.protocol import Passage
from tests.entry_points import ROOT


def passage(number: int) -> Passage:
    return Passage(f"id {number}", f"Text {number}.")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Passage("", "text"), r"wiki.jsonl:3"),
        (Passage(" ", "text"), r"wiki.jsonl:3"),
        (Passage("x", " \n"), r"wiki.jsonl:3"),
        (Passage("x", None), "title or text"),
        (Passage("x", "t", 3), "title or text"),
        (Passage("x", "t", "", {"f": {1, 2}}), "metadata that JSON"),
        (Passage("x", "t", "", {"f": float("nan")}), "metadata that JSON"),
    ],
)
def test_bad_passages_are_refused_and_leave_nothing(
    bad: Passage, message: str, tmp_path: Path
) -> None:
    with CorpusWriter(tmp_path) as writer:
        assert writer.add(passage(0)) == 0
        with pytest.raises(InputError, match=message):
            writer.add(bad, "wiki.jsonl:3")
        assert writer.add(passage(1)) == 1
        assert list(writer.finish()) == [passage(0), passage(1)]


def test_a_title_is_text_enough(tmp_path: Path) -> None:
    only_title = Passage("x", "", "On recursion")
    assert list(write_corpus(tmp_path, [only_title])) == [only_title]


def test_the_place_of_a_bad_passage_is_told_without_a_file(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path) as writer:
        writer.add(passage(0))
        with pytest.raises(InputError, match="passage 1"):
            writer.add(Passage("", "text"))


def test_duplicate_ids(tmp_path: Path) -> None:
    passages = [passage(number) for number in (5, 1, 2, 1, 0)]
    with pytest.raises(InputError, match="counted from 0"):
        write_corpus(tmp_path, passages)
    with pytest.raises(InputError, match="no finished corpus"):
        StoredCorpus(tmp_path)


def test_ids_that_share_a_hash_are_no_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_writer, "name_hash", lambda name: 7)
    write_corpus(tmp_path / "good", map(passage, range(4)))
    with pytest.raises(InputError, match="passages 0"):
        write_corpus(tmp_path / "bad", map(passage, (3, 1, 3)))


def test_an_empty_corpus(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no passage"):
        write_corpus(tmp_path, [])


def test_a_finished_corpus_is_not_written_over(tmp_path: Path) -> None:
    write_corpus(tmp_path, [passage(0)])
    with pytest.raises(InputError, match="holds a finished"):
        CorpusWriter(tmp_path)


def test_two_writers(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path), pytest.raises(InputError, match="written by process"):
        CorpusWriter(tmp_path)


KILLED = """
import sys
from pathlib import Path
from qrag_jax.retrieval import corpus_writer
from tests.retrieval.test_corpus_writer import passage
corpus_writer.KEEP_EVERY = 10
with corpus_writer.CorpusWriter(Path(sys.argv[1])) as writer:
    for number in range(len(writer), 38):
        writer.add(passage(number))
    writer._lines.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_killed_writer_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    with pytest.raises(InputError, match="no finished corpus"):
        StoredCorpus(folder)
    with CorpusWriter(folder) as writer:
        assert len(writer) == 30
        for number in range(len(writer), 50):
            writer.add(passage(number))
    with CorpusWriter(folder) as writer:
        assert len(writer) == 50
        again = writer.finish()
    assert not (folder / PROGRESS).exists()
    whole = write_corpus(tmp_path / "whole", map(passage, range(50)))
    assert list(again) == list(whole)
    assert again.digest == whole.digest
    again.check_content()


@pytest.mark.parametrize("name", [LINES, INDEX])
def test_a_file_shorter_than_was_noted(name: str, tmp_path: Path) -> None:
    with CorpusWriter(tmp_path) as writer:
        writer.add(passage(0))
    with (tmp_path / name).open("ab") as file:
        file.truncate(3)
    with pytest.raises(InputError, match=f"{name} is cut short"):
        CorpusWriter(tmp_path)
    (tmp_path / PROGRESS).write_text("?")
    with pytest.raises(InputError, match=r"progress.json is damaged"):
        CorpusWriter(tmp_path)

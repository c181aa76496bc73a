"""Answers on disk: read by other processes, whole after a crash, replaced when unreadable."""

from __future__ import annotations

import contextlib
import math
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm import client as client_module
from qrag_jax.llm.client import AnswerCache
from qrag_jax.llm.outcomes import Answer
from qrag_jax.llm.text.generation import Generation
from tests.llm.model_server import MakeClient, ModelServer, Reply, chat, texts

# Many at once open one file that does not exist, and write the same and different answers.
SHARE = """
import os, signal, sys
from pathlib import Path
from qrag_jax.llm.client import AnswerCache
from qrag_jax.llm.outcomes import Answer
cache = AnswerCache(Path(sys.argv[1]), print)
sys.stdin.read()
for index in range(40):
    cache.put(f"same {index}", Answer(str(index)))
    cache.put(f"{sys.argv[2]} {index}", Answer(str(index)))
os.kill(os.getpid(), signal.SIGKILL)  # what was put is kept
"""


def test_answers_are_kept_whole(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "new" / "answers.sqlite"
    answer = Answer("text ü", "3", "length", 5, 2, (7, 8), (-0.5, -math.inf))
    cache = AnswerCache(path, said.append)
    keys = [str(index) for index in range(1201)]
    for key in keys:
        cache.put(key, answer)
    cache.close()
    assert AnswerCache(path, said.append).get([*keys, "unknown"]) == dict.fromkeys(keys, answer)
    assert said == []


def test_what_is_kept_and_under_which_key(
    server: ModelServer, make_client: MakeClient, tmp_path: Path
) -> None:
    path = str(tmp_path / "answers.sqlite")
    server.script = lambda call: Reply(status=400 if call.prompt == "bad" else 200)
    client = make_client(cache=path, version="1")
    requests = [
        chat("greedy"),
        chat("sampled", temperature=0.5),
        chat("sampled by extra", extra={"temperature": 0.5}),
        chat("greedy", max_tokens=9),
        chat("bad"),
    ]
    for _ in range(2):
        client.ask_blocking(requests)
    # Failures and what is sampled are asked again.
    assert len(server.calls) == 5 + 3
    assert client.counters()["cache_hits"] == 2
    for version, calls in (("2", 9), ("1", 9)):
        make_client(cache=path, version=version).ask_blocking([chat("greedy")])
        assert len(server.calls) == calls


def test_an_unreadable_reply_is_asked_again_and_counted(
    server: ModelServer, make_client: MakeClient, tmp_path: Path, said: list[str]
) -> None:
    cache, generation = str(tmp_path / "kept" / "answers.sqlite"), Generation()
    replies = {"broken?": "...", "bare?": "Oslo", "marked?": "Final answer: Oslo"}
    requests = [generation.request((("user", q),), generation.reads_answer) for q in replies]
    server.script = lambda call: Reply(replies[call.prompt])
    first = make_client(cache=cache)
    first.ask_blocking(requests)
    first.close()
    counts = first.counters()
    assert (counts["unread"], counts["unmarked"]) == (1, 1)
    assert any(cache in line for line in said)
    server.script = lambda call: Reply("Final answer: Bergen")  # the server is mended
    mended = make_client(cache=cache).ask_blocking(requests)
    assert texts(mended) == ["Final answer: Bergen", "Oslo", "Final answer: Oslo"]
    assert len(server.calls) == 4


def test_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARE, str(path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in "abc"
    ]
    assert [process.communicate("", timeout=60)[0] for process in processes] == [""] * 3
    assert {process.returncode for process in processes} == {-signal.SIGKILL}
    keys = [f"{n} {i}" for n in ("same", "a", "b", "c") for i in range(40)]
    assert len(AnswerCache(path, print).get(keys)) == 160


def test_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    text, table = tmp_path / "text.sqlite", tmp_path / "important.sqlite"
    text.write_bytes(b"this is no database, " * 400)
    with sqlite3.connect(table) as connection:
        connection.execute("CREATE TABLE important (x)")
    for path in (text, table):
        before = path.read_bytes()
        with pytest.raises(InputError, match=f"cache={path}"):
            AnswerCache(path, print)
        assert path.read_bytes() == before


def test_a_locked_file_stops_nothing_and_is_used_again(
    make_client: MakeClient, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_BUSY_SECONDS", 0.3)
    path = tmp_path / "answers.sqlite"
    client = make_client(cache=str(path))
    client.ask_blocking([chat("kept before")])
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        # Reading goes on; what is new is not kept, which is counted.
        answers = client.ask_blocking([chat("kept before"), chat("new")])
        assert texts(answers) == ["echo: kept before", "echo: new"]
        assert client.counters()["cache_hits"] == 1
    for hits in (1, 2):
        client.ask_blocking([chat("new")])
        assert client.counters()["cache_hits"] == hits
    assert client.counters()["cache_skipped"] == 1
    assert len(said) == 1
    assert str(path) in said[0]
    with sqlite3.connect(path) as connection:  # as a disk that fails
        connection.execute("DROP TABLE answers")
    for _ in range(2):
        assert texts(client.ask_blocking([chat("new")])) == ["echo: new"]
    assert len(said) == 1

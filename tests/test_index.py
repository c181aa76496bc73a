"""The command `index`: killed and broken off, full disks, runs and exports, bad input."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.exported import chunk_digest
from qrag_jax.retrieval.manifest import read_manifest
from qrag_jax.systems.deployed import noted
from tests.devices import mesh_of
from tests.disks import small_disk
from tests.entry_points import Commands, refusal
from tests.systems.corpora import tree, write_corpus_file, write_tower

pytestmark = pytest.mark.long

COUNT, PART = 600, 8
PARTS = COUNT // PART
FLAGS = ("--compute=float32", f"--part={PART}", "--workers=0")


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tower(tmp_path_factory.mktemp("tower") / "model")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus_file(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", COUNT)


def arguments(source: Path, tower: Path, out: Path) -> list[str]:
    return [f"--corpus={source}", f"--encoder={tower}", f"--index={out}", *FLAGS]


@pytest.fixture(scope="module")
def unbroken(
    commands: Commands, source: Path, tower: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("unbroken") / "index"
    return out, commands.succeed("index", *arguments(source, tower, out))


def finished_parts(out: Path) -> set[Path]:
    return set((out / "exact").glob("vectors.*.json"))


def broken_off(commands: Commands, given: list[str], out: Path, at: int, how: int) -> Any:
    """Starts the command and sends a signal once `at` parts are finished; returns the process."""
    process = commands.start("index", *given)
    deadline = time.monotonic() + 200
    while len(finished_parts(out)) < at:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.05))
    process.send_signal(how)
    return process


def test_a_command_that_was_killed_twice_ends_with_the_same_bytes(
    commands: Commands, source: Path, tower: Path, unbroken: tuple[Path, str], tmp_path: Path
) -> None:
    out = tmp_path / "index"
    given = arguments(source, tower, out)
    before: dict[Path, int] = {}
    for low, high in ((1, PARTS // 3), (PARTS // 3 + 1, 2 * PARTS // 3)):
        process = broken_off(commands, given, out, random.randint(low, high), signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (out / "exact" / "manifest.json").exists()
        kept = {path: path.stat().st_mtime_ns for path in finished_parts(out)}
        assert before.items() <= kept.items()  # what was finished is not written again
        before = kept
    told = commands.succeed("index", *given)
    embedded = re.search(r"embedded ([\d,]+) of them", told)
    assert embedded is not None
    assert int(embedded[1].replace(",", "")) == COUNT - PART * len(before)
    ours, theirs = tree(out), tree(unbroken[0])
    assert ours.keys() == theirs.keys()
    assert ours == theirs


def test_ctrl_c_ends_in_good_order(
    commands: Commands, source: Path, tower: Path, unbroken: tuple[Path, str], tmp_path: Path
) -> None:
    out = tmp_path / "index"
    given = arguments(source, tower, out)
    process = broken_off(commands, given, out, 2, signal.SIGINT)
    told, error = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, error[-2000:]
    assert told.splitlines()[-1] == (
        "SIGINT: stopped, what is finished is kept; give the same command to go on."
    )
    assert "Traceback" not in error
    assert 2 <= len(finished_parts(out)) < PARTS
    commands.succeed("index", *given)
    assert tree(out) == tree(unbroken[0])


def test_the_report(unbroken: tuple[Path, str]) -> None:
    out, told = unbroken
    lines = told.splitlines()
    assert lines[-3] == f"{out / 'exact'}: {COUNT} passages"
    assert re.fullmatch(
        rf"\d+ of {COUNT} passages are longer than 64 tokens and were cut", lines[-2]
    )
    assert re.fullmatch(
        rf"embedded {COUNT} of them, [\d,]+ tokens, in [\d.]+ s: [\d,.]+ passages/s, "
        r"[\d,]+ tokens/s",
        lines[-1],
    )


def test_two_commands_do_not_write_one_index(
    commands: Commands, source: Path, tower: Path, tmp_path: Path
) -> None:
    out = tmp_path / "index"
    given = arguments(source, tower, out)
    process = broken_off(commands, given, out, 1, signal.SIGSTOP)
    try:
        told = refusal(commands.run("index", *given))
        assert f"{out} is being written by process {process.pid}" in told
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def test_a_full_disk_is_one_sentence(
    commands: Commands, source: Path, tower: Path, unbroken: tuple[Path, str], tmp_path: Path
) -> None:
    corpus = sum(path.stat().st_size for path in (unbroken[0] / "corpus").iterdir())
    for name, kib in (("corpus", corpus // 2048), ("vectors", corpus // 1024 + 80)):
        with small_disk(tmp_path / name, f"{kib}k") as disk:
            out = disk / "index"
            told = refusal(commands.run("index", *arguments(source, tower, out)))
            assert "cannot be written (No space left on device)" in told
            assert "--index" in told
            assert not (out / "exact" / "manifest.json").exists()
            assert (out / "corpus" / "corpus.json").exists() == (name == "vectors")
            # Elsewhere, with room, it goes on.
            roomy = tmp_path / f"roomy-{name}"
            shutil.copytree(out, roomy)
        if name == "vectors":
            assert finished_parts(roomy)
        commands.succeed("index", *arguments(source, tower, roomy))
        assert tree(roomy) == tree(unbroken[0])


def test_a_run_and_its_export_embed_alike(
    commands: Commands, source: Path, finished_run: Path, tmp_path: Path
) -> None:
    """The export's tokenizer and weights are those of the run's tower of chunks."""
    workdir = Path(shutil.copytree(finished_run, tmp_path / "run"))
    dtype = "--config.encoder.dtype=float32"
    exported = tmp_path / "exported"
    named = (f"--workdir={workdir}", "--checkpoint=last")
    commands.succeed("export", *named, f"--out={exported}")
    commands.succeed("index", f"--corpus={source}", f"--index={tmp_path / 'a'}", *named, dtype)
    given = (f"--encoder={exported}", "--compute=float32")
    commands.succeed("index", f"--corpus={source}", f"--index={tmp_path / 'b'}", *given)
    vectors = []
    for name in "ab":
        stored = StoredCorpus(tmp_path / name / "corpus")
        index = ExactIndex.open(tmp_path / name / "exact", stored, mesh_of())
        vectors.append(index.vectors(range(COUNT)))
    assert np.abs(vectors[0]).max() > 1e-3
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    # Any of both may open either index: the notes name the same exported tower.
    towers = {
        noted(tmp_path / name, read_manifest(tmp_path / name / "exact").encoder) for name in "ab"
    }
    assert towers == {chunk_digest(exported / "chunk")}


def test_words_need_no_encoder(commands: Commands, source: Path, tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    told = commands.succeed(
        "index", f"--corpus={source}", f"--index={tmp_path / 'i'}", "--engine=bm25"
    )
    assert told.splitlines()[-1] == f"{tmp_path / 'i' / 'bm25'}: {COUNT} passages"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((), "give the folder to write, for example --index="),
        (("--index=OUT",), "give one of --workdir=RUN and --encoder=FOLDER"),
        (("--index=OUT", "--engine=bm25", "--encoder=x"), "are for engines of vectors; leave"),
        (("--index=OUT", "--encoder=no/such/folder/at/all"), "no such folder"),
        (("--index=OUT", "--columns=name=x", "--encoder=T"), "--columns has 'name=x'"),
        (("--index=OUT", "--mesh=1,x,1", "--encoder=T"), "give three numbers"),
        (("--index=OUT", "--mesh=3,1,1", "--encoder=T"), "config.runtime.mesh is (3, 1, 1)"),
        (("--index=OUT", "--max_chunk_tokens=65", "--encoder=T"), "have 3 to 64 tokens"),
        (("--index=OUT", "--engine=annoy", "--encoder=T"), "engine"),
        (("--index=OUT", "--corpus=nowhere", "--encoder=T"), "nowhere does not exist"),
        (("--index=OUT", "--encoder=T"), "holds no finished corpus"),
    ],
)
def test_bad_flags(
    commands: Commands, tower: Path, tmp_path: Path, given: tuple[str, ...], told: str
) -> None:
    words = {"OUT": str(tmp_path / "out"), "T": str(tower)}
    filled = [
        f"{name}={words.get(value, value)}" for name, _, value in (w.partition("=") for w in given)
    ]
    assert told in refusal(commands.run("index", *filled))


def test_flags_of_folders_are_not_for_runs(commands: Commands, finished_run: Path) -> None:
    told = refusal(
        commands.run("index", "--index=x", f"--workdir={finished_run}", "--chunk_prefix=p: ")
    )
    assert "--chunk_prefix is for --encoder" in told


def test_a_broken_corpus_is_one_sentence(commands: Commands, tower: Path, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"id": "a", "text": "one"}) + "\n" + json.dumps({"id": "b"}) + "\n")
    told = refusal(commands.run("index", *arguments(path, tower, tmp_path / "out")))
    assert "corpus.jsonl:2: field 'text' is missing; write it as a text" in told
    assert not (tmp_path / "out" / "exact").exists()

"""The command `index` on two hosts: two processes of this machine, which meet on localhost."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.entry_points import ROOT, Commands, refusal
from tests.systems.corpora import tree, write_corpus_file, write_tower
from tests.test_index import finished_parts

pytestmark = pytest.mark.long

COUNT, PART = 203, 8  # 26 parts, the last one of 3 passages
LIMIT = 200  # seconds


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("corpus")
    source, tower = write_corpus_file(folder / "corpus.jsonl", COUNT), write_tower(folder / "model")
    return (f"--corpus={source}", f"--encoder={tower}", f"--part={PART}", "--workers=0")


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def both_hosts(commands: Commands, *given: str) -> list[Any]:
    address = free_address()
    return [commands.start("index", *given, f"--hosts={address},2,{host}") for host in (0, 1)]


def ends(process: Any) -> subprocess.CompletedProcess[str]:
    told, error = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess([], process.returncode, told, error)


def test_two_hosts_write_the_bytes_that_one_writes(
    commands: Commands, given: tuple[str, ...], tmp_path: Path
) -> None:
    """Also where one of them is killed; what was finished by then is not embedded again."""
    commands.succeed("index", *given, f"--index={tmp_path / 'one'}")
    out = tmp_path / "two"
    first, second = both_hosts(commands, *given, f"--index={out}")
    until = time.monotonic() + LIMIT
    while len(finished_parts(out)) < 4:
        assert second.poll() is None, ends(second)
        assert time.monotonic() < until
        time.sleep(0.002)
    second.send_signal(signal.SIGKILL)
    assert ends(second).returncode == -signal.SIGKILL
    told = refusal(ends(first), 1)
    assert re.fullmatch(
        r"error: another host( \(127\.0\.0\.1\))? has ended, and may say why; give the same "
        r"command on all hosts to go on\.",
        told,
    )
    assert not (out / "exact" / "manifest.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in finished_parts(out)}
    assert len(kept) < -(-COUNT // PART)

    first, second = (ends(process) for process in both_hosts(commands, *given, f"--index={out}"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    lines = first.stdout.splitlines()
    assert lines[-3] == f"{out / 'exact'}: {COUNT} passages"
    embedded = re.match(r"embedded (\d+) of them", lines[-1])
    assert embedded is not None
    passages = sum(3 if path.name.startswith("vectors.25.") else PART for path in kept)
    assert int(embedded[1]) == COUNT - passages
    assert "passages" not in second.stdout  # the first host speaks for both
    assert tree(out) == tree(tmp_path / "one")


def test_what_is_wrong_ends_both(
    commands: Commands, given: tuple[str, ...], tmp_path: Path
) -> None:
    broken = tmp_path / "corpus.jsonl"
    broken.write_text(json.dumps({"id": "a", "text": "one"}) + "\n{}\n")
    out = f"--index={tmp_path / 'out'}"
    first, second = both_hosts(commands, f"--corpus={broken}", *given[1:], out)
    told = "error: corpus.jsonl:2: field 'id' is missing; give every passage an id of its own, a "
    assert [refusal(ends(host))[: len(told)] for host in (first, second)] == [told, told]


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_stays_alone_gives_up(host: int) -> None:
    code = "import sys; from qrag_jax.runtime.hosts import joined\nwith joined(sys.argv[1], 2): 1"
    text = f"{free_address()},2,{host}"
    ended = subprocess.run(
        [sys.executable, "-c", code, text], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
    )
    assert f"--hosts={text}: not all hosts came within 2 s; start the command" in refusal(ended, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("10.0.0.1:8476,2", "--hosts is '10.0.0.1:8476,2'; give ADDRESS:PORT,COUNT,NUMBER, such"),
        ("10.0.0.1,2,0", "give ADDRESS:PORT,COUNT,NUMBER"),
        ("10.0.0.1:8476,2,2", "give ADDRESS:PORT,COUNT,NUMBER"),
        ("auto", "--hosts=auto: the other hosts cannot be found (coordinator_address should be de"),
        ("192.0.2.7:8476,2,0", "192.0.2.7:8476 cannot be used ([Errno 99] Cannot assign requested"),
        ("no.such.host.invalid:8476,2,1", "no.such.host.invalid:8476 cannot be used ("),
        ("10.0.0.1:99999,2,1", "give ADDRESS:PORT,COUNT,NUMBER"),
        ("TAKEN,2,0", "cannot be used ([Errno 98] Address already in use); give an address of th"),
    ],
)
def test_wrong_hosts(commands: Commands, tmp_path: Path, text: str, told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = text.replace("TAKEN", f"127.0.0.1:{taken.getsockname()[1]}")
        given = (f"--index={tmp_path / 'out'}", "--encoder=x", f"--hosts={address}")
        clusters = ("SLURM_", "OMPI_", "KUBERNETES_", "TPU_")
        alone = {k: v for k, v in commands.environment.items() if not k.startswith(clusters)}
        assert told in refusal(commands.run("index", *given, env=alone))

"""The commands `train` and `index` on hosts that die, are refused, or never come."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.entry_points import (
    FLOAT32,
    ROOT,
    Commands,
    end,
    free_address,
    on_hosts,
    refusal,
    wait_until,
)
from tests.systems.corpora import tree, write_corpus_file, write_tower

RUN = (
    *("--config=configs/quickstart.py:tiny", "--config.train.steps=8", FLOAT32),
    *("--config.train.log_every=1", "--config.train.checkpoint_every=4"),
    "--config.train.eval_every=8",
)
COUNT, PART = 75, 8  # 10 parts, the last one of 3 passages


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("corpus")
    source, tower = write_corpus_file(folder / "corpus.jsonl", COUNT), write_tower(folder / "model")
    return (f"--corpus={source}", f"--encoder={tower}", f"--part={PART}", "--workers=0")


# ---------------------------------------------------------------------- a host that dies


def finished_parts(out: Path) -> list[Path]:
    return sorted(out.glob("exact/vectors.*.json"))


@pytest.mark.nightly
def test_an_index_of_two_hosts_has_the_bytes_of_one_though_one_is_killed(
    commands: Commands, corpus: tuple[str, ...], tmp_path: Path
) -> None:
    """What was finished by then is not embedded again."""
    commands.succeed("index", *corpus, f"--index={tmp_path / 'one'}")
    out = tmp_path / "two"
    first, second = on_hosts(commands, "index", *corpus, f"--index={out}")
    wait_until(lambda: len(finished_parts(out)) >= 2, second)
    assert end(second, signal.SIGKILL).returncode == -signal.SIGKILL
    assert end(first).returncode not in (0, 2)
    assert not (out / "exact" / "manifest.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in finished_parts(out)}
    assert len(kept) < -(-COUNT // PART)
    first, second = (end(host) for host in on_hosts(commands, "index", *corpus, f"--index={out}"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    embedded = re.search(r"embedded (\d+) of them", first.stdout)
    assert embedded is not None
    passages = sum(3 if path.name.startswith("vectors.9.") else PART for path in kept)
    assert int(embedded[1]) == COUNT - passages
    assert "passages" not in second.stdout  # the first host speaks for both
    assert tree(out) == tree(tmp_path / "one")


# ---------------------------------------------------------------------- what is refused


def test_what_is_refused_is_refused_on_all_hosts(commands: Commands, tmp_path: Path) -> None:
    given = (*RUN, "--config.train.batch_size=15", f"--workdir={tmp_path / 'run'}")
    for host in on_hosts(commands, "train", *given):
        assert "config.train.batch_size" in refusal(end(host))


def test_a_broken_corpus_ends_both_hosts(
    commands: Commands, corpus: tuple[str, ...], tmp_path: Path
) -> None:
    broken = tmp_path / "corpus.jsonl"
    broken.write_text(json.dumps({"id": "a", "text": "one"}) + "\n{}\n")
    given = (f"--corpus={broken}", *corpus[1:], f"--index={tmp_path / 'out'}")
    for host in on_hosts(commands, "index", *given):
        assert "corpus.jsonl:2" in refusal(end(host))


def test_a_host_that_stays_alone_gives_up() -> None:
    code = "import sys; from qrag_jax.runtime.hosts import joined\nwith joined(sys.argv[1], 2): 1"
    words = [sys.executable, "-c", code, f"{free_address()},2,0"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert "--hosts" in refusal(done, 1)


@pytest.mark.parametrize("text", ["10.0.0.1:8476,2,2", "TAKEN,2,0"])
def test_wrong_hosts(commands: Commands, tmp_path: Path, text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = text.replace("TAKEN", f"127.0.0.1:{taken.getsockname()[1]}")
        given = (f"--index={tmp_path / 'out'}", "--encoder=x", f"--hosts={address}")
        clusters = ("SLURM_", "OMPI_", "KUBERNETES_", "TPU_")
        alone = {k: v for k, v in commands.environment.items() if not k.startswith(clusters)}
        assert address.partition(",")[0] in refusal(commands.run("index", *given, env=alone))

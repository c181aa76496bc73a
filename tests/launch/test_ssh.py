"""`launch/ssh.sh` runs a command on each host; `ssh` is one that stays on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.scripts import ended, fake_ssh, peer, peers, program, read_until, start

HOSTS = "# two hosts\nalpha 10.0.0.1\n\nme@beta\n"


def on_hosts(
    folder: Path, what: str, *words: str, hosts: str = HOSTS, **environment: str
) -> subprocess.Popen[str]:
    (folder / "hosts.txt").write_text(hosts)
    given = (folder / "hosts.txt", peer(folder), what, *words)
    return start(
        "ssh.sh", *given, folder=folder, environment={"PATH": fake_ssh(folder)} | environment
    )


def test_each_host_gets_the_words_as_they_are(tmp_path: Path) -> None:
    given = ["--a=x y", '$HOME * "', "`date`; exit 1", r"\n\\", ""]
    told = ended(on_hosts(tmp_path, "end", *given))
    assert told.returncode == 0, told.stderr
    found = [(number, words) for number, _, words in peers(told.stdout)]
    assert found == [(n, [*given, f"--hosts=10.0.0.1:8476,2,{n}"]) for n in (0, 1)]


def test_a_quote_stays_a_quote(tmp_path: Path) -> None:
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    (folder / "hosts.txt").write_text("alpha")
    show = program(folder / "show", 'printf "%s|" "$PWD" "$@"\n')
    path = {"PATH": fake_ssh(tmp_path)}
    told = ended(start("ssh.sh", "hosts.txt", show, "it's", folder=folder, environment=path))
    assert told.returncode == 0, told.stderr
    assert told.stdout == f"{folder}|it's|--hosts=alpha:8476,1,0|"


def test_input_that_cannot_be_used_is_not_tried_again(tmp_path: Path) -> None:
    told = ended(on_hosts(tmp_path, "refuse", RESTARTS="3"))
    assert told.returncode == 2
    assert len(peers(told.stdout)) == 2


def test_after_a_failure_those_hosts_start_that_are_left(tmp_path: Path) -> None:
    """The second host fails, and is not reached any more."""
    process = on_hosts(tmp_path, "once", RESTARTS="1", GRACE="5", hosts=HOSTS.replace("me@", ""))
    out = read_until(process, 2)
    (tmp_path / "beta").touch()
    told = ended(process)
    assert told.returncode == 0, told.stderr
    assert "beta is not reached; the others go on without it" in told.stderr
    words = [words[-1] for _, _, words in peers(out + told.stdout)]
    assert sorted(words) == [f"--hosts=10.0.0.1:8476,{last}" for last in ("1,0", "2,0", "2,1")]


def test_a_process_that_hangs_after_a_failure_is_killed(tmp_path: Path) -> None:
    told = ended(on_hosts(tmp_path, "hang", GRACE="1"), limit=30)
    assert told.returncode == 1
    assert "process 1 has ended with 1" in told.stderr
    assert "others go on without it; they are killed" in told.stderr


def test_a_signal_stops_all_hosts(tmp_path: Path) -> None:
    process = on_hosts(tmp_path, "wait", RESTARTS="3")
    read_until(process, 2)
    process.send_signal(signal.SIGTERM)
    told = ended(process, limit=30)
    assert told.returncode == 143
    assert sorted(told.stdout.split()) == ["0", "1", "stopped", "stopped"]


def test_all_stop_when_nobody_watches_over_them(tmp_path: Path) -> None:
    """The script is killed, so it cannot say anything to the hosts."""
    process = on_hosts(tmp_path, "wait")
    read_until(process, 2)
    process.kill()
    told = ended(process, limit=30)  # the output is open until the last one has ended
    assert sorted(told.stdout.split()) == ["0", "1", "stopped", "stopped"]


def test_a_host_that_is_not_reached_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "alpha").touch()
    told = ended(on_hosts(tmp_path, "end", RESTARTS="1"))
    assert told.returncode == 2
    assert told.stderr == "ssh.sh: error: ssh does not reach alpha (see above).\n"
    assert not peers(told.stdout)


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        ("-oProxyCommand=x\n", "has the host '-oProxyCommand=x', which ssh would take for an"),
        ("# nobody\n", "the file of hosts names none."),
    ],
)
def test_wrong_hosts_are_refused(tmp_path: Path, hosts: str, why: str) -> None:
    told = ended(on_hosts(tmp_path, "end", hosts=hosts))
    assert told.returncode == 2
    assert why in told.stderr


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    told = ended(start("ssh.sh", "none.txt", "true", folder=tmp_path))
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)
    assert "none.txt cannot be read" in told.stderr


def test_what_a_command_started_is_killed_with_it(tmp_path: Path) -> None:
    """The hanging stand-in's own child, a sleep, is gone with it."""
    program(tmp_path / "own", 'sleep 987 &\necho "$!" >child\nwait\n')
    (tmp_path / "hosts.txt").write_text("alpha\nbeta\n")
    script = program(tmp_path / "one", "[[ $1 == *,0 ]] || exit 1\nexec ./own\n")
    environment = {"PATH": fake_ssh(tmp_path), "GRACE": "1"}
    process = start("ssh.sh", "hosts.txt", script, folder=tmp_path, environment=environment)
    assert ended(process, limit=30).returncode == 1
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("the child still runs")

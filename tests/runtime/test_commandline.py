"""Command lines: bad input is one sentence, exit statuses; users' functions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict, config_flags

from qrag_jax.errors import InputError
from qrag_jax.runtime import commandline
from qrag_jax.runtime.own_code import load, names_foreign
from qrag_jax.runtime.whole_files import default_cache
from tests.entry_points import ROOT
from tests.support.forks import Forked


def get_config() -> ConfigDict:
    """This file is also the experiment of the command that it is."""
    return ConfigDict({"fail": "", "seed": 1})


def main() -> int:
    """A command that fails as its config says."""
    import jax
    import jax.numpy as jnp

    fail = CONFIG.value.fail
    if fail == "input":
        raise InputError("data.jsonl: field 'id' is missing; add it.")
    if fail == "bug":
        raise RuntimeError("a bug")
    if fail == "memory":
        jnp.zeros(10**14).block_until_ready()
    if fail == "devices":
        jax.devices()
    if fail == "home":
        os.setuid(54321)
        default_cache()
    print(jnp.arange(2.0).sum().dtype, "é\ud800")
    return 0


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": ""}


def run(*words: str) -> tuple[int | None, str, str]:
    """Status, output and errors."""
    command = Forked(__name__, [f"--config={__file__}", *words], ROOT, ENVIRONMENT)
    out, err = command.communicate(timeout=100)
    return command.returncode, out, err


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("--workdri=x", "workdri"),
        ("more", "'more'"),
        ("--config.fail=input", "data.jsonl: field 'id' is missing; add it."),
    ],
)
def test_bad_input_is_one_sentence(word: str, named: str) -> None:
    status, out, err = run(word)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert named in err


def test_failures_that_are_no_bad_input_end_with_another_status() -> None:
    status, _, err = run("--config.fail=bug")
    assert status == 1
    assert "Traceback" in err
    assert "RuntimeError: a bug" in err
    status, _, err = run("--config.fail=memory")
    assert (status, "Traceback" in err) == (1, False)
    assert "372529.0 GiB" in err
    if os.getuid() == 0:  # else no process can become a user without a home
        status, _, err = run("--config.fail=home")
        assert (status, "HOME" in err) == (2, True), err


@pytest.mark.parametrize(
    ("fail", "variables", "status", "named"),
    [
        ("devices", {"JAX_PLATFORMS": "cuda"}, 2, "JAX_PLATFORMS"),
        ("", {"JAX_ENABLE_X64": "1", "PYTHONIOENCODING": "ascii"}, 0, "float32"),
    ],
)
def test_variables_of_the_environment(
    fail: str, variables: dict[str, str], status: int, named: str
) -> None:
    command = [sys.executable, "-m", __name__, f"--config={__file__}", f"--config.fail={fail}"]
    ended = subprocess.run(
        command, env=ENVIRONMENT | variables, cwd=ROOT, text=True, capture_output=True
    )
    assert ended.returncode == status, ended.stderr
    assert named in (ended.stderr if status else ended.stdout)
    assert "Traceback" not in ended.stderr


WRITES = """
import os, sys
from qrag_jax.runtime.commandline import lasting_output
with lasting_output():
    print("begun", flush=True)
    sys.stdin.read()
    for _ in range(3):
        print("nobody reads this", flush=True)
        os.write(1, b"nor what a library writes")
print("saved", file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_command_goes_on_when_its_output_is_closed(kind: str) -> None:
    """As by `| head`, or a terminal that is closed during a save."""
    reader, writer = os.pipe() if kind == "pipe" else os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", WRITES],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as command:
        os.close(writer)
        assert os.read(reader, 5) == b"begun"
        os.close(reader)
        assert command.communicate(timeout=60)[1] == "saved\n"
    assert command.returncode == 0


# ---------------------------------------------------------------------- functions of the user

FIELD = "config.reward.path"
NAMES = ("question", "answers")
CODE = """
import dataclasses

@dataclasses.dataclass
class Inner:
    text: str

def score(question, answers):
    return len(Inner(question).text) + len(answers)

def narrow(question):
    return 0

def with_more(question, answers, weight=2.0, **rest):
    return weight
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def test_a_function_of_a_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = load(f"{file}:score", FIELD, NAMES)
    assert code.function(question="Who?", answers=["a", "b"]) == 6
    assert load(f"{file}:with_more", FIELD, NAMES).function("", []) == 2.0
    monkeypatch.chdir(tmp_path)
    assert load("mine.py:score", FIELD, NAMES).digest == code.digest
    file.write_text(CODE + "# changed\n")
    assert load("mine.py:score", FIELD, NAMES).digest != code.digest


def test_only_the_examples_of_the_package_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's folder may name these; nothing else of it is run unasked."""
    own = "examples/worlds/records.py:quickstart"
    for paths in (own, "examples/tools.py", f"a={own},b=folder", "folder", ""):
        assert not names_foreign(paths)
    for paths in ("a.py:f", "a.py", "a=a.py:f,b=folder", f"a={own},b=a.py:f", "examples/../a.py:f"):
        assert names_foreign(paths)
    monkeypatch.chdir(tmp_path)
    assert not names_foreign(own)
    (tmp_path / "examples" / "worlds").mkdir(parents=True)
    (tmp_path / "examples" / "worlds" / "records.py").touch()
    assert names_foreign(own)


def test_what_is_refused(file: Path, tmp_path: Path) -> None:
    broken = [tmp_path / f"{number}.py" for number in range(2)]
    for path, code in zip(broken, ("def score(:", "raise SystemExit(3)"), strict=True):
        path.write_text(code)
    for spec, named in (
        *((spec, "FILE.py:FUNCTION") for spec in ("", "a.py:", "a:f", "a.py:f()")),
        (f"{tmp_path / 'none.py'}:score", "no file"),
        (f"{file}:scores", "scores"),
        (f"{file}:narrow", "question, answers"),
        (f"{broken[0]}:score", "SyntaxError"),
        (f"{broken[1]}:score", "SystemExit: 3"),
    ):
        with pytest.raises(InputError, match=f"{re.escape(FIELD)} is .*{named}") as caught:
            load(spec, FIELD, NAMES)
        assert spec.rpartition(":")[0] in str(caught.value)
        assert "\n" not in str(caught.value)


if __name__ == "__main__":
    CONFIG: Any = config_flags.DEFINE_config_file("config")
    commandline.run(main)

"""Loading a user's function: what is refused in one sentence, before anything is computed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.own_code import load, names_foreign

FIELD = "config.reward.path"
NAMES = ("question", "answers")
CODE = """
import dataclasses

@dataclasses.dataclass
class Inner:
    text: str

NOT_A_FUNCTION = 3

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
    for paths in (own, f"a={own},b=folder", "folder", ""):
        assert not names_foreign(paths)
    for paths in ("a.py:f", "a=a.py:f,b=folder", f"a={own},b=a.py:f", "examples/../a.py:f"):
        assert names_foreign(paths)
    monkeypatch.chdir(tmp_path)
    assert not names_foreign(own)
    (tmp_path / "examples" / "worlds").mkdir(parents=True)
    (tmp_path / "examples" / "worlds" / "records.py").touch()
    assert names_foreign(own)


def test_what_is_refused(file: Path, tmp_path: Path) -> None:
    broken = [tmp_path / f"{number}.py" for number in range(3)]
    for path, code in zip(broken, ("def score(:", "raise SystemExit(3)", "1 / 0"), strict=True):
        path.write_text(code)
    for spec, named in (
        *((spec, "FILE.py:FUNCTION") for spec in ("", "a.py", "a.py:", "a:f", "a.py:f()", "hub:a")),
        (f"{tmp_path / 'none.py'}:score", "no file"),
        (f"{file}:scores", "scores.*score, narrow, with_more"),
        (f"{file}:NOT_A_FUNCTION", "NOT_A_FUNCTION"),
        (f"{file}:narrow", "question, answers"),
        (f"{broken[0]}:score", "SyntaxError"),
        (f"{broken[1]}:score", "SystemExit: 3"),
        (f"{broken[2]}:score", "ZeroDivisionError: division by zero"),
    ):
        with pytest.raises(InputError, match=f"{re.escape(FIELD)} is .*{named}") as caught:
            load(spec, FIELD, NAMES)
        assert spec.rpartition(":")[0] in str(caught.value)
        assert "\n" not in str(caught.value)

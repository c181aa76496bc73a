"""Loading a user's function: what is refused in one sentence, before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.own_code import load, names_foreign

FIELD = "config.reward.path"
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


def message(spec: str) -> str:
    with pytest.raises(InputError) as caught:
        load(spec, FIELD, ("question", "answers"))
    text = str(caught.value)
    assert text.startswith(f"{FIELD} is ")
    assert spec.rpartition(":")[0] in text
    assert "\n" not in text
    return text


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def test_a_function_of_a_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = load(f"{file}:score", FIELD, ("question", "answers"))
    assert code.function(question="Who?", answers=["a", "b"]) == 6
    assert load(f"{file}:with_more", FIELD, ("question", "answers")).function("", []) == 2.0
    monkeypatch.chdir(tmp_path)
    again = load("mine.py:score", FIELD, ("question", "answers"))
    assert again.digest == code.digest
    file.write_text(CODE + "# changed\n")
    assert load("mine.py:score", FIELD, ("question", "answers")).digest != code.digest


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
    for spec in ("", "a.py", "a.py:", "a:f", "a.py:f()", "a.py:1", "hub:a"):
        assert "write FILE.py:FUNCTION" in message(spec)
    missing = tmp_path / "none.py"
    assert f"there is no file {missing}" in message(f"{missing}:score")
    told = message(f"{file}:scores")
    assert "has no function scores; it has score, narrow, with_more" in told
    assert "has no function NOT_A_FUNCTION" in message(f"{file}:NOT_A_FUNCTION")
    assert "narrow cannot be called with question, answers" in message(f"{file}:narrow")
    for code, says in (
        ("def score(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ):
        missing.write_text(code)
        assert f"cannot be run ({says}" in message(f"{missing}:score")

"""Messages of errors: one line that a terminal can show, however strange the input."""

from __future__ import annotations

import pickle

import pytest

from qrag_jax.errors import InputError


def test_a_message_stays_as_it_is() -> None:
    text = "data/train.jsonl, line 3: the field 'Übung' is 5 … ; give a text."
    assert str(InputError(text)) == text
    assert str(InputError("x" * 4000)) == "x" * 4000
    assert str(InputError("it died:\n    its last line")) == "it died:\n    its last line"
    assert str(pickle.loads(pickle.dumps(InputError(text)))) == text  # noqa: S301


def test_the_middle_of_a_long_message_is_left_out() -> None:
    text = str(InputError(f"{'a' * 2499} {'y' * 1_000_000} {'b' * 999}"))
    assert text == f"{'a' * 2499}  … (1000000 characters) … {' ' + 'b' * 999}"


@pytest.mark.parametrize("mark", ["\r", "\x00", "\x1b", "\x7f"])
def test_marks_of_control_are_shown_and_not_obeyed(mark: str) -> None:
    text = str(InputError(f"the file{mark} is broken"))
    assert text.isprintable()
    assert text == f"the file{repr(mark)[1:-1]} is broken"

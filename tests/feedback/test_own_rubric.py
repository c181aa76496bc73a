"""The reward of an episode with tools by a function in a file outside the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from qrag_jax.environments.tools.episode import Closed, ToolTask
from qrag_jax.errors import InputError
from qrag_jax.feedback.language_model import Unscored
from qrag_jax.feedback.own_rubric import OwnRubric, reward_of
from qrag_jax.feedback.rubric import preset, score

TASK = ToolTask("q7", "Where?", ("Oslo", "Kristiania"), hops=2, gold_ids=("p1", "p2"))
CLOSED = Closed("oslo", seen=("p1", "p5"))
CODE = """
def good(question, answers, answer, parts):
    assert (question, answers, answer) == ("Where?", ["Oslo", "Kristiania"], "oslo")
    return parts["em"] + 10 * parts["recall"]

def raises(question, answers, answer, parts):
    parts.clear()  # a copy
    raise KeyError("more")

def text(question, answers, answer, parts):
    return "1.0"

def nothing(**given):
    return None

def narrow(question, answers):
    return 1
"""


def test_numbers_and_failures(tmp_path: Path) -> None:
    path = tmp_path / "my_rubric.py"
    path.write_text(CODE)
    parts = score(CLOSED, TASK)
    before = dict(parts)
    assert reward_of(OwnRubric.load(f"{path}:good"), CLOSED, TASK, parts) == 6.0
    for name, cause in (("raises", "raised"), ("text", "no_number"), ("nothing", "no_reward")):
        found = reward_of(OwnRubric.load(f"{path}:{name}"), CLOSED, TASK, parts)
        assert isinstance(found, Unscored)
        assert found.cause == cause
        assert f"{path}:{name} " in found.message
        assert "q7" in found.message
    assert parts == before
    assert reward_of(preset("head"), CLOSED, TASK, parts) == preset("head").reward(parts, 2)
    with pytest.raises(InputError, match=r"config\.rubric\.path"):
        OwnRubric.load(f"{path}:narrow")
    with pytest.raises(InputError, match=r"config\.rubric\.path"):
        OwnRubric.load(f"{tmp_path}/none.py:good")

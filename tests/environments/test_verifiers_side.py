"""Parts of the program that plays environments of verifiers, which need no verifiers."""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.environments.verifiers_side.clock import Clock
from qrag_jax.environments.verifiers_side.faults import FaultyRubric
from qrag_jax.environments.verifiers_side.packages import code_of, imported
from qrag_jax.environments.verifiers_side.program import protocol_of
from qrag_jax.environments.verifiers_side.wire import EpisodeFailed, Refused, finite, told


def test_a_clock_ends_what_takes_too_long() -> None:
    async def slow() -> None:
        await asyncio.sleep(30)

    with pytest.raises(EpisodeFailed, match=r"more than 0\.1 s \(config\.env\.seconds\)") as found:
        asyncio.run(Clock(0.1).bounded(slow()))
    assert found.value.cause == "timeout"


def test_the_time_of_the_model_does_not_count() -> None:
    clock = Clock(0.3)

    async def asks() -> str:
        with clock.model_speaks():
            await asyncio.sleep(0.8)
        return "done"

    async def run() -> str:
        return await clock.bounded(asks())

    assert asyncio.run(run()) == "done"
    assert clock.seconds < 0.3


class Rubric:
    """As verifiers' own: a function that raises counts as 0."""

    has_group_rewards = False

    def __init__(self, *funcs: Any, weights: tuple[float, ...] = ()) -> None:
        self.funcs, self.weights = [*funcs], [*(weights or (1.0,) * len(funcs))]

    async def score_rollout(self, state: dict[str, Any]) -> None:
        values = []
        for function in self.funcs:
            try:
                value = function(state)
                values.append(await value if asyncio.iscoroutine(value) else value)
            except KeyError:
                values.append(0.0)
        state["reward"] = sum(values)


def fine(state: dict[str, Any]) -> float:
    return 0.5


def raises(state: dict[str, Any]) -> float:
    raise KeyError("answer")


async def later(state: dict[str, Any]) -> float:
    raise KeyError("answer")


def no_number(state: dict[str, Any]) -> float:
    return math.nan


@pytest.mark.parametrize(
    ("function", "weight", "cause"),
    [
        (fine, 1.0, ""),
        (raises, 1.0, "raised"),
        (later, 1.0, "raised"),
        (no_number, 1.0, "no_number"),
        (raises, 0.0, ""),
    ],
)
def test_what_a_rubric_swallows_is_noted(function: Any, weight: float, cause: str) -> None:
    rubric, states = Rubric(fine, function, weights=(1.0, weight)), [{}, {}]
    asyncio.run(FaultyRubric(rubric).score(states))
    for state in states:
        fault = FaultyRubric.fault(state)
        assert (fault.cause if fault else "") == cause
        if fault:
            assert function.__name__ in str(fault)


@pytest.mark.parametrize(
    ("text", "protocol", "says"),
    [
        (None, "v0", "has no package qrag_made_package; install it there"),
        ("def load_environment(): ...", "v1", "speaks v0, and the verifiers of"),
        ("class A(Taskset): ...", "v0", "speaks v1, and the verifiers of"),
        ("import qrag_not_there\ndef load_environment(): ...", "v0", "cannot be imported"),
        ("def load_environment(): ...", "v0", ""),
    ],
)
def test_a_package_is_found_or_refused(
    text: str | None, protocol: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "qrag_made_package"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    if not says:
        assert callable(imported("qrag-made-package", name, protocol).load_environment)
        return
    with pytest.raises(Refused, match=says):
        imported("qrag-made-package", name, protocol)


def test_the_code_of_a_package_is_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "qrag_made_folder"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("def load_environment(): ...")
    (package / "inner" / "rubric.py").write_text("WEIGHT = 1")
    module = imported("qrag-made-folder", package.name, "v0")
    before = code_of(module)
    assert code_of(module) == before
    (package / "inner" / "rubric.py").write_text("WEIGHT = 2")
    assert code_of(module) != before


@pytest.mark.parametrize(
    ("version", "asked", "found"),
    [
        ("0.3.1", "", "v0"),
        ("0.4.0", "", "v1"),
        ("0.2.1", "v0", "v0"),
        ("0.4.0", "v0", None),
        ("0.3.1", "v1", None),
    ],
)
def test_the_protocol_is_that_of_the_version(
    version: str, asked: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if found is None:
        with pytest.raises(Refused, match=f"config.env.protocol is {asked}"):
            protocol_of(asked)
    else:
        assert protocol_of(asked) == (found, version)


def test_texts_for_people_and_for_json() -> None:
    cause, error = ValueError("first\nline"), RuntimeError("then")
    error.__cause__ = cause
    assert told(error) == "RuntimeError: then ← ValueError: first line"
    assert finite({"a": [math.inf, 1.0, (math.nan,)]}) == {"a": [None, 1.0, [None]]}

"""Parts of the program that plays environments of verifiers, which need no verifiers."""

from __future__ import annotations

import asyncio

import pytest

from qrag_jax.environments.verifiers_side import wire
from qrag_jax.environments.verifiers_side.clock import Clock


def test_a_clock_ends_what_takes_too_long_without_the_time_of_the_model() -> None:
    async def slow() -> None:
        await asyncio.sleep(30)

    with pytest.raises(wire.EpisodeFailed, match=r"config\.env\.seconds") as found:
        asyncio.run(Clock(0.1).bounded(slow()))
    assert found.value.cause == "timeout"
    clock = Clock(0.3)

    async def asks() -> str:
        clock.speaks(on=True)
        await asyncio.sleep(0.5)
        clock.speaks(on=False)
        return "done"

    async def run() -> str:
        return await clock.bounded(asks())

    assert asyncio.run(run()) == "done"
    assert clock.seconds < 0.3


def test_the_code_of_a_package_is_all_its_files(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "qrag_made_folder"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "rubric.py").write_text("WEIGHT = 1")
    module = wire.imported("qrag-made-folder", package.name)
    before = wire.code_of(module)
    assert wire.code_of(module) == before
    (package / "inner" / "rubric.py").write_text("WEIGHT = 2")
    assert wire.code_of(module) != before
    (tmp_path / "qrag_broken.py").write_text("import qrag_not_there")
    for name in ("qrag_broken", "qrag_none"):
        with pytest.raises(wire.Refused, match=name):
            wire.imported(name, name)

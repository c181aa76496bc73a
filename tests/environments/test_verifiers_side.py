"""Parts of the program that plays environments of verifiers, which need no verifiers."""

from __future__ import annotations

import asyncio

import pytest

from qrag_jax.environments.verifiers_side import program


def test_a_clock_ends_what_takes_too_long_without_the_time_of_the_model() -> None:
    async def slow() -> None:
        await asyncio.sleep(30)

    with pytest.raises(program.EpisodeFailed, match=r"config\.env\.seconds") as found:
        asyncio.run(program.Clock(0.1).bounded(slow()))
    assert found.value.cause == "timeout"
    clock = program.Clock(0.3)

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
    module = program.imported("qrag-made-folder", package.name)
    before = program.code_of(module)
    assert program.code_of(module) == before
    (package / "inner" / "rubric.py").write_text("WEIGHT = 2")
    assert program.code_of(module) != before
    (tmp_path / "qrag_broken.py").write_text("import qrag_not_there")
    for name in ("qrag_broken", "qrag_none"):
        with pytest.raises(program.Refused, match=name):
            program.imported(name, name)

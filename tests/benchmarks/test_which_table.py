"""The suite which: what is run, left out, kept, claimed, drawn and written."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from benchmarks import which
from benchmarks.kept_runs import Kept
from benchmarks.which_cases import (
    advice,
    answered,
    answers,
    contrast,
    differences,
    gpu_cost,
    invented,
    page,
    plot,
    published,
    rows,
    single,
    span_reader,
    table,
)
from benchmarks.which_cases.found import Asking, Found, Training
from benchmarks.which_cases.invented import Sizes
from benchmarks.which_cases.row import TRAINED, UNTRAINED, WITH_WORDS, Place, Result
from benchmarks.which_cases.rows import ROWS, SEEDS, Row, lacking
from benchmarks.which_cases.settings import HOTPOTQA, SETTINGS, TWO_WIKI, Setting
from qrag_jax.errors import InputError
from tests.benchmarks import invented_setting

BY_NAME = {row.name: row for row in ROWS}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return invented_setting.make(tmp_path_factory.mktemp("setting"), Sizes(test=40))


def read(given: Setting, share: float, seed: int) -> Found:
    """Lists with all gold passages in so many of the questions, and none in the others."""
    rng = np.random.default_rng(seed)
    lists = {a.id: a.gold if rng.random() < share else () for a in given.test}
    return Found(lists, Asking(10.0 + seed, encoder_tokens=20.0), 1_000_000, "a note")


def results(given: Setting, shares: Mapping[str, float]) -> dict[str, Result]:
    made = {}
    for name, share in shares.items():
        row = BY_NAME[name]
        for number, part in enumerate(row.parts):
            tests = {TWO_WIKI: read(given, share, number)}
            ways = {UNTRAINED: {TWO_WIKI: read(given, 0.1, 7)}}
            if row.seeds:
                tests |= {HOTPOTQA: read(given, share / 2, number)}
                ways[TRAINED] = tests
            else:
                ways = {UNTRAINED: tests}
            training = Training(5.0, 3.0, 1e6) if row.seeds else None
            made[f"{TWO_WIKI}/{part}"] = Result(ways, training, "rate 0.1")
    return made


@pytest.fixture(scope="module")
def lines(given: Setting) -> list[table.Scored]:
    shares = {"bm25": 0.5, "hybrid": 0.55, "q_rag": 0.95, "contrastive": 0.55}
    return table.scored(results(given, shares), lambda name: given)


def test_parts_are_rows_seeds_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(which, "lacking", lambda row: "")  # whatever is on this machine
    parts = [name for name, _ in which.all_parts(ROWS, lambda name: pytest.fail(name), tmp_path)]
    left_out = dict(which.left_out_parts(ROWS))
    every = {f"{where}/{part}" for where in SETTINGS for row in ROWS for part in row.parts}
    assert {*parts} | {*left_out} == every
    assert not {*parts} & {*left_out}
    assert {f"{TWO_WIKI}/q_rag-{seed}" for seed in SEEDS} <= every
    assert f"{TWO_WIKI}/bm25" in parts
    # One training of each row, then the further ones of rows of minutes, then of long ones.
    further = [name for name in parts if name.endswith((f"-{SEEDS[1]}", f"-{SEEDS[2]}"))]
    assert parts[-len(further) :] == further
    long = {part for row in ROWS if row.is_long for part in row.parts}
    is_long = [name.partition("/")[2] in long for name in further]
    assert is_long == sorted(is_long)
    assert any(is_long)
    assert not all(is_long)
    assert next(iter(parts)) == f"{TWO_WIKI}/bm25"
    # In one setting, if they are not named.
    assert which._by_default(f"{TWO_WIKI}/rlvr-42")
    assert not which._by_default(f"{HOTPOTQA}/rlvr-42")


def test_what_cannot_be_run_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = dict(which.left_out_parts(ROWS))
    assert "no decompositions" in left_out[f"{HOTPOTQA}/harr_grpo-42"]
    assert f"{TWO_WIKI}/harr_grpo-42" not in left_out
    monkeypatch.setattr(contrast, "is_installed", lambda: False)
    assert "pip install" in lacking(BY_NAME["contrastive"])
    assert "pip install" in dict(which.left_out_parts(ROWS))[f"{HOTPOTQA}/contrastive-43"]
    monkeypatch.setattr(rows, "find_minilm", lambda download: None)
    assert "QRAG_MINILM" in lacking(BY_NAME["q_rag"])
    assert not lacking(BY_NAME["bm25"])


def test_smollm2_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.which_cases import writers

    monkeypatch.setattr(writers, "find_smollm2", lambda download: None)
    assert "make llm" in lacking(BY_NAME["rlvr"])
    with pytest.raises(InputError, match="make llm"):
        writers.smollm2()


def test_lines_have_all_trainings(lines: list[table.Scored]) -> None:
    found = {(line.row.name, line.way): line for line in lines}
    assert found["q_rag", TRAINED].seeds == [*SEEDS]
    assert len(found["q_rag", TRAINED].training) == len(SEEDS)
    assert not found["q_rag", UNTRAINED].training
    assert found["bm25", UNTRAINED].seeds == [0]
    assert found["bm25", UNTRAINED].title == "BM25"
    assert len(found["q_rag", TRAINED].column("all@4")) == 3
    assert len(found["q_rag", TRAINED].column("all@4", HOTPOTQA)) == 3


def test_an_ordering_is_claimed_only_away_from_zero(lines: list[table.Scored]) -> None:
    cases = {case.case: case for case in differences.cases(lines)}
    sure = cases["2wiki, all@4: Q-RAG, trained - BM25"]
    assert sure.details["ordering"] == "above"
    assert float(sure.details["low"]) > 0
    unsure = cases["2wiki, all@4: MiniLM, contrastive, trained - BM25 and MiniLM"]
    assert unsure.details["ordering"] == "not told apart"
    assert float(unsure.details["low"]) < 0 < float(unsure.details["high"])
    assert "2wiki, all@4: Q-RAG, trained - Q-RAG, untrained" in cases
    rows = [[*map(str.strip, row.split("|")[1:-1])] for row in table.order_table(lines).split("\n")]
    number, title, _score, above, least, alike = 0, 1, 2, 3, 4, 5
    told = {row[title]: row for row in rows[2:] if len(row) > 1}
    assert told["Q-RAG, trained"][number] == "1"
    assert told["Q-RAG, trained"][above] == "2-4"
    assert told["Q-RAG, trained"][alike] == "none"
    by_title = {line.title: line for line in lines}
    others = [table.difference_of(by_title["Q-RAG, trained"], by_title[name]) for name in told]
    gains = {name: found for name, found in zip(told, others, strict=True) if found}
    del gains["Q-RAG, trained"]
    nearest = min(gains, key=lambda name: gains[name].mean)
    expected = f"{nearest}: {table.interval_cell(gains[nearest])}"
    assert told["Q-RAG, trained"][least] == expected
    assert told["BM25"][above] == "none"
    assert told["BM25"][least] == ""
    contrastive = told["MiniLM, contrastive, trained"]
    assert {told["BM25"][number], told["BM25 and MiniLM"][number]} <= places(contrastive[alike])


def places(cell: str) -> set[str]:
    """The numbers of a cell such as 1, 3-6."""
    ends = [part.split("-") for part in cell.split(", ")]
    return {str(n) for end in ends for n in range(int(end[0]), int(end[-1]) + 1)}


def test_numbers_are_written_as_ranges() -> None:
    assert table.ranges([]) == ""
    assert table.ranges([7, 3, 4, 5, 1]) == "1, 3-5, 7"
    assert places(table.ranges([7, 3, 4, 5, 1])) == {"1", "3", "4", "5", "7"}


def test_costs_of_several_trainings_are_a_mean_and_its_bounds() -> None:
    assert table.spread_cell([]) == ""
    assert table.spread_cell([17.2]) == "17"
    assert table.spread_cell([17.2, 16.9]) == "17"
    assert table.spread_cell([17.0, 33.4, 25.0]) == "25 (17-33)"


def test_what_training_brings_is_paired_with_what_it_began_with(
    lines: list[table.Scored],
) -> None:
    head, _, *rows = table.gain_table(lines).splitlines()
    cells = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ") for row in rows}
    assert {*cells} == {"Q-RAG, trained", "MiniLM, contrastive, trained"}
    by_title = {line.title: line for line in lines}
    trained, untrained = by_title["Q-RAG, trained"], by_title["Q-RAG, untrained"]
    gain = np.mean(trained.column("all@4")) - np.mean(untrained.column("all@4"))
    assert cells["Q-RAG, trained"][1].startswith(f"{gain:+.3f} [")
    assert head.split(" | ")[2] == "less MiniLM, contrastive"
    gain -= np.mean(by_title["MiniLM, contrastive, trained"].column("all@4")) - np.mean(
        untrained.column("all@4")
    )
    assert cells["Q-RAG, trained"][2].startswith(f"{gain:+.3f} [")
    assert table.gain_table([line for line in lines if not line.row.seeds]) == ""
    # With negatives Q-RAG is trained from where it begins without them.
    mined = dataclasses.replace(trained, row=BY_NAME["q_rag_mined"])
    assert [*table.begun_with(mined, lines)] == [untrained]


def test_orderings_are_of_compared_lines_alone(lines: list[table.Scored]) -> None:
    told = table.order_table(lines)
    assert "Q-RAG, trained" in told
    assert "Q-RAG, untrained" not in told
    trained = next(line for line in lines if line.title == "Q-RAG, trained")
    with_words = dataclasses.replace(trained, way=WITH_WORDS)
    assert "Q-RAG, trained, fused with BM25" in table.order_table([*lines, with_words])


def test_lines_that_are_one_are_drawn_once(lines: list[table.Scored]) -> None:
    trained = next(line for line in lines if line.title == "Q-RAG, trained")
    dense = dataclasses.replace(trained, way="trained, searching by MiniLM")
    untrained = [line for line in lines if line.way == UNTRAINED and line.row.seeds]
    drawn = [*plot.shown([*lines, dense])]
    assert dense not in drawn
    assert trained in drawn
    # Untrained, both trained rows of this test find the same.
    assert [line for line in drawn if line in untrained] == untrained[:1]


def test_tables_have_figures_costs_and_notes(lines: list[table.Scored], given: Setting) -> None:
    found, cost, _gains, order, transfer, notes = table.tables(lines, [given.told])
    assert found.startswith("### 2wiki: what is found")
    trained = next(row for row in found.splitlines() if row.startswith("| Q-RAG, trained"))
    column = [
        each for line in lines if line.title == "Q-RAG, trained" for each in line.column("all@4")
    ]
    assert f" {np.mean(column):.3f} [" in trained
    assert "gold passages |  | 3 |" in trained
    untrained = next(row for row in found.splitlines() if row.startswith("| Q-RAG, untrained"))
    assert "gold passages" not in untrained
    assert " em@4" not in found
    costs = next(row for row in cost.splitlines() if row.startswith("| Q-RAG, trained"))
    assert [cell.strip() for cell in costs.split("|")[2:7]] == ["5", "3", "1,000,000", "", "11"]
    assert "2wiki → hotpotqa" in transfer
    assert "paired interval away from 0" in order
    assert f"- {given.told}" in notes
    assert "- Q-RAG: a note." in notes


def test_answers_become_columns(given: Setting, lines: list[table.Scored]) -> None:
    own = [dataclasses.replace(each, scores={TWO_WIKI: [{}]}, seeds=[0]) for each in lines[:1]]
    said = {"em@4": [1.0, 0.0], "f1@4": [1.0, 0.5]}
    assert own[0].row.name == "bm25"
    table.add_answers(own, {f"{TWO_WIKI}/answers": {"lines": {"bm25": {UNTRAINED: said}}}})
    assert own[0].column("f1@4")[0].tolist() == [1.0, 0.5]


def test_answers_are_told_between_two_bounds(given: Setting, lines: list[table.Scored]) -> None:
    said = {"em@4": [1.0, 0.0, 1.0], "f1@4": [1.0, 0.5, 1.0]}
    bounds = {
        answers.GOLD: {"em@4": [1.0, 1.0, 1.0], "f1@4": [1.0, 1.0, 1.0]},
        answers.NOTHING: {"em@4": [0.0, 0.0, 0.0], "f1@4": [0.25, 0.25, 0.25]},
    }
    part = {"lines": {"bm25": {UNTRAINED: said}}, "bounds": bounds, "reader": "R", "questions": 3}
    own = [dataclasses.replace(each, scores={TWO_WIKI: [{}]}, seeds=[0]) for each in lines[:2]]
    parts = {f"{TWO_WIKI}/answers": part}
    table.add_answers(own, parts)
    _, made = answered.tables(own, parts, lambda name: given)
    assert made.startswith("### 2wiki: answers of R, to 3 test questions\n")
    gold, nothing, bm25 = (
        [cell.strip() for cell in row.split("|")[1:-1]] for row in made.splitlines()[4:]
    )
    assert gold == [
        answers.GOLD,
        "1.000 [1.000, 1.000]",
        "1.000 [1.000, 1.000]",
        "+0.750 [+0.750, +0.750]",
        "",
        "+0.167 [+0.000, +0.500]",
    ]
    assert nothing[3:] == ["", "+0.750 [+0.750, +0.750]", "-0.583 [-0.750, -0.250]"]
    assert [cell.split()[0] for cell in bm25[:-1]] == [
        *("BM25", "0.667", "0.833", "+0.583", "+0.167"),
    ]
    assert not bm25[-1]


def test_the_script_answers_for_every_line(given: Setting, lines: list[table.Scored]) -> None:
    (made,) = answered.tables(lines, {}, lambda name: given)
    assert made.startswith("### 2wiki: answers by script, to 40 test questions\n")
    told = [row.split("|")[1].strip() for row in made.splitlines()[4:]]
    assert told == [
        answers.GOLD,
        answers.NOTHING,
        *(line.title for line in lines if table.is_compared(line)),
    ]
    by_name = {passage.name: passage for passage in given.corpus}
    matched = [
        span_reader.answer(a.text, [by_name[name] for name in a.gold]) in a.answers
        for a in given.test
    ]
    assert np.mean(matched) > 0
    gold = made.splitlines()[4].split("|")[2]
    assert gold.startswith(f" {np.mean(matched):.3f} [")


def test_answers_are_scored_as_hotpotqa_does(given: Setting) -> None:
    first, second, third = given.test[:3]
    found = Found({first.id: (), second.id: (), third.id: ()}, Asking())

    def ask(asked, read, name):
        assert read is found
        return [first.answers[0], "something else", None][: len(asked)]

    made = answers.scores(given, found, ask, "bm25")
    assert made["em@4"][:2] == [1.0, 0.0]
    assert np.isnan(made["em@4"][2:]).all()


def test_the_plot_is_a_picture(lines: list[table.Scored], tmp_path: Path) -> None:
    path = plot.draw(lines, tmp_path / "new" / "picture.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_page_keeps_its_text(tmp_path: Path, lines: list[table.Scored]) -> None:
    document = tmp_path / "which.md"
    document.write_text(f"# Which\n\nProse.\n\n{page.BEGIN}\n\nstale words\n")
    results = {"2wiki/bm25": {"date": "2026-11-26", "machine": "a machine"}}
    page.write(["### A table\n\n| a |\n"], lambda path: plot.draw(lines, path), results, document)
    text = document.read_text()
    assert text.startswith(f"# Which\n\nProse.\n\n{page.BEGIN}\n\n`python -m benchmarks")
    assert "--suite which`, 2026-11-26, on: a machine." in text
    assert "## A table" in text
    assert "stale words" not in text
    assert (tmp_path / page.PICTURE).exists()


def test_a_finished_part_is_not_run_again(
    given: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def bm25(place: Place) -> Result:
        ran.append(f"{place.setting.name} {place.folder.name}")
        return Result({UNTRAINED: {TWO_WIKI: single.bm25(place.setting)}})

    row = Row("bm25", "BM25", bm25, settings=(TWO_WIKI,), refused=((HOTPOTQA, "not here"),))
    invented.write(tmp_path / "data", Sizes())
    monkeypatch.setattr(which, "ROWS", (row,))
    monkeypatch.setattr(which, "DATA", tmp_path / "data")
    monkeypatch.setattr(
        which.Kept, "of", lambda suite, **_: Kept(suite, tmp_path / "runs", tmp_path / "results")
    )
    there = tmp_path / "published"
    publish, read_published = published.publish, published.published
    monkeypatch.setattr(published, "publish", lambda made: publish(made, there))
    monkeypatch.setattr(published, "published", lambda: read_published(there))
    document = tmp_path / "which.md"
    document.write_text(f"Text.\n{page.BEGIN}\n")
    write = page.write
    monkeypatch.setattr(page, "write", lambda *given: write(*given, document))
    for _ in range(2):
        which.run(False)
        assert ran == ["2wiki bm25"]
    assert (tmp_path / "results" / TWO_WIKI / "bm25.json").exists()
    assert "## 2wiki: what is found" in document.read_text()
    # One row alone leaves the page as it is; it can be written from what is there.
    document.write_text(f"Text.\n{page.BEGIN}\n")
    which.run(False, ["2wiki/bm25"])
    assert "## 2wiki" not in document.read_text()
    which.run(False, ["page"])
    assert "## 2wiki: what to use when" in document.read_text()
    assert "## What a GPU run of each row would cost" in document.read_text()
    assert ran == ["2wiki bm25"]
    # And from what is published, on a machine where nothing was run.
    shutil.rmtree(tmp_path / "results")
    document.write_text(f"Text.\n{page.BEGIN}\n")
    which.run(False, ["page"])
    assert "## 2wiki: what is found" in document.read_text()
    assert "Not run yet" not in document.read_text()
    assert ran == ["2wiki bm25"]
    which.run(False, ["2wiki/bm25"])
    assert len(ran) == 2  # it is not taken for a result of this machine
    with pytest.raises(InputError, match=r"--only=hotpotqa/bm25 cannot be run: not here"):
        which.run(False, ["hotpotqa/bm25"])
    with pytest.raises(InputError, match="the parts are 2wiki/bm25"):
        which.run(False, ["2wiki/nobody"])
    assert "Left out: hotpotqa/bm25; not here." in (tmp_path / "results" / "tables.md").read_text()


def test_a_part_that_fails_is_told_and_the_others_are_run(tmp_path: Path) -> None:
    def broken() -> dict[str, object]:
        raise RuntimeError("no memory")

    kept = Kept("which", tmp_path / "runs", tmp_path / "results")
    parts = {"2wiki/a": broken, "2wiki/b": lambda: {"ways": {}}}
    assert which.finish(kept, parts, ["2wiki/a", "2wiki/b"]) == ["2wiki/a"]
    assert [*kept.finished(parts)] == ["2wiki/b"]
    with pytest.raises(InputError, match="the parts are"):
        which.finish(kept, parts, ["2wiki/c"])


def test_what_is_not_run_yet_is_told(lines: list[table.Scored]) -> None:
    waiting = ["2wiki/leret-42", "2wiki/leret-43", "2wiki/leret-44", "2wiki/bm25", "2wiki/rlvr-43"]
    found, *_, notes = table.tables(lines, [], waiting)
    row = next(row for row in found.splitlines() if row.startswith("| LeReT"))
    assert "| not run yet |" in row
    assert row.count("|") == found.splitlines()[2].count("|")
    assert "| RLVR" not in found  # other seeds of it are not waited for
    assert f"- Not run yet: {', '.join(waiting)}." in notes


def test_advice_names_the_best_of_what_one_has(lines: list[table.Scored]) -> None:
    rows = advice.advice(lines).splitlines()[2:]
    told = {row.split(" | ")[0].strip("| "): row.split(" | ")[1:] for row in rows}
    assert told["no labels, no language model"][0] == "BM25 and MiniLM"
    assert "BM25 (" in told["no labels, no language model"][-1]
    assert told["gold passages, no language model"][0] == "Q-RAG, trained"
    assert told["gold passages, no language model"][3] == "5"
    assert told["gold passages, no language model"][-1].startswith("none")
    assert "at most 5 ms a question" not in told
    assert told["at most 30 ms a question"][0] == "Q-RAG, trained"


def test_gpu_costs_follow_from_their_parts() -> None:
    found = {each.recipe: each for each in gpu_cost.costs()}
    e5 = next(each for recipe, each in found.items() if "e5-hotpotqa" in recipe)
    # The table of published recipes has 17.1 hours and 51 dollars.
    assert round(e5.update_hours, 1) == 17.1
    assert round(e5.dollars) == 51
    assert {each.row for each in found.values()} <= {
        *(row.title.partition(", ")[0] for row in ROWS),
        *(row.title for row in ROWS),
    }
    assert "| Q-RAG |" in gpu_cost.table()

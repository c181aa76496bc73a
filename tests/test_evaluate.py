"""Scoring a run: its logs and summary, resuming, which setting wins, bad input."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.worlds.records import tiny_hotpotqa
from qrag_jax.data.long_docs import DocumentsConfig, books_of
from qrag_jax.metrics import stopping
from qrag_jax.metrics.facts import chunk_filter
from qrag_jax.metrics.row_log import read_record, read_retrievals
from qrag_jax.models.first_encoder import ScratchConfig, make_scratch_folder
from qrag_jax.runtime import whole_files
from tests.data.test_long_docs import shelf
from tests.entry_points import Commands, json_lines, refusal
from tests.retrieval_logs import STEPS, played_rows, write_log

SAMPLES = 16  # what the shared run's data hold for evaluation
MULTI, SINGLE = "eval_seed42.jsonl", "single_step_eval_seed42.jsonl"


@pytest.fixture(scope="module")
def scored_run(
    finished_run: Path, commands: Commands, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    workdir = Path(shutil.copytree(finished_run, tmp_path_factory.mktemp("scored") / "run"))
    commands.succeed("evaluate", f"--workdir={workdir}")
    return workdir


@pytest.fixture
def run_copy(scored_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(scored_run, tmp_path / "run"))


def best(workdir: Path) -> Path:
    """The folder with the logs of the best checkpoint."""
    (folder,) = (workdir / "eval").glob("best-*")
    return folder


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same play; batches that begin elsewhere round sums another way."""
    for row, other in zip(found, expected, strict=True):
        values, others = row.pop("q_values"), other.pop("q_values")
        assert values == pytest.approx(others, rel=1e-4, abs=1e-6)
        assert row == other


# ---------------------------------------------------------------------- what is written


def test_logs_have_every_sample_in_order(scored_run: Path) -> None:
    ids = [row["_id"] for row in tiny_hotpotqa("dev")]
    for folder in (best(scored_run), scored_run / "eval" / "untrained"):
        multi, single = json_lines(folder / MULTI), json_lines(folder / SINGLE)
        for log in (multi, single):
            assert [row["id"] for row in log] == ids
            for row in log:
                taken, facts = row["pred_idx"], set(row["sf_idx"])
                assert len(taken) == len(set(taken)) == len(row["q_values"]) == 2
                assert row["em"] == float(facts <= set(taken)) == float(row["return"] > 0)
        for several, one in zip(multi, single, strict=True):  # the highest of the first step
            assert one["pred_idx"][0] == several["pred_idx"][0]
            assert one["q_values"] == sorted(one["q_values"], reverse=True)


def test_summary(scored_run: Path) -> None:
    summary = json.loads((scored_run / "eval/summary.json").read_text())
    scores = summary["scores"]
    assert (summary["samples"], summary["checkpoint"]) == (SAMPLES, "best")
    assert summary["best_is_untrained"] == (summary["step"] == 0)
    logs = {
        "untrained": scored_run / "eval/untrained" / MULTI,
        "single_step": scored_run / "eval/untrained" / SINGLE,
        "single_step_trained": best(scored_run) / SINGLE,
        "trained": best(scored_run) / MULTI,
    }
    for name, path in logs.items():
        for short, column in (("f1", "fact_f1"), ("return", "return")):
            mean = np.mean([row[short] for row in json_lines(path)])
            assert scores[name][column]["mean"] == pytest.approx(mean)
        # Cut at the last fact: neither discounted nor penalised.
        cut, em = summary["until_found"][name], scores[name]["fact_em"]["mean"]
        assert cut["return"]["mean"] == cut["fact_em"]["mean"] == em
    assert set(summary["gains"]) == set(logs) - {"trained"}
    for name, gains in summary["gains"].items():
        for score, gain in gains.items():
            ours, theirs = (scores[each][score]["mean"] for each in ("trained", name))
            assert gain["mean"] == pytest.approx(ours - theirs)


# ---------------------------------------------------------------------- resuming


def test_killed_midway_gives_the_same_logs(run_copy: Path, commands: Commands) -> None:
    whole = {path: path.read_bytes() for path in run_copy.glob("eval/*/*.jsonl")}
    multi, single = best(run_copy) / MULTI, best(run_copy) / SINGLE
    lines = whole[multi].splitlines(keepends=True)
    multi.write_bytes(b"".join(lines[:8]) + lines[8][:40])
    single.write_bytes(b"".join(whole[single].splitlines(keepends=True)[:5]))  # written later
    commands.succeed("evaluate", f"--workdir={run_copy}")
    for path, expected in whole.items():
        assert_same(json_lines(path), [json.loads(line) for line in expected.splitlines()])
    assert multi.read_bytes().splitlines()[:5] == whole[multi].splitlines()[:5]


def test_other_settings_into_the_same_log(run_copy: Path, commands: Commands) -> None:
    log, given = best(run_copy) / MULTI, ("evaluate", f"--workdir={run_copy}")
    before = log.read_bytes()
    text = refusal(commands.run(*given, "--samples=3", "--config.pqn.gamma=0.5"))
    assert all(name in text for name in ("samples", "config.pqn.gamma", "--restart"))
    with whole_files.log_locks(log):
        assert str(log) in refusal(commands.run(*given))
    # The last checkpoint has logs of its own.
    commands.succeed(*given, "--samples=3", "--checkpoint=last", "--restart")
    assert log.read_bytes() == before
    assert len(json_lines(run_copy / "eval" / "last-24" / MULTI)) == 3


# ---------------------------------------------------------------------- which setting wins


def test_the_command_line_goes_before_a_file_and_that_before_the_saved_config(
    run_copy: Path, commands: Commands, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    text = "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({})\n"
    path.write_text(text.replace("{}", "{'eval': {'seed': 7, 'batch_size': 5}}"))
    words = (f"--workdir={run_copy}", f"--eval_config={path}", f"--out={tmp_path / 'out'}")
    commands.succeed("evaluate", *words, "--samples=3")
    (log,) = (tmp_path / "out").glob("best-*/eval_seed7.jsonl")
    assert len(json_lines(log)) == 3
    commands.succeed("evaluate", *words, "--config.eval.seed=9", "--config.eval.batch_size=3")
    (log,) = (tmp_path / "out").glob("best-*/eval_seed9.jsonl")
    assert_same(json_lines(log), json_lines(best(run_copy) / MULTI))  # batches change nothing
    path.write_text(text.replace("{}", "{'evl': {'seed': 7}}"))
    assert "evl" in refusal(commands.run("evaluate", *words))


def test_scores_on_other_data_need_a_folder_of_their_own(
    run_copy: Path, commands: Commands, tmp_path: Path
) -> None:
    whole, workdir = json_lines(best(run_copy) / MULTI), f"--workdir={run_copy}"
    mine = tmp_path / "mine.jsonl"
    mine.write_text("\n".join(map(json.dumps, [*tiny_hotpotqa("dev")][4:14])))
    out = f"--out={tmp_path / 'out'}"
    commands.succeed("evaluate", workdir, f"--config.data.path={mine}", out)
    (log,) = (tmp_path / "out").glob(f"best-*/{MULTI}")
    assert [row["pred_idx"] for row in json_lines(log)] == [row["pred_idx"] for row in whole[4:14]]

    shutil.rmtree(run_copy / "eval")  # no log is there that would refuse other settings
    other = "--config.data.path=examples/worlds/records.py:large_hotpotqa"
    text = refusal(commands.run("evaluate", workdir, "--samples=2", other))
    assert "config.data.path" in text
    assert not (run_copy / "eval").exists()


def test_refusals(run_copy: Path, untrained_best: Path, commands: Commands, tmp_path: Path) -> None:
    workdir = f"--workdir={run_copy}"
    for words, name in (
        ([], "--workdir"),
        ([f"--workdir={tmp_path}"], "config.json"),
        ([workdir, "--eval_config=no_such.py"], "no_such.py"),
    ):
        assert name in refusal(commands.run("evaluate", *words))
    shutil.rmtree(run_copy / "encoder")
    sizes = ScratchConfig(layers=1, hidden=16, heads=2, vocab=60, positions=256)
    make_scratch_folder(run_copy / "encoder", ["another text"], sizes, seed=0)
    refusal(commands.run("evaluate", workdir))
    commands.succeed("evaluate", f"--workdir={untrained_best}", "--samples=2")
    assert json.loads((untrained_best / "eval/summary.json").read_text())["best_is_untrained"]


# -------------------------------------------------- documents of several lengths

LENGTHS = {12: 16, 20: 16, 80: 3}  # documents of each; 20 is the length of the training's
BOOKS = {"ada": 300, "bob": 280, "cleo": 260, "dora": 240, "emil": 220}  # sentences of each


def test_documents_of_several_lengths(commands: Commands, tmp_path: Path) -> None:
    workdir, books = tmp_path / "run", tmp_path / "books"
    books.mkdir()
    commands.succeed(
        *("train", "--config=configs/babilong.py:tiny", f"--workdir={workdir}"),
        f"--config.data.sources.babilong.noise={shelf(books, BOOKS)}",
        *("--config.train.steps=1", "--config.train.eval_every=1"),
        *("--config.encoder.length_buckets=1", "--config.encoder.block_sizes=1"),
        "--config.encoder.scratch.layers=1",
    )
    # In another order: lengths are played from the shortest up, with the samples given for each.
    lengths = ("--chunks=80,12,20", "--samples=3,16")
    commands.succeed("evaluate", f"--workdir={workdir}", *lengths)
    (path,) = workdir.glob("lengths/best-*/eval_seed42_lengths.json")
    found = json.loads(path.read_text())
    assert [result["chunks"] for result in found] == list(LENGTHS)
    logs = {length: json_lines(path.parent / f"eval_seed42_ns{length}.jsonl") for length in LENGTHS}
    for result in found:
        log = logs[result["chunks"]]
        assert len(log) == result["samples"] == LENGTHS[result["chunks"]]
        assert all(max(row["pred_idx"] + row["sf_idx"]) < result["chunks"] for row in log)
        mean = result["scores"]["fact_em"]["mean"]
        assert mean == pytest.approx(np.mean([row["em"] for row in log]))
    # The same questions at every length.
    assert [row["sf_texts"] for row in logs[12][:3]] == [row["sf_texts"] for row in logs[80]]
    # Books of the training are never scored on.
    shelf(books, {"frida": 290})  # with it bob, a book of training, is one for dev
    trained = set(json.loads((workdir / "books.json").read_text())["babilong"])
    now = {book.name for book in books_of(DocumentsConfig(noise=str(books)), "dev")[1]}
    assert trained & now  # the split has changed
    given = ("evaluate", f"--workdir={workdir}", "--chunks=12", f"--out={tmp_path / 'out'}")
    text = refusal(commands.run(*given))
    assert "config.data.sources.babilong.noise_dev" in text
    assert any(name in text for name in trained & now)


# -------------------------------------------------- when to stop, and cutting a log down


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "eval" / "held_out.jsonl", played_rows(60, seed=1))


def test_tuned_on_one_log_and_reported_on_both(
    log: Path, tmp_path: Path, commands: Commands
) -> None:
    held_out, other = read_retrievals(log), played_rows(40, seed=2, prefix="t")
    test = write_log(tmp_path / "test.jsonl", other)
    commands.succeed("evaluate", f"--log={log}", f"--test={test}")
    found = json.loads((log.parent / "stopping.json").read_text())
    thresholds, swept = stopping.sweep_thresholds(held_out)
    threshold = found["threshold"]
    assert threshold == thresholds[stopping.choose(swept["fact_f1"], swept["steps"])]
    for name, path, rows in (("tuned_on", log, held_out), ("reported_on", test, other)):
        assert (found[name]["log"], found[name]["samples"]) == (str(path), len(rows))
        kept = map(chunk_filter("qvalue", {"threshold": threshold}), rows)
        mean = found[name]["scores"]["threshold"]["fact_f1"]["mean"]
        assert mean == pytest.approx(np.mean([row.f1 for row in kept]))
        assert mean > found[name]["scores"]["no_stopping"]["fact_f1"]["mean"]
    assert found["provenance"] == {"encoder": "best-7", "max_steps": STEPS}


def test_writes_the_filtered_rows_with_their_origin(
    log: Path, tmp_path: Path, commands: Commands
) -> None:
    before = log.read_bytes()
    new, facts = tmp_path / "new" / "cut.jsonl", tmp_path / "facts.jsonl"
    commands.succeed(
        "evaluate", f"--log={log}", "--filter=qvalue", "--threshold=0.45", f"--out={new}"
    )
    rows = read_retrievals(log)
    assert read_retrievals(new) == [*map(chunk_filter("qvalue", {"threshold": 0.45}), rows)]
    assert log.read_bytes() == before
    applied = {"name": "qvalue", "threshold": 0.45}
    origin = {"filtered_from": str(log), "filters": [applied]}
    assert read_record(new) == read_record(log) | origin
    # What was filtered may be filtered again, but no threshold is tuned on it.
    commands.succeed("evaluate", f"--log={new}", "--filter=gt", f"--out={facts}")
    assert read_record(facts)["filters"] == [applied, {"name": "gt"}]
    taken = [row.pred_idx for row in read_retrievals(facts)]
    assert taken == [sorted(row.sf_idx) for row in rows]
    assert str(new) in refusal(commands.run("evaluate", f"--log={new}"))


def test_refusals_write_nothing(log: Path, tmp_path: Path, commands: Commands) -> None:
    new, copy, before = tmp_path / "new.jsonl", tmp_path / "copy.jsonl", log.read_bytes()
    copy.write_bytes(before)
    of_log, into_new = f"--log={log}", f"--out={new}"
    *rows, last = read_retrievals(log)
    last = dataclasses.replace(last, q_values=last.q_values[:-1])
    unplayed = write_log(tmp_path / "unplayed.jsonl", [*rows, last])
    for words, named in (
        ([of_log, f"--test={copy}"], "copy.jsonl"),  # the same rows
        *(([of_log, f"--budgets={words}"], "--budgets") for words in ("2,x", "0,2")),
        ([f"--log={unplayed}"], "q59"),  # a row without all of its Q
        ([of_log, into_new, "--filter=best"], "best"),
        ([of_log, f"--out={log}", "--filter=none"], str(log)),
    ):
        assert named in refusal(commands.run("evaluate", *words)), words
    assert log.read_bytes() == before
    assert not new.exists()
    assert not (log.parent / "stopping.json").exists()

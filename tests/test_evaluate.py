"""Scoring a run: its logs and summary, resuming, which setting wins, bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder
from qrag_jax.runtime import locks
from tests.entry_points import Commands, refusal

pytestmark = pytest.mark.long

SAMPLES = 16  # what the shared run's data hold for evaluation
FIELDS = [
    *("id", "question", "answer", "sf_idx", "pred_idx", "q_values", "sf_texts", "pred_texts"),
    *("return", "text_len", "f1", "em", "source"),
]


@pytest.fixture(scope="module")
def scored_run(
    finished_run: Path, commands: Commands, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    workdir = Path(shutil.copytree(finished_run, tmp_path_factory.mktemp("scored") / "run"))
    out = commands.succeed("evaluate", f"--workdir={workdir}")
    assert f"{SAMPLES} questions, best checkpoint" in out
    return workdir


@pytest.fixture
def run_copy(scored_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(scored_run, tmp_path / "run"))


def best(workdir: Path) -> Path:
    """The folder with the logs of the best checkpoint."""
    (folder,) = (workdir / "eval").glob("best-*")
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def dev_ids(commands: Commands) -> list[str]:
    """Ids of the evaluation questions in the order of their file."""
    for path in commands.folder.glob("cache/synthetic/hotpotqa-*/dev.jsonl"):
        ids = [json.loads(line)["_id"] for line in path.read_text().splitlines()]
        if len(ids) == SAMPLES:
            return ids
    raise AssertionError("no corpus of the shared run")


# ---------------------------------------------------------------------- what is written


@pytest.mark.parametrize("name", ["eval_seed42.jsonl", "single_step_eval_seed42.jsonl"])
def test_logs_have_every_sample_in_order(scored_run: Path, commands: Commands, name: str) -> None:
    for folder in (best(scored_run), scored_run / "eval" / "untrained"):
        log = rows(folder / name)
        assert [row["id"] for row in log] == dev_ids(commands)
        for row in log:
            assert list(row) == FIELDS
            taken, facts = row["pred_idx"], set(row["sf_idx"])
            assert len(taken) == len(set(taken)) == len(row["q_values"]) == 2
            assert all(0 <= index < 8 for index in taken)
            assert row["em"] == float(facts <= set(taken))
            both = len(facts & set(taken))
            assert row["f1"] == pytest.approx(2 * both / (len(facts) + len(taken)))
            assert len(row["pred_texts"]) == len(taken)
            assert len(row["sf_texts"]) == len(facts)
            assert (row["return"] > 0) == (row["em"] == 1)


def test_single_step_takes_the_highest_of_the_first_step(scored_run: Path) -> None:
    multi = rows(best(scored_run) / "eval_seed42.jsonl")
    single = rows(best(scored_run) / "single_step_eval_seed42.jsonl")
    for several, one in zip(multi, single, strict=True):
        assert one["pred_idx"][0] == several["pred_idx"][0]
        assert one["q_values"] == sorted(one["q_values"], reverse=True)


def test_summary(scored_run: Path) -> None:
    summary = json.loads((scored_run / "summary.json").read_text())
    same = json.loads((scored_run / "eval" / "eval_seed42_summary.json").read_text())
    assert summary == same
    assert (summary["samples"], summary["checkpoint"]) == (SAMPLES, "best")
    training = json.loads((scored_run / "training.json").read_text())
    assert summary["seconds"] == training["seconds"]
    assert summary["episodes_per_second"] > 0
    logs = {
        "untrained": scored_run / "eval/untrained/eval_seed42.jsonl",
        "single_step": scored_run / "eval/untrained/single_step_eval_seed42.jsonl",
        "single_step_trained": best(scored_run) / "single_step_eval_seed42.jsonl",
        "trained": best(scored_run) / "eval_seed42.jsonl",
    }
    for name, path in logs.items():
        for short, column in (("em", "fact_em"), ("f1", "fact_f1"), ("return", "return")):
            interval = summary[name]["intervals"][column]
            assert summary[name][column] == interval["mean"]
            assert interval["mean"] == pytest.approx(np.mean([r[short] for r in rows(path)]))
            assert interval["low"] <= interval["mean"] <= interval["high"]
            if short != "f1":  # the same facts are found
                cut = summary["until_found"][name]["fact_em"]
                assert cut == pytest.approx(np.mean([r["em"] for r in rows(path)]))
        found = [set(r["sf_idx"]) <= set(r["pred_idx"][:1]) for r in rows(path)]
        f1 = [1.0 if one else r["f1"] for one, r in zip(found, rows(path), strict=True)]
        assert summary["until_found"][name]["fact_f1"] == pytest.approx(np.mean(f1))
        returns = summary["until_found"][name]["return"]  # neither discounted nor penalised
        assert returns == summary[name]["fact_em"]
    assert summary["mode"] == "full budget"
    assert summary["best_is_untrained"] == (summary["step"] == 0)
    assert set(summary["gains"]) == set(logs) - {"trained"}
    for name, gains in summary["gains"].items():
        for score, gain in gains.items():
            assert gain["mean"] == pytest.approx(summary["trained"][score] - summary[name][score])
            assert gain["low"] <= gain["mean"] <= gain["high"]


def test_a_retriever_that_stops_at_once_has_its_line(run_copy: Path, commands: Commands) -> None:
    log = best(run_copy) / "eval_seed42.jsonl"
    nothing = {"pred_idx": [], "q_values": [], "pred_texts": [], "f1": 0.0, "em": 0.0}
    log.write_text("".join(json.dumps(row | nothing) + "\n" for row in rows(log)))
    out = commands.succeed("evaluate", f"--workdir={run_copy}")
    lines = out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("full budget "))
    columns = ["fact_em", "fact_f1", "precision", "recall", "steps", "recall@1", "recall@2"]
    assert lines[header].split()[2:] == [*columns, "return"]
    assert lines[header + 6].split() == ["until", "found", "*", *columns[:5], "return"]
    assert [line.split("  ")[0] for line in lines[header + 7 : header + 12]] == [
        *("untrained", "single step", "single step trained", "trained"),
        "* uses the answer key: an episode ends once all supporting facts are found, and returns "
        "1, as in Q-RAG's own evaluation",
    ]
    untrained, _, _, trained = lines[header + 1 : header + 5]
    zero = "0.000 [0.000, 0.000]"
    shown = [zero, zero, "0.000", "0.000", "0.000", zero, zero]  # recall@2: of no chunk taken
    assert re.split(r"  +", trained)[:-1] == ["trained", *shown]
    assert re.split(r"  +", untrained)[5] == "2.000"
    summary = json.loads((run_copy / "summary.json").read_text())
    assert summary["trained"]["steps"] == summary["trained"]["fact_recall"] == 0.0
    assert summary["untrained"]["steps"] == 2.0


# ---------------------------------------------------------------------- resuming


def test_killed_midway_gives_the_same_logs(run_copy: Path, commands: Commands) -> None:
    whole = {path: path.read_bytes() for path in run_copy.glob("eval/*/*.jsonl")}
    assert len(whole) == 4
    multi = best(run_copy) / "eval_seed42.jsonl"
    lines = whole[multi].splitlines(keepends=True)
    multi.write_bytes(b"".join(lines[:8]) + lines[8][:40])
    single = best(run_copy) / "single_step_eval_seed42.jsonl"
    lines = whole[single].splitlines(keepends=True)
    single.write_bytes(b"".join(lines[:5]))  # the later of the two to be written
    out = commands.succeed("evaluate", f"--workdir={run_copy}")
    assert f"5 of {SAMPLES} questions are in the logs already" in out
    for path, expected in whole.items():
        found, wanted = rows(path), [json.loads(line) for line in expected.splitlines()]
        for row, other in zip(found, wanted, strict=True):
            # Batches begin elsewhere, so that sums may be rounded another way.
            assert row.pop("q_values") == pytest.approx(other.pop("q_values"), rel=1e-5, abs=1e-7)
            assert row == other
    assert multi.read_bytes().splitlines()[:8] == whole[multi].splitlines()[:8]


def test_other_settings_into_the_same_log(run_copy: Path, commands: Commands) -> None:
    log = best(run_copy) / "eval_seed42.jsonl"
    before = log.read_bytes()
    arguments = (f"--workdir={run_copy}", "--samples=3")
    text = refusal(commands.run("evaluate", *arguments))
    assert "was begun with other settings, samples (was" in text
    assert "--restart" in text
    changed = ("--config.env.never_terminate=False", "--config.pqn.gamma=0.5")
    text = refusal(commands.run("evaluate", f"--workdir={run_copy}", *changed))
    assert "config.env.never_terminate (was true, now false), config.pqn.gamma (was 0.99, " in text
    assert log.read_bytes() == before
    commands.succeed("evaluate", *arguments, "--restart")
    assert len(rows(log)) == 3
    assert set(log.read_bytes().splitlines()) < set(before.splitlines())


def test_a_log_that_another_process_writes_or_wrote_to(run_copy: Path, commands: Commands) -> None:
    log = run_copy / "eval" / "untrained" / "eval_seed42.jsonl"
    before = log.read_bytes()
    with locks.log_locks(log):
        text = refusal(commands.run("evaluate", f"--workdir={run_copy}"))
    assert f"{log} is being written by process {os.getpid()} on " in text
    assert "give another --out" in text
    log.write_bytes(before + before[: before.index(b"\n") + 1])  # as two processes would leave it
    text = refusal(commands.run("evaluate", f"--workdir={run_copy}"))
    assert f"{log} has {SAMPLES + 1} rows, but there are {SAMPLES} questions" in text
    assert "--restart" in text


def test_last_checkpoint_has_logs_of_its_own(run_copy: Path, commands: Commands) -> None:
    before = (best(run_copy) / "eval_seed42.jsonl").read_bytes()
    commands.succeed("evaluate", f"--workdir={run_copy}", "--checkpoint=last")
    assert (best(run_copy) / "eval_seed42.jsonl").read_bytes() == before
    (folder,) = (run_copy / "eval").glob("last-*")
    assert folder.name == "last-24"
    assert len(rows(folder / "eval_seed42.jsonl")) == SAMPLES
    assert json.loads((run_copy / "summary.json").read_text())["step"] == 24


# ---------------------------------------------------------------------- modes, step 0


def test_play_that_ended_at_the_last_fact_has_no_full_budget(
    run_copy: Path, commands: Commands, tmp_path: Path
) -> None:
    # Greedily planned as well: both end at the last fact.
    told = commands.succeed(
        *("evaluate", f"--workdir={run_copy}", f"--out={tmp_path / 'out'}"),
        *("--config.env.never_terminate=False", "--config.eval.stop_threshold=-100.0"),
    )
    assert "\nfull budget" not in f"\n{told}"
    assert "\nuntil found *" in f"\n{told}"
    assert "no full budget: with config.env.never_terminate=False it is never played" in told
    summary = json.loads((tmp_path / "out" / "eval_seed42_summary.json").read_text())
    assert summary["mode"] == "until found"
    whole = json.loads((run_copy / "summary.json").read_text())
    for name in ("untrained", "trained", "single_step"):
        for score in ("fact_em", "fact_f1", "fact_precision", "fact_recall", "return"):
            value = summary["until_found"][name][score]
            assert value == pytest.approx(whole["until_found"][name][score])
    (folder,) = (tmp_path / "out").glob("best-*")
    planned, played = (
        rows(folder / name) for name in ("planned_eval_seed42.jsonl", "eval_seed42.jsonl")
    )
    for one, other in zip(planned, played, strict=True):
        assert (one["pred_idx"], one["return"]) == (other["pred_idx"], other["return"])
    mean = np.mean([row["f1"] for row in played])
    assert summary["until_found"]["trained"]["fact_f1"] == pytest.approx(mean)
    gain = summary["gains"]["single_step"]["fact_f1"]["mean"]
    both = (summary["until_found"][name]["fact_f1"] for name in ("trained", "single_step"))
    assert gain == pytest.approx(next(both) - next(both))


def test_a_best_checkpoint_of_step_0_is_called_untrained(
    untrained_best: Path, commands: Commands
) -> None:
    told = commands.succeed("evaluate", f"--workdir={untrained_best}", "--samples=2")
    assert "best checkpoint of step 0" in told
    assert "best = untrained" in told
    summary = json.loads((untrained_best / "summary.json").read_text())
    assert summary["best_is_untrained"]
    assert summary["trained"] == summary["untrained"]


# ---------------------------------------------------------------------- which setting wins


@pytest.fixture
def eval_config(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config():\n"
        "    return ConfigDict({'eval': {'seed': 7, 'batch_size': 5}})\n"
    )
    return path


def test_eval_config_goes_before_the_saved_config(
    run_copy: Path, commands: Commands, eval_config: Path
) -> None:
    arguments = (f"--workdir={run_copy}", f"--eval_config={eval_config}", "--samples=3")
    commands.succeed("evaluate", *arguments)
    ids = [row["id"] for row in rows(best(run_copy) / "eval_seed7.jsonl")]
    everything = dev_ids(commands)
    assert len(ids) == 3
    assert ids == sorted(ids, key=everything.index)
    assert (best(run_copy) / "eval_seed42.jsonl").exists()


def test_command_line_goes_first_and_batches_change_nothing(
    run_copy: Path, commands: Commands, eval_config: Path, tmp_path: Path
) -> None:
    commands.succeed(
        "evaluate",
        f"--workdir={run_copy}",
        f"--eval_config={eval_config}",
        "--config.eval.seed=9",
        "--config.eval.batch_size=3",
        f"--out={tmp_path / 'out'}",
    )
    (log,) = (tmp_path / "out").glob("best-*/eval_seed9.jsonl")
    for small, large in zip(rows(log), rows(best(run_copy) / "eval_seed42.jsonl"), strict=True):
        assert small["pred_idx"] == large["pred_idx"]
        assert small["q_values"] == pytest.approx(large["q_values"], rel=1e-4, abs=1e-6)
    assert not (run_copy / "eval" / "eval_seed9_summary.json").exists()


def test_planned_greedily_the_run_scores_the_same(
    run_copy: Path, commands: Commands, tmp_path: Path
) -> None:
    # A threshold that never stops: episodes go through the planner, and are the rollout's.
    commands.succeed(
        *("evaluate", f"--workdir={run_copy}", "--config.eval.stop_threshold=-100.0"),
        f"--out={tmp_path / 'out'}",
    )
    (log,) = (tmp_path / "out").glob("best-*/planned_eval_seed42.jsonl")
    for planned, played in zip(rows(log), rows(best(run_copy) / "eval_seed42.jsonl"), strict=True):
        assert planned.pop("q_values") == pytest.approx(played.pop("q_values"), rel=1e-4, abs=1e-6)
        assert planned == played


def test_a_beam_is_played_by_the_trained_retriever(
    run_copy: Path, commands: Commands, tmp_path: Path
) -> None:
    told = commands.succeed(
        *("evaluate", f"--workdir={run_copy}", f"--out={tmp_path / 'out'}"),
        *("--config.eval.beam=4", "--config.eval.beam_score=sum"),
    )
    # Cutting what was searched for all steps is not a search that ends at the last fact.
    assert "planned: the path that was best for all steps, cut at its last fact" in told
    (log,) = (tmp_path / "out").glob("best-*/planned_eval_seed42.jsonl")
    beam, greedy = rows(log), rows(best(run_copy) / "eval_seed42.jsonl")
    assert [row["id"] for row in beam] == [row["id"] for row in greedy]
    assert [row["pred_idx"] for row in beam] != [row["pred_idx"] for row in greedy]
    for row, other in zip(beam, greedy, strict=True):
        # Of the two steps' Q the sum: a wider search of so few never finds less.
        assert row["q_values"][0] + 0.99 * row["q_values"][1] >= (
            other["q_values"][0] + 0.99 * other["q_values"][1] - 1e-5
        )


def test_other_file_is_scored_whole(run_copy: Path, commands: Commands, tmp_path: Path) -> None:
    (path,) = (
        path
        for path in commands.folder.glob("cache/synthetic/hotpotqa-*/dev.jsonl")
        if len(path.read_text().splitlines()) == SAMPLES
    )
    mine = tmp_path / "mine.jsonl"
    mine.write_text("\n".join(path.read_text().splitlines()[4:14]))
    commands.succeed(
        *("evaluate", f"--workdir={run_copy}", f"--config.data.path={mine}"),
        f"--out={tmp_path / 'out'}",
    )
    (log,) = (tmp_path / "out").glob("best-*/eval_seed42.jsonl")
    whole = rows(best(run_copy) / "eval_seed42.jsonl")
    assert [row["pred_idx"] for row in rows(log)] == [row["pred_idx"] for row in whole[4:14]]


def test_scores_on_other_data_need_a_folder_of_their_own(
    run_copy: Path, commands: Commands
) -> None:
    shutil.rmtree(run_copy / "eval")  # no log is there that would refuse other settings
    before = (run_copy / "summary.json").read_bytes()
    other = ("--config.data.synthetic.seed=1", "--config.eval.path=synthetic")
    text = refusal(commands.run("evaluate", f"--workdir={run_copy}", "--samples=2", *other))
    assert "own (not as in its config: config.data.synthetic.seed, config.eval.path); " in text
    assert "give --out=FOLDER for scores on other data" in text
    assert (run_copy / "summary.json").read_bytes() == before
    assert not (run_copy / "eval").exists()
    # How fast they are read, and what training alone reads, is no other data.
    same = ("--config.data.workers=1", "--config.eval.batch_size=3")
    commands.succeed("evaluate", f"--workdir={run_copy}", "--samples=2", *same)
    assert json.loads((run_copy / "summary.json").read_text())["samples"] == 2
    before = (best(run_copy) / "eval_seed42.jsonl").read_bytes()
    of_training = ("--config.data.limit=5", "--config.data.sources.hotpotqa.weight=2.0")
    again = ("evaluate", f"--workdir={run_copy}", "--samples=2", *same, *of_training)
    assert "2 of 2 questions are in the logs already" in commands.succeed(*again)
    commands.succeed(*again, "--restart")
    assert (best(run_copy) / "eval_seed42.jsonl").read_bytes() == before


# ---------------------------------------------------------------------- bad input


def test_refusals(commands: Commands, tmp_path: Path) -> None:
    assert "--workdir=runs/hotpotqa" in refusal(commands.run("evaluate"))
    text = refusal(commands.run("evaluate", f"--workdir={tmp_path}"))
    assert f"{tmp_path / 'config.json'} does not exist; --workdir must be the folder" in text


def test_run_that_was_never_trained(run_copy: Path, commands: Commands) -> None:
    shutil.rmtree(run_copy / "checkpoints")
    text = refusal(commands.run("evaluate", f"--workdir={run_copy}"))
    assert f"{run_copy / 'checkpoints' / 'best'} holds no checkpoint; train first" in text


def test_unknown_flag_values(run_copy: Path, commands: Commands) -> None:
    workdir = f"--workdir={run_copy}"
    text = refusal(commands.run("evaluate", workdir, "--checkpoint=foo"))
    assert "--checkpoint=foo: value should be one of <best|last>" in text
    text = refusal(commands.run("evaluate", workdir, "--config.evl.seed=1"))
    assert "--config.evl.seed: the config has no field 'evl'" in text
    text = refusal(commands.run("evaluate", workdir, "--eval_config=no_such.py"))
    assert "--eval_config=no_such.py: " in text
    assert "No such file" in text


def test_eval_config_with_an_unknown_field(
    run_copy: Path, commands: Commands, eval_config: Path
) -> None:
    eval_config.write_text(eval_config.read_text().replace("'eval'", "'evl'"))
    text = refusal(
        commands.run("evaluate", f"--workdir={run_copy}", f"--eval_config={eval_config}")
    )
    assert "evl" in text


def test_encoder_of_another_size(run_copy: Path, commands: Commands) -> None:
    shutil.rmtree(run_copy / "encoder")
    sizes = ScratchConfig(layers=1, hidden=16, heads=2, vocab=60, positions=256)
    make_scratch_folder(run_copy / "encoder", ["another text"], sizes, seed=0)
    text = refusal(commands.run("evaluate", f"--workdir={run_copy}"))
    assert "was made with another configuration" in text

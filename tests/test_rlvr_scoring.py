"""RLVR's commands around a run: predictions of its model, their scores, and pages of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax import predict
from qrag_jax.errors import InputError
from qrag_jax.metrics import predictions
from qrag_jax.rollouts.trajectories import TokenTrajectory
from qrag_jax.systems.rlvr_config import load_config
from qrag_jax.systems.rlvr_scoring import PlayOptions, score_language_model
from tests.entry_points import Commands, refusal
from tests.evaluators.shown_pages import Page

pytestmark = pytest.mark.long

TINY = (
    "--config=configs/rlvr.py:tiny",
    "--config.model.tiny.layers=1",
    "--config.model.tiny.copies=False",
    "--config.model.tiny.hidden=32",
    "--config.model.tiny.intermediate=32",
    "--config.tools.turn_tokens=12",
    "--config.train.checkpoint_every=1",
    "--config.questions.bridge_train=24",
    "--config.sft.steps=2",
    "--config.train.steps=1",
    "--config.train.eval_every=3",
    "--config.questions.bridge_dev=4",
    "--config.eval.part=all",
    "--config.grpo.members=2",
)
QUESTIONS, DRAWS = 4, 2
FOLDERS = ("last-3", "sft-2", "untrained")  # of what is scored


@pytest.fixture(scope="module")
def run(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("rlvr") / "run"
    commands.succeed("train", *TINY, f"--workdir={workdir}")
    return workdir


@pytest.fixture(scope="module")
def told(commands: Commands, run: Path) -> str:
    """What `evaluate` prints of the run; its files stay in the run's folder."""
    return commands.succeed("evaluate", *scoring(run))


def scoring(run: Path) -> tuple[str, ...]:
    retrievers = "--retrievers=bm25,golden"
    return (f"--workdir={run}", "--checkpoint=last", f"--sampled={DRAWS}", retrievers)


@pytest.fixture(scope="module")
def predicted(run: Path, told: str) -> Path:
    """The predictions that were scored."""
    return run / "eval" / "last-3" / "bm25.jsonl"


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_has_all_of_an_episode(predicted: Path, run: Path) -> None:
    rows = lines_of(predicted)
    assert [row["draw"] for row in rows] == [*range(DRAWS)] * QUESTIONS
    assert len({row["id"] for row in rows}) == QUESTIONS
    vocabulary = json.loads((run / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    for row in rows:
        trajectory = TokenTrajectory.from_json(row["trajectory"])
        assert trajectory.to_json() == row["trajectory"]
        assert row["reward"] == trajectory.parts["reward"]
        turns = [turn for segment in trajectory.segments for turn in segment]
        assert len(turns) == len(row["turns"]) == trajectory.facts["tally"]["turns"]
        for turn, texts in zip(turns, row["turns"]):
            assert len(texts["observed_tokens"]) == len(turn.observed)
            assert len(texts["sampled_tokens"]) == len(turn.sampled)
            assert max(turn.sampled) < len(vocabulary) + 10
            assert (turn.log_probs <= 0).all()
            assert np.isfinite(turn.log_probs).all()
        assert row["question"] in row["turns"][0]["observed"]
    assert len({str(row["trajectory"]["segments"]) for row in rows}) == len(rows)


def test_a_killed_prediction_goes_on(commands: Commands, run: Path, predicted: Path) -> None:
    """Parts have two questions of two draws; what is no whole part is played again."""
    whole = predicted.read_text().splitlines(keepends=True)
    file = run / "predictions" / "last-3-bm25.jsonl"
    file.parent.mkdir()
    shutil.copy(predicted.with_suffix(".json"), file.with_suffix(".json"))
    file.write_text("".join(whole[:6]) + whole[6][:40])
    given = (f"--workdir={run}", "--checkpoint=last")
    out = commands.succeed("predict", *given, f"--sampled={DRAWS}")
    assert f"8 episodes of 4 questions, last checkpoint of step 3: {file}" in out
    assert file.read_text().splitlines(keepends=True) == whole
    told = refusal(commands.run("predict", *given, "--sampled=1"))
    assert "was begun with other settings, data or weights; give --restart" in told
    file.write_text("".join(whole[:2]) + "{}\n" + "".join(whole[3:]))
    told = refusal(commands.run("predict", *given, f"--sampled={DRAWS}"))
    assert f"{file}, line 3: " in told
    shutil.rmtree(file.parent)


def test_a_file_by_an_edited_rubric_is_refused(
    commands: Commands, run: Path, tmp_path: Path
) -> None:
    rubric = tmp_path / "own.py"
    rubric.write_text("def score(question, answers, answer, parts):\n    return 0.25\n")
    given = [f"--workdir={run}", "--checkpoint=last", f"--out={tmp_path / 'rows.jsonl'}"]
    given.append(f"--config.rubric.path={rubric}:score")
    commands.succeed("predict", *given)
    rubric.write_text(rubric.read_text().replace("0.25", "0.75"))
    assert "--restart" in refusal(commands.run("predict", *given))
    commands.succeed("predict", *given, "--restart")
    assert {row["reward"] for row in lines_of(tmp_path / "rows.jsonl")} == {0.75}


def test_without_a_run(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "untrained.jsonl"
    given = (*TINY, f"--out={file}", "--samples=2", "--sampled=2", "--retriever=golden")
    out = commands.succeed("predict", *given)
    assert f"4 episodes of 2 questions, untrained: {file}" in out
    record = predictions.read_record(file)
    assert record is not None
    assert (record["retriever"], record["greedy"]) == ("golden", False)


def test_scores_are_those_of_the_predictions(run: Path, told: str) -> None:
    summary = json.loads((run / "eval" / "summary.json").read_text())
    ways = ["last checkpoint of step 3", "after imitation, step 2", "untrained"]
    for retriever in ("bm25", "golden"):
        assert list(summary["scores"][retriever]) == ways
        assert list(summary["gains"][retriever]) == ways[1:]
        for way, scores in summary["scores"][retriever].items():
            rows = lines_of(run / "eval" / summary["files"][retriever][way])
            assert len(rows) == QUESTIONS * DRAWS
            for name in ("em", "f1", "recall", "precision", "citation", "format"):
                mean = np.mean([row["trajectory"]["parts"][name] for row in rows])
                assert scores["all"][name]["mean"] == pytest.approx(mean)
            mean = np.mean([row["reward"] for row in rows])
            assert scores["all"]["reward"]["mean"] == pytest.approx(mean)
            assert scores["all"]["questions"] == QUESTIONS
            assert {"vote_em@1", "vote_f1@2", "pass@2"} <= scores["all"].keys()
    assert summary["questions"]["choosing"] == summary["questions"]["reported"] == QUESTIONS
    assert not summary["questions"]["apart"]
    main = summary["scores"]["bm25"][ways[0]]["all"]
    assert summary["metrics"]["exact_match"] == main["em"]["mean"]
    assert summary["metrics"]["n_hops_avg"] == 2
    assert summary["intervals"]["retrieval_recall"] == main["recall"]
    example = summary["per_example_results"][5]
    row = lines_of(run / "eval" / example["trajectory"]["file"])[example["trajectory"]["line"] - 1]
    assert (row["id"], row["draw"], row["prediction"]) == (
        example["id"],
        example["draw"],
        example["prediction"],
    )
    records = [predictions.read_record(run / "eval" / f"{each}/bm25.jsonl") for each in FOLDERS]
    digests = [record["weights"] for record in records if record]
    assert len(digests) == 3
    assert digests[2] not in digests[:2]
    assert "bm25, gain over untrained" in told
    assert "golden, last checkpoint of step 3: pass@k: 1: " in told
    assert "note: " not in told


def test_scores_are_read_from_the_files(
    commands: Commands, run: Path, told: str, tmp_path: Path
) -> None:
    """Files that are whole are not played again, and what they say is what is scored."""
    workdir = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(workdir / "checkpoints" / "last" / "2")
    shutil.rmtree(workdir / "checkpoints" / "stages")
    file, rng = workdir / "eval" / "last-3" / "golden.jsonl", np.random.default_rng(0)
    rows = lines_of(file)
    for row in rows:
        row["reward"] = rng.random()
        row["trajectory"]["parts"] = {n: rng.random() for n in row["trajectory"]["parts"]}
    rows[5] |= {"reward": None}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = commands.succeed("evaluate", *scoring(workdir))
    assert "note: no checkpoint of the end of imitation, step 2, is kept" in out
    scores = json.loads((workdir / "eval" / "summary.json").read_text())["scores"]
    found = scores["golden"]["last checkpoint of step 3"]["all"]
    assert found["failed"] == 1
    for name in ("f1", "citation", "format"):
        of = [row["trajectory"]["parts"][name] for row in rows]
        means = [np.mean(of[0:2]), np.mean(of[2:4]), of[4], np.mean(of[6:8])]
        assert found[name]["mean"] == pytest.approx(np.mean(means))
    before = json.loads((run / "eval" / "summary.json").read_text())["scores"]
    assert scores["bm25"]["untrained"] == before["bm25"]["untrained"]


def test_an_analysis_of_a_run(commands: Commands, run: Path, told: str, tmp_path: Path) -> None:
    out = commands.succeed("analyze", str(run), f"--out={tmp_path}/out")
    assert (tmp_path / "out" / "table.txt").read_text() in out
    lines = [line for line in out.splitlines() if line.startswith("last-3/golden.jsonl: last ch")]
    assert "of 8" in lines[0]
    assert "vote_em@k: 1: " in lines[1]
    assert (tmp_path / "out" / "curve-run.png").stat().st_size > 10_000
    sections = Page(tmp_path / "out" / "episodes.html").sections
    assert sum(len(each["episodes"]) for each in sections) == 6 * QUESTIONS * DRAWS
    (tmp_path / "empty").mkdir()
    assert "empty holds no predictions" in refusal(commands.run("analyze", f"{tmp_path}/empty"))
    assert "give a folder of a run" in refusal(commands.run("analyze"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("predict", "--retriever=tfidf"), "config.tools.retriever is 'tfidf'; use one of golden"),
        (("predict", "--out=x.json"), "--out=x.json is not named as JSON lines; give a name.jso"),
        (("evaluate", "--retrievers=bm25,semantic"), "needs something that scores documents"),
    ],
)
def test_refused(commands: Commands, run: Path, arguments: tuple[str, ...], told: str) -> None:
    assert told in refusal(commands.run(*arguments, f"--workdir={run}"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((TINY[0],), "give the file to write, for example --out=predictions.jsonl."),
        ((TINY[0], "--out=x.jsonl", "--checkpoint=last"), "--checkpoint is of a run"),
        (("--config=configs/hotpotqa.py:tiny", "--out=x.jsonl"), "an experiment of q_rag, whose"),
    ],
)
def test_refused_without_a_run(commands: Commands, arguments: tuple[str, ...], told: str) -> None:
    assert told in refusal(commands.run("predict", *arguments))


@pytest.mark.parametrize(
    ("retrievers", "fields", "told"),
    [
        (("bm25", "bm25"), {}, "--retrievers=bm25,bm25 names one twice"),
        (
            ("bm25",),
            {"bridge_seed": 1},
            r"not the run's own .*: config.questions.bridge_seed",
        ),
        (("bm25",), {"dev": "a,b"}, r"not the run's own .*: config.questions.dev\); give --out"),
    ],
)
def test_refused_scores(
    run: Path, retrievers: tuple[str, ...], fields: dict[str, Any], told: str
) -> None:
    config = load_config(run / "config.json")
    config.questions.update(fields)
    with pytest.raises(InputError, match=told):
        score_language_model(run, config, PlayOptions("last", retrievers))


def test_a_run_has_a_config_of_its_own() -> None:
    with pytest.raises(InputError, match=r"--workdir has a config of its own; leave out --config"):
        predict.define_flags([TINY[0], "--workdir=run"])


def test_refused_runs(commands: Commands, run: Path, tmp_path: Path) -> None:
    workdir, config = tmp_path / "run", json.loads((run / "config.json").read_text())
    workdir.mkdir()
    (workdir / "config.json").write_text(json.dumps(config | {"system": "q_rag"}))
    told = refusal(commands.run("predict", f"--workdir={workdir}"))
    assert "is a run of q_rag, which this command cannot read" in told
    assert told.rstrip().endswith("give a run of rlvr, leret or deepretrieval.")
    (workdir / "config.json").write_text(json.dumps(config))
    told = refusal(commands.run("predict", f"--workdir={workdir}"))
    assert "holds no model; --workdir must be a run that was trained." in told
    shutil.copytree(run / "model", workdir / "model")
    told = refusal(commands.run("evaluate", f"--workdir={workdir}"))
    assert "holds no checkpoint; train first" in told

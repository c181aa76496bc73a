"""`qrag predict`, `evaluate` and `answer`: what is played, scored, read and refused."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qrag_jax.metrics.row_log import HOPS, read_record
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.runtime.whole_files import log_locks
from tests.entry_points import COURSES, Commands, flags_of, json_lines, metric_lines, refusal
from tests.llm.model_server import Call, ModelServer, Reply
from tests.machine import PACKAGES, PYTHON, needs_verifiers
from tests.retrieval_logs import played_rows, write_log
from tests.support.worlds import record_of, write_lines

MAIN = f"last-{COURSES['rlvr'].steps}"


def of(run: Path) -> tuple[str, str]:
    return (f"--workdir={run}", "--checkpoint=last")


# ---------------------------------------------------------------------- RLVR


@pytest.fixture(scope="module")
def rlvr(scored: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the scored run."""
    return Path(shutil.copytree(scored("rlvr"), tmp_path_factory.mktemp("rlvr") / "run"))


def test_a_killed_prediction_goes_on(commands: Commands, rlvr: Path) -> None:
    """Parts have two questions of two draws; what is no whole part is played again."""
    predicted = rlvr / "eval" / MAIN / "bm25.jsonl"
    whole = predicted.read_text().splitlines(keepends=True)
    file = rlvr / "predictions" / f"{MAIN}-bm25.jsonl"
    file.parent.mkdir()
    shutil.copy(predicted.with_suffix(".json"), file.with_suffix(".json"))
    file.write_text("".join(whole[:6]) + whole[6][:40])
    commands.succeed("predict", *of(rlvr), "--sampled=2")
    assert file.read_text().splitlines(keepends=True) == whole
    assert "--restart" in refusal(commands.run("predict", *of(rlvr), "--sampled=1"))


def test_predictions_without_a_run(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "untrained.jsonl"
    given = (f"--out={file}", "--samples=2", "--sampled=2", "--retriever=golden")
    commands.succeed("predict", *COURSES["rlvr"].fields, *given)
    assert len(json_lines(file)) == 4
    assert read_record(file)["retriever"] == "golden"


def test_what_does_not_go_together_is_refused(
    commands: Commands, rlvr: Path, tmp_path: Path
) -> None:
    for given, named in (
        (("predict", "--config=configs/hotpotqa.py:tiny", "--out=x.jsonl"), "q_rag"),
        (("index", f"--workdir={rlvr}"), str(rlvr)),
    ):
        assert named in refusal(commands.run(*given))
    workdir = tmp_path / "run"
    shutil.copytree(rlvr, workdir, ignore=shutil.ignore_patterns("checkpoints"))
    assert str(workdir) in refusal(commands.run("evaluate", f"--workdir={workdir}"))


# ---------------------------------------------------------------------- LeReT


@pytest.fixture(scope="module")
def leret(scored: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the scored run."""
    return Path(shutil.copytree(scored("leret"), tmp_path_factory.mktemp("leret") / "run"))


def test_questions_of_a_file_bring_their_passages(
    commands: Commands, leret: Path, tmp_path: Path
) -> None:
    context = [("Plimp Mill", ["It is by Ada Quost."]), ("Ada Quost", ["Born in Vlimp."])]
    where = "Where was the founder of Plimp Mill born?"
    asked = record_of("hotpotqa", "own", where, "Vlimp", context, [0, 1])
    questions, out = write_lines(tmp_path / "questions.jsonl", [asked]), tmp_path / "own.jsonl"
    given = (*of(leret), f"--questions={questions},hotpotqa,dev")
    assert "config.questions.dev" in refusal(commands.run("predict", *given))
    commands.succeed("predict", *given, f"--out={out}")
    (row,) = HOPS.read(out)
    assert (row.id, row.answers) == ("own", ("Vlimp",))
    corpus = StoredCorpus(tmp_path / "own.search" / "corpus")
    passages = corpus.passages(corpus.numbers(row.pages))
    assert [each.title for each in passages] == ["Plimp Mill", "Ada Quost"]


def test_a_training_writes_the_pairs_of_its_tries(leret: Path) -> None:
    folder = leret / "tries" / "iteration-1"
    pairs = json_lines(folder / "pairs.jsonl")
    assert pairs
    tries = [row for path in folder.glob("hop-*.jsonl") for row in json_lines(path)]
    written = {each["query"] for each in tries if "query" in each}
    for each in pairs:
        assert [*each] == ["prompt", "chosen", "rejected"]
        assert each["chosen"] != each["rejected"]
        assert {each["chosen"], each["rejected"]} <= written


def test_a_training_begins_with_a_file_of_pairs(commands: Commands, tmp_path: Path) -> None:
    """Nothing is tried; a pair that is too long for the room is left out."""
    row = {"prompt": "Where does it rain?", "chosen": "oslo", "rejected": "berg"}
    rows, workdir = [row, row | {"rejected": "rain " * 300}], tmp_path / "run"
    file = write_lines(tmp_path / "pairs.jsonl", [row, row | {"chosen": 5}])
    given = (*COURSES["leret"].fields, "--config.iterations=1", f"--config.pairs.path={file}")
    given = ("train", *given, "--config.stages=sft,preference", f"--workdir={workdir}")
    assert "pairs.jsonl:2: field 'chosen'" in refusal(commands.run(*given))
    assert not (workdir / "search").exists()  # nothing is indexed before
    write_lines(file, rows)
    output = commands.succeed(*given)
    assert f"1 pairs of {file}, 1 are too long" in output
    assert not (workdir / "tries" / "iteration-1" / "hop-1.jsonl").exists()
    margins = [row["train/margin"] for row in metric_lines(workdir) if "train/margin" in row]
    assert margins[-1] > margins[0]
    write_lines(file, [row])
    assert "other data" in refusal(commands.run(*given))


def test_answers_over_the_final_pools(commands: Commands, leret: Path, tmp_path: Path) -> None:
    def counts(call: Call) -> Reply:
        return Reply(f"Final answer: {call.prompt.count('# ')} passages")

    commands.succeed("predict", *of(leret))
    log = leret / "predictions" / f"last-{COURSES['leret'].steps}.jsonl"
    out = tmp_path / "answers.jsonl"
    with ModelServer(counts) as server:
        given = ("answer", f"--llm.url={server.url}", "--llm.model=tiny", f"--log={log}")
        commands.succeed(*given, f"--out={out}")
    rows = {row["id"]: row for row in json_lines(out)}
    for row in HOPS.read(log):
        answer = rows[row.id]
        assert answer["answers"] == [*row.answers]
        assert answer["prediction"] == f"{len(row.hops[-1].pool)} passages"


# ---------------------------------------------------------------------- environments of verifiers

SCRIPTED = Path(__file__).parent / "rollouts" / "scripted_environment.py"
VERIFIERS = flags_of(
    "rlvr.py:verifiers",
    "model.tiny.layers=1 model.tiny.weights= model.tiny.hidden=64 model.tiny.heads=2 "
    "model.tiny.key_heads=1 model.tiny.intermediate=64 model.tiny.vocab=400 tools.turn_tokens=12 "
    "sampling.room=256 grpo.members=3 train.steps=4 train.log_every=1 train.eval_every=4 "
    "train.checkpoint_every=1 eval.samples=2",
)


def in_environment(workdir: Path, python: Path | str, name: str = "made") -> list[str]:
    environment = (f"--config.env.verifiers={name}", f"--config.env.python={python}")
    return [*VERIFIERS, f"--workdir={workdir}", *environment]


@pytest.fixture(scope="module")
def in_scripted(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("verifiers") / "run"
    commands.succeed("train", *in_environment(workdir, SCRIPTED))
    return workdir


def test_a_training_logs_the_parts_of_rewards_one_by_one(in_scripted: Path) -> None:
    rows = metric_lines(in_scripted)
    assert max(row["step"] for row in rows) == 4
    last = [row for row in rows if "train/loss" in row][-1]
    assert last["env/half"] == pytest.approx(last["env/reward"] / 2)
    assert last["failed_episodes"] == last["lost_processes"] == last["untrained_tokens"] == 0


def test_an_evaluation_writes_their_results_and_ours(
    in_scripted: Path, commands: Commands, tmp_path: Path
) -> None:
    copy = tmp_path / "environment.py"
    shutil.copy(SCRIPTED, copy)
    given = ["evaluate", f"--workdir={in_scripted}", "--checkpoint=last", "--sampled=2"]
    given += [f"--out={tmp_path / 'eval'}", "--config.env.verifiers=made"]
    assert "config.env.python" in refusal(commands.run(*given))  # no program that a folder names
    given += [f"--config.env.python={copy}"]
    assert "reward" in commands.succeed(*given)
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    for name in ("last-4", "untrained"):
        folder = tmp_path / "eval" / name
        rows, traces = (json_lines(folder / f"{x}.jsonl") for x in ("predictions", "traces"))
        rewards = [each["traces"][0]["rewards"]["reward"]["score"] for each in traces]
        assert [row["reward"] for row in rows] == rewards
        assert len(rows) == 2 * summary["questions"]["reported"]
    out = tmp_path / "rows.jsonl"
    commands.succeed("predict", f"--workdir={in_scripted}", *given[-2:], f"--out={out}")
    assert {"segments", "parts"} <= json_lines(out)[0]["trajectory"].keys()


@needs_verifiers
@pytest.mark.nightly
def test_verifiers_itself_trains(commands: Commands, tmp_path: Path) -> None:
    given = in_environment(tmp_path / "run", PYTHON, "made-v1")
    given += ["--config.train.steps=2", "--config.sampling.room=1000"]
    environment = {**commands.environment}
    environment["PYTHONPATH"] += f":{PACKAGES}"
    commands.succeed("train", *given, env=environment)
    last = [line for line in metric_lines(tmp_path / "run") if "train/loss" in line][-1]
    assert "env/right" in last
    assert last["failed_episodes"] == 0


# ------------------------------------------------------------ answers of a log of chunks

ROWS = [
    dataclasses.replace(
        row,
        id=f"q{number}",
        question=f"Who built house {number}?",
        answer=f"Ada {number} Berg",
        pred_texts=[f"House {number} is by Ada {number} Berg .", *row.pred_texts[1:]],
    )
    for number, row in enumerate(played_rows(12, 0))
]


def reads_builder(call: Call) -> Reply:
    """Right for every fourth house, half right for others; knows nothing without the chunk."""
    if "Given answer:" in call.prompt:
        gold, given = re.findall(r"answers?: <\w+>(.*)</\w+>", call.prompt)[:2]
        return Reply(f"**Final answer:** {'yes' if given in gold else 'no'}")
    found = re.search(r"House (\d+) is by (Ada \d+ Berg)", call.prompt)
    if not found:
        return Reply("Final answer: unknown")
    builder, right = found[2], int(found[1]) % 4 == 0
    said = builder if right else f"{builder.removeprefix('Ada ')} Ltd."
    return Reply(f"<think>Hm.</think>\nFinal answer: {said}")


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer(reads_builder) as running:
        yield running


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", ROWS)


def options(server: ModelServer, log: Path, out: Path) -> tuple[str, ...]:
    model = ("--llm.model=tiny", "--llm.concurrency=4", "--llm.retry_pause=0.01")
    return (f"--log={log}", f"--out={out}", f"--llm.url={server.url}", *model)


def test_answers_scores_and_goes_on(
    server: ModelServer, log: Path, tmp_path: Path, commands: Commands
) -> None:
    """Failures, torn rows and verdicts are those of `evaluators/test_answers.py`."""
    out, data = tmp_path / "answers.jsonl", tmp_path / "dev.jsonl"
    write_lines(data, [{"_id": r.id, "answer": r.answer, "type": "bridge"} for r in ROWS])
    given = (*options(server, log, out), f"--data={data}", "--metric=squad", "--judge")
    commands.succeed("answer", *given, "--samples=4")
    assert [row["id"] for row in json_lines(out)] == [row.id for row in ROWS[:4]]
    commands.succeed("answer", *given)
    assert len(server.calls) == 2 * len(ROWS)  # each and its verdict, once
    for number, (row, asked) in enumerate(zip(json_lines(out), ROWS, strict=True)):
        right = number % 4 == 0
        assert row["prediction"] == (f"Ada {number} Berg" if right else f"{number} Berg Ltd")
        # "1 Berg Ltd": 2 of 3 tokens are in "Ada 1 Berg", which has 3.
        assert (row["em"], row["f1"]) == (float(right), 1.0 if right else pytest.approx(2 / 3))
        assert (row["id"], row["type"], row["answers"]) == (asked.id, "bridge", [asked.answer])
    summary = json.loads((tmp_path / "answers.summary.json").read_text())
    assert summary["scores"]["all"]["f1"]["mean"] == pytest.approx((3 + 9 * 2 / 3) / 12)
    assert summary["scores"]["all"]["judge"]["mean"] == 0.25
    assert summary["provenance"]["model"] == "tiny"

    text = refusal(commands.run("answer", *given, "--llm.max_tokens=9"))
    assert "max_tokens" in text
    assert "--restart" in text
    commands.succeed("answer", *given, "--filter=gt", "--samples=3", "--restart")
    for row, played in zip(json_lines(out), ROWS[:3], strict=True):
        assert (row["chunks"], row["prediction"]) == (sorted(played.sf_idx), "unknown")


def test_refusals(server: ModelServer, log: Path, tmp_path: Path, commands: Commands) -> None:
    given = options(server, log, tmp_path / "answers.jsonl")
    for words, name in ((given[:2], "--llm.url"), ([*given, "--filter=qvalue"], "threshold")):
        assert name in refusal(commands.run("answer", *words))
    out = tmp_path / "answers.jsonl"
    # Two names that differ in their ending alone have one file of verdicts.
    with log_locks(out.with_name("answers.judge.jsonl")):
        other = options(server, log, tmp_path / "answers.json")
        assert "answers.judge.jsonl" in refusal(commands.run("answer", *other))
    assert not out.exists()
    assert server.calls == []

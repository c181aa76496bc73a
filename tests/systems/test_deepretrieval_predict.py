"""A DeepRetrieval run rewrites files of queries: what a line has, a kill, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from qrag_jax.environments.query_rewriting.output import BARE, REWRITTEN, read_output
from qrag_jax.errors import InputError
from qrag_jax.evaluators import rewrite_log
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.single_step import SingleStepSearch
from qrag_jax.systems.deepretrieval_config import load_config
from qrag_jax.systems.deepretrieval_predict import open_rewriter, rewritten_lines
from tests.entry_points import Commands, refusal
from tests.systems.rewriting_run import QUERIES, SCRIPT, STEPS, collection, train

pytestmark = pytest.mark.long

ASKED = [f"In which town was the owner of mill number {n} born, if I may ask?" for n in range(14)]
PART = 4  # config.train.batch_size


@pytest.fixture(scope="module")
def run(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(commands, tmp_path_factory.mktemp("deepretrieval") / "run")


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("asked") / "queries.txt"
    path.write_text("\n".join(ASKED) + "\n")
    return path


@pytest.fixture(scope="module")
def rewritten(commands: Commands, run: Path, listed: Path) -> Path:
    out = listed.with_name("rewritten.jsonl")
    told = commands.succeed("predict", *of(run), f"--questions={listed}", f"--out={out}")
    assert f"14 queries rewritten, last checkpoint of step {STEPS}: {out}" in told
    return out


def of(run: Path, which: str = "last") -> tuple[str, ...]:
    return f"--workdir={run}", f"--checkpoint={which}"


def searched(run: Path, queries: Sequence[str], k: int) -> list[list[tuple[str, float]]]:
    """What the run's corpus gives for each query."""
    folder = run / "search" / "made"
    index = BM25Index.open(folder / "bm25", StoredCorpus(folder / "corpus"))
    hits = SingleStepSearch(index).search(queries, k)
    return [[(hit.id, hit.score) for hit in own] for own in hits]


def test_a_line_has_what_became_of_a_query(rewritten: Path, run: Path) -> None:
    lines = [json.loads(line) for line in rewritten.read_text().splitlines()]
    assert [line["original"] for line in lines] == ASKED
    assert [line["id"] for line in lines] == [f"{n}" for n in range(1, 15)]
    for line, (own,) in ((each, searched(run, [each["query"]], 100)) for each in lines):
        cut_off = line["outcome"] == "query_too_long"
        assert (line["query"], line["outcome"]) == read_output(line["text"], BARE, cut_off=cut_off)
        found = own if line["outcome"] == REWRITTEN else []
        assert [tuple(each) for each in line["found"]] == found
        assert line["sampled"] > 0
    assert any(line["found"] for line in lines)
    record = json.loads(rewritten.with_suffix(".json").read_text())
    assert record["kind"] == "queries of a rewriter"


def test_a_killed_prediction_goes_on(
    commands: Commands, run: Path, listed: Path, rewritten: Path, tmp_path: Path
) -> None:
    """What is behind the last whole part is played again, to the same bytes."""
    whole = rewritten.read_text()
    lines = whole.splitlines(keepends=True)
    other = tmp_path / "other.jsonl"
    shutil.copy(rewritten.with_suffix(".json"), other.with_suffix(".json"))
    other.write_text("".join(lines[: PART + 1]) + lines[PART + 1][:30])
    given = f"--questions={listed}", f"--out={other}"
    commands.succeed("predict", *of(run), *given)
    assert other.read_text() == whole
    told = refusal(commands.run("predict", *of(run, "sft"), *given))
    assert "was begun with other settings, data or weights; give --restart" in told
    out = commands.succeed("predict", *of(run, "first"), *given, "--restart")
    assert f"14 queries rewritten, untrained: {other}" in out
    assert other.read_text() != whole
    out = commands.succeed("predict", *of(run, "sft"), *given, "--restart")
    assert f"14 queries rewritten, SFT alone, step {SCRIPT}: {other}" in out


def test_the_runs_own_queries(commands: Commands, run: Path) -> None:
    out = commands.succeed("predict", *of(run))
    file = run / "predictions" / f"last-{STEPS}.jsonl"
    assert f"{QUERIES} queries rewritten, last checkpoint of step {STEPS}: {file}" in out
    rows = rewrite_log.read(file)
    assert len({row.id for row in rows}) == QUERIES
    assert {row.collection for row in rows} == {"made"}
    told = refusal(commands.run("predict", *of(run), "--samples=2"))
    assert "was begun with other settings" in told
    few = file.with_name("few.jsonl")
    commands.succeed("predict", *of(run), "--samples=2", f"--out={few}")
    assert len(rewrite_log.read(few)) == 2


def test_another_collection_of_queries(commands: Commands, run: Path, tmp_path: Path) -> None:
    """It is searched in an index of its own, beside the file."""
    own = collection(tmp_path / "mills", {"1": "mills of Norway", "2": "goats"}, {"1": "a mill?"})
    given = (*of(run), f"--config.queries.test={own},dev")
    told = refusal(commands.run("predict", *given))
    assert "(not as in its config: config.queries.test); give the file to write" in told
    out = tmp_path / "own.jsonl"
    commands.succeed("predict", *given, f"--out={out}")
    (row,) = rewrite_log.read(out)
    assert (row.id, row.collection, row.original) == ("1", "mills", "a mill?")
    assert (tmp_path / "own.search" / "mills" / "corpus" / "corpus.json").exists()
    assert not (run / "search" / "mills").exists()


def test_without_an_index_queries_are_rewritten_all_the_same(
    commands: Commands, run: Path, listed: Path, rewritten: Path, tmp_path: Path
) -> None:
    bare, out = tmp_path / "run", tmp_path / "rewritten.jsonl"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("search", "eval"))
    given = f"--questions={listed}", f"--out={out}"
    told = commands.succeed("predict", *of(bare), *given)
    assert "14 queries were not searched for: the run does not have their collection" in told
    rows = rewrite_log.read(out)
    assert [row.found for row in rows] == [None] * 14
    assert [row.query for row in rows] == [row.query for row in rewrite_log.read(rewritten)]
    assert not (bare / "search").exists()


def test_queries_that_name_a_collection(run: Path, tmp_path: Path) -> None:
    """Only those that the run has are searched, whatever their ids."""
    path = tmp_path / "rows.jsonl"
    given = [{"_id": "1", "text": ASKED[0], "collection": name} for name in ("made", "other")]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    config, out = load_config(run / "config.json"), tmp_path / "out.jsonl"
    with open_rewriter(config, run, queries=path, out=out) as rewriter:
        weights = rewriter.weights("last")
        assert weights is not None
        one, other = rewriter.predict(weights, out)
    assert (one.collection, other.collection) == ("made", "other")
    assert one.found is not None
    assert other.found is None
    with (
        open_rewriter(config, run, queries=path, samples=1, out=out) as rewriter,
        pytest.raises(InputError, match="begun with other settings, data or weights"),
    ):
        rewriter.predict(weights, out)


def test_what_people_are_told() -> None:
    row = RewriteRow("1", "", "x", "y", REWRITTEN)
    lost = RewriteRow("2", "", "x", "", "no_query")
    dead = RewriteRow("3", "", "x", "y", "server", found=None)
    unknown = RewriteRow("4", "", "x", "y", REWRITTEN, found=None)
    assert rewritten_lines([row]) == []
    assert rewritten_lines([row, lost, lost, dead, unknown]) == [
        "2 of them without a query to search for: 2 no_query",
        "1 searches failed; what they would have found is not known",
        "1 queries were not searched for: the run does not have their collection",
    ]


def test_what_is_refused(commands: Commands, run: Path, listed: Path, tmp_path: Path) -> None:
    told = refusal(commands.run("predict", *of(run), f"--questions={listed}"))
    assert "are not the run's own; give the file to write, for example --out=" in told
    given = *of(run), f"--questions={listed}", f"--out={tmp_path / 'x.jsonl'}"
    for flag in ("--sampled=2", "--retriever=bm25"):
        told = refusal(commands.run("predict", *given, flag))
        assert "--sampled and --retriever are for runs of rlvr." in told
    told = refusal(commands.run("predict", *given, "--preferences=y.jsonl"))
    assert "--preferences" in told
    absent = *of(run), f"--questions={tmp_path / 'none.txt'}", f"--out={tmp_path / 'x.jsonl'}"
    assert "none.txt cannot be read" in refusal(commands.run("predict", *absent))
    tiny = "--config=configs/deepretrieval.py:tiny", f"--out={tmp_path / 'x.jsonl'}"
    assert "of which runs alone predict" in refusal(commands.run("predict", *tiny))
    assert "name.jsonl" in refusal(commands.run("predict", *given[:2], "--out=x.json"))

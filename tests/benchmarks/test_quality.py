"""The suite quality: its data, how lists and logs are scored, intervals, and how it resumes."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality import figures, named
from benchmarks.quality.corpora import (
    PARTS as QUESTION_PARTS,
)
from benchmarks.quality.corpora import (
    Asked,
    Passage,
    Setting,
    setting,
    write_halves,
    write_invented,
)
from benchmarks.quality.figures import cases, interval, paired
from benchmarks.quality.logs import (
    NDCG,
    by_turns,
    fused,
    lists_of,
    scores_of,
    the_log,
)
from benchmarks.quality.parts import MAIN, PARTS, QUICK, TWO_WIKI, Part
from benchmarks.quality.peers import batches
from benchmarks.quality.rankings import HOW, Place
from benchmarks.quality.runner import ROOT, Kept, code_digest, once, write_lines
from qrag_jax.data.sources.registry import SOURCES, load_samples
from qrag_jax.errors import InputError
from qrag_jax.runtime.digests import half

PARAGRAPHS = [("Dusk", ["By Ada."]), ("Dawn", ["A film."]), ("Ada", ["Born in Oslo."])]


@pytest.fixture(scope="module")
def invented(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("invented")
    write_invented(folder / "data", 8, 4, 6)
    return setting(TWO_WIKI, folder / "data", folder / "setting")


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("source", ["hotpotqa", "musique"])
def test_halves_share_no_question_with_each_other_nor_with_training(
    source: str, tmp_path: Path
) -> None:
    data, dev = tmp_path / "data", [f"d{i}" for i in range(200)]
    make = SOURCES[source].to_record
    for file, names in (("train", ["t1", "t2", "d3", "d4", "d5", "d6"]), ("dev", dev)):
        records = (make(name, f"Question {name}?", "Oslo", PARAGRAPHS, [0, 2]) for name in names)
        write_lines(data / f"{file}.jsonl", records)
    files = write_halves(source, data, tmp_path / "out")
    ids = {
        name: {sample.id for sample in load_samples(source, str(path), "dev")[0]}
        for name, path in files.items()
    }
    assert ids["train"] == {"t1", "t2"}
    assert ids["half0"] | ids["half1"] == {*dev}
    assert ids["half0"] == {name for name in dev if half(name) == 0}
    assert not ids["half0"] & ids["half1"]


def test_a_setting_has_its_gold_passages_and_no_question_twice(invented: Setting) -> None:
    names = {passage.name: passage for passage in invented.corpus}
    assert [len(invented.questions[part]) for part in QUESTION_PARTS] == [8, 4, 6]
    for asked in itertools.chain.from_iterable(invented.questions.values()):
        assert len(asked.gold) == 2
        assert {*asked.gold} <= {*names}
        assert any(asked.answers[0] in names[gold].text for gold in asked.gold)
    for asked in invented.questions["train"]:
        assert {*asked.gold} < {*asked.context}
    texts = [asked.text for asked in itertools.chain(*invented.questions.values())]
    assert len({*texts}) == len(texts)
    (test,) = load_samples("two_wiki", str(invented.folder / "testing" / "dev.jsonl"), "dev")[:1]
    assert [sample.id for sample in test] == [asked.id for asked in invented.test]


# ---------------------------------------------------------------- scores of lists

CORPUS = [Passage(f"p{n}", f"Title {n}", f"Words of {n}.") for n in range(12)]
QUESTIONS = {
    "test": [
        Asked("a", "A?", ("words of 1",), ("p0", "p1")),
        Asked("b", "B?", ("yes",), ("p2", "p3", "p4")),
        Asked("c", "C?", ("nowhere",), ("p5",)),
    ]
}


def test_a_list_is_scored_right() -> None:
    given = Setting(Path(), CORPUS, QUESTIONS, 0)
    found = given.scores({"a": ("p0", "p9", "p8", "p1"), "b": ("p4", "p7", "p3")}, ["c"])
    assert {*found} == {"a", "b"}  # c failed, so nobody knows its list
    assert [found["a"][f"all@{k}"] for k in (2, 4, 6, 10)] == [0.0, 1.0, 1.0, 1.0]
    assert found["a"]["recall@2"] == 0.5
    assert found["a"]["ap@10"] == pytest.approx((1 / 1 + 2 / 4) / 2)
    assert (found["a"]["answer@2"], found["a"]["answer@4"]) == (0.0, 1.0)
    assert found["b"]["recall@4"] == pytest.approx(2 / 3)
    assert found["b"]["ap@10"] == pytest.approx((1 / 1 + 2 / 3) / 3)
    assert "answer@4" not in found["b"]  # yes is looked for in no passage
    without = given.scores({"a": ("p0",)})
    assert without["c"] == without["b"] | {"answer@2": 0.0} | dict.fromkeys(
        [f"answer@{k}" for k in (4, 6, 10)], 0.0
    )


def test_lists_of_several_searches() -> None:
    assert by_turns([["a", "b", "c"], ["b", "d"]]) == ("a", "b", "d", "c")
    assert len(by_turns([[str(n) for n in range(30)]])) == 10
    both = fused({"q": ("a", "b", "c")}, {"q": ("c", "d", "a")})
    assert both["q"] == ("a", "c", "b", "d")


# ---------------------------------------------------------------- logs


def test_logs_of_every_system(tmp_path: Path) -> None:
    def log(name: str, *rows: dict[str, Any]) -> Path:
        write_lines(tmp_path / f"{name}.jsonl", rows)
        return tmp_path / f"{name}.jsonl"

    q_rag = log("q_rag", {"id": 1, "sf_idx": [3, 4], "pred_idx": [4, 0, 7, 8]})
    assert scores_of(q_rag)["1"] == pytest.approx(
        {"fact_em": 0.0, "fact_f1": 1 / 3, "fact_precision": 0.25, "fact_recall": 0.5}
    )
    agent = {"em": 0.0, "f1": 0.5, "recall": None, "searches": [{"names": ["x", "y"]}]}
    harr = log(
        "harr",
        {"id": "a", "broken": "", **agent},
        {"id": "b", "broken": "timeout", **agent},
        {"id": "c", "broken": "no_retrieval", **agent, "searches": []},
    )
    assert scores_of(harr) == {name: {"em": 0.0, "f1": 0.5} for name in "ac"}
    assert lists_of(harr) == ({"a": ("x", "y"), "c": ()}, {"b"})
    played = {"parts": {"em": 1.0}, "facts": {"seen": ["x", "x", "y"]}}
    rlvr = log(
        "rlvr",
        {"id": "a", "reward": 0.7, "hops": 2, "trajectory": played},
        {"id": "b", "reward": None, "hops": 2, "trajectory": played},
    )
    assert scores_of(rlvr) == {"a": {"em": 1.0, "reward": 0.7}}
    assert lists_of(rlvr) == ({"a": ("x", "y")}, {"b"})
    hops = [
        {"outcome": "searched", "scores": {"ap": 0.5}, "found": [["x", 2.0], ["y", 1.0]]},
        {"outcome": "no_query", "scores": {"ap": 0.6}, "found": []},
    ]
    leret = log("leret", {"id": "a", "hops": hops})
    assert scores_of(leret) == {"a": {"hop1/ap": 0.5, "hop2/ap": 0.6}}
    assert lists_of(leret)[0] == {"a": ("x", "y")}
    search = {"hits": [{"step": 1, "id": "x"}, {"step": 1, "id": "y"}, {"step": 2, "id": "z"}]}
    assert lists_of(log("search", {"id": "a", **search}))[0] == {"a": ("x", "z", "y")}


def test_rewritten_queries_are_scored_by_the_judgements_of_their_collection(tmp_path: Path) -> None:
    rows = [
        {"id": "q", "collection": name, "original": "?", "outcome": "", "found": [[found, 1.0]]}
        for name, found in (("one", "d1"), ("two", "d1"))
    ]
    lost = rows[0] | {"id": "lost", "outcome": "timeout"}
    write_lines(tmp_path / "last-1.jsonl", [*rows, lost])
    for name, gold in (("one", "d1"), ("two", "d2")):
        folder = tmp_path / "trec" / name
        folder.mkdir(parents=True)
        (folder / "qrels.txt").write_text(f"q 0 {gold} 1\nlost 0 d1 1\n")
    found = scores_of(the_log(tmp_path, "last-*.jsonl"))
    assert found == {"one/q": {NDCG: 1.0}, "two/q": {NDCG: 0.0}}
    with pytest.raises(InputError, match="best"):
        the_log(tmp_path, "best-*.jsonl")


# ---------------------------------------------------------------- intervals and cases


def runs_of(table: np.ndarray) -> list[dict[str, dict[str, float]]]:
    return [{f"q{n}": {"em": float(value)} for n, value in enumerate(run)} for run in table]


def test_differences_are_paired_by_question_and_seed() -> None:
    hard = np.random.default_rng(0).normal(size=(3, 200)) * 5
    gain = paired(runs_of(hard + 0.5), runs_of(hard), "em")
    assert gain is not None
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.5, 0.5, 0.5))
    # Three trainings and one: the mean is that of the difference, whichever comes first.
    one = runs_of(hard.mean(axis=0, keepdims=True))
    more, less = paired(runs_of(hard + 1), one, "em"), paired(one, runs_of(hard + 1), "em")
    assert more is not None
    assert less is not None
    assert (more.mean, less.mean) == pytest.approx((1.0, -1.0))
    assert more.low < more.mean < more.high  # trainings differ


def test_chance_is_not_away_from_zero() -> None:
    rng = np.random.default_rng(1)
    first, second = (runs_of(rng.integers(0, 2, (1, 100))) for _ in range(2))
    gain = paired(first, second, "em")
    assert gain is not None
    assert gain.low < 0 < gain.high


def test_questions_that_a_training_lacks_are_left_out_of_all() -> None:
    first, second = runs_of(np.array([[1.0, 1.0, 0.0]])), runs_of(np.array([[0.0, 1.0]]))
    both = interval([*first, *second], "em")
    assert both is not None
    assert (both.mean, both.questions) == (0.75, 2)
    assert interval(first, "f1") is None


def result(seed: int, trained: float, untrained: float) -> dict[str, Any]:
    each = {"trained": trained, "untrained": untrained}
    ways = {way: runs_of(np.full((1, 50), value))[0] for way, value in each.items()}
    made = {"ways": ways, "minutes": 5.0, "seed": seed, "about": ""}
    return made | {"date": "2026-11-28", "machine": "a machine"}


def test_a_target_is_met_by_the_paired_difference_and_the_minutes() -> None:
    part = Part(
        "a", ways={MAIN: "", "untrained": ""}, scores=("em",), compared=("untrained",), gain=0.2
    )
    other = Part("b", scores=("em",), seeds=(43,), compared=(f"a:{MAIN}",), minutes=4)
    results = {f"a-{seed}": result(seed, 0.5 + seed / 1000, 0.25) for seed in part.seeds}
    results["b-43"] = result(43, 0.1, 0.0)
    found = {case.case: case for case in cases((part, other), results)}
    gain = found["a: em, trained - untrained"]
    assert gain.value == pytest.approx(0.293)
    assert (gain.peer, gain.holds) == (0.25, True)
    assert found["a: em, trained"].details["each training"] == "0.542 0.543 0.544"
    assert found["b: em, trained - a, trained"].holds is None  # no gain is asked of it
    assert found["b: training"].holds is False
    worse = {f"a-{seed}": result(seed, 0.3, 0.25) for seed in part.seeds}
    (gain,) = (c for c in cases((part,), worse) if c.target)
    assert gain.holds is False
    assert len(figures.table((part, other), results)) == 4


def test_a_part_with_several_trainings_is_compared_by_the_seeds_that_both_have() -> None:
    parts = (
        Part("a", scores=("em",), compared=(f"b:{MAIN}",)),
        Part("b", scores=("em",)),
    )
    results = {f"a-{seed}": result(seed, seed / 100, 0.0) for seed in (42, 43)}
    results |= {f"b-{seed}": result(seed, seed / 100 - 0.1, 0.0) for seed in (44, 43)}
    (gain,) = (c for c in cases(parts, results) if " - " in c.case)
    assert (gain.value, gain.details["trainings"]) == (pytest.approx(0.1), "1, 1")


# ---------------------------------------------------------------- parts


def test_parts_name_what_is_there(tmp_path: Path) -> None:
    every = {part.name: part for part in PARTS}
    assert len(every) == len(PARTS)
    for part in (*PARTS, *QUICK):
        assert part.how in HOW
        assert "," not in part.name  # of --only
        if part.config:
            assert (ROOT / part.config.partition(":")[0]).exists()
        for baseline in part.compared:
            other, _, way = baseline.rpartition(":")
            assert way in (every[other] if other else part).ways or way in (MAIN, "untrained")
        assert not part.of or every[part.of].fields == part.fields
    unknown = Place(PARTS[0], tmp_path, tmp_path, 42)
    with pytest.raises(InputError, match="QRAG_DATA"):
        unknown.filled(["data.path={train}"])


def test_parts_are_chosen_by_name() -> None:
    parts = (Part("a"), Part("b", optional=True, seeds=(1, 2)), Part("c", seeds=()))
    assert named(parts, []) == ["a-42", "c", "a-43", "a-44"]
    assert named(parts, ["b", "a-43"]) == ["b-1", "a-43", "b-2"]
    with pytest.raises(InputError, match="d"):
        named(parts, ["d"])


def test_contrastive_batches_have_no_gold_passage_as_a_negative() -> None:
    rng = np.random.default_rng(0)
    names = [f"p{n}" for n in range(60)]
    questions = []
    for number in range(40):
        context = tuple(rng.permutation(names)[:6].tolist())
        questions.append(Asked(f"q{number}", "?", (), context[:2], context))
    gold = {asked.id: {*asked.gold} for asked in questions}
    made = batches(questions, 8, rng)
    assert sum(map(len, made)) >= 60
    for batch in made:
        for pair, other in itertools.permutations(batch, 2):
            assert pair.question != other.question
            assert not gold[pair.question] & {other.gold, other.negative}


# ---------------------------------------------------------------- resuming


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree of code."""
    for name in ("qrag_jax/train.py", "configs/a.py", "benchmarks/quality/parts.py"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True)
        path.write_text("# code\n")
    return tmp_path / "tree"


def test_a_suite_resumes_and_a_failed_part_stops_no_other(tree: Path) -> None:
    kept, calls = Kept.of(tree / "runs", tree), list[str]()

    def part(name: str) -> Any:
        def run() -> dict[str, Any]:
            calls.append(name)
            if name == "broken" and calls.count(name) == 1:
                raise RuntimeError("killed")
            return {"name": name}

        return run

    parts = {name: part(name) for name in ("a", "broken", "x/c")}
    assert kept.finish(parts, [*parts]) == ["broken"]
    assert {*kept.finished(parts)} == {"a", "x/c"}
    assert kept.finish(parts, [*parts]) == []
    assert calls == ["a", "broken", "x/c", "broken"]
    found = kept.finished(parts)["x/c"]
    assert found["name"] == "x/c"
    assert {"machine", "date"} < found.keys()


def test_results_belong_to_one_version_of_the_code(tree: Path) -> None:
    before = Kept.of(tree / "runs", tree)
    before.finish({"a": lambda: {"x": 1}}, ["a"])
    (tree / "benchmarks/quality/parts.py").write_text("# changed\n")
    suite = Kept.of(tree / "runs", tree)
    assert suite.runs == before.runs  # trainings are scored again, not repeated
    assert not suite.finished(["a"])
    (tree / "configs/a.py").rename(tree / "configs/b.py")
    trainer = Kept.of(tree / "runs", tree)
    assert trainer.runs != before.runs
    assert code_digest(root=tree) != code_digest(root=ROOT)

    def changes() -> dict[str, Any]:
        (tree / "qrag_jax/train.py").write_text("# changed while it runs\n")
        return {"x": 2}

    with pytest.raises(InputError, match="changed"):
        trainer.finish({"a": changes}, ["a"])
    assert not trainer.finished(["a"])


def test_a_step_is_done_once(tmp_path: Path) -> None:
    calls = list[tuple[Any, ...]]()
    for words in (("a", 1), ("a", 1), ("a", 2)):
        once(tmp_path / "done", lambda *given: calls.append(given), *words)
    assert calls == [("a", 1), ("a", 2)]
    shutil.rmtree(tmp_path)
    with pytest.raises(ZeroDivisionError):
        once(tmp_path / "done", lambda: 1 // 0)
    assert not (tmp_path / "done").exists()


def test_stored_figures_have_the_form_of_cases() -> None:
    for path in (ROOT / "benchmarks" / "results" / "quality").glob("*.json"):
        kept = json.loads(path.read_text())
        assert {"suite", "machine", "date", "idle", "cases"} <= kept.keys()
        names = [case["case"] for case in kept["cases"]]
        assert len(names) == len({*names})
        for case in kept["cases"]:
            low, high = (case["details"].get(name) for name in ("low", "high"))
            assert low is None or low <= case["value"] <= high

"""Loading samples of a source: which files, what is skipped and counted, when it is fatal."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.config import DataConfig
from qrag_jax.data.sources.registry import SOURCES, load_samples, mix_weights
from qrag_jax.errors import InputError
from qrag_jax.runtime.retriever_config import passage_text
from tests.data.real_data import ROOT, real

PARAGRAPHS = [("Dusk", ["By Ada."]), ("Dawn", ["A film."]), ("Ada", ["Born in Oslo."])]


def records(source: str, count: int, prefix: str = "r") -> list[dict[str, Any]]:
    make = SOURCES[source].to_record
    return [
        make(f"{prefix}{number}", f"Question {number}?", "Oslo", PARAGRAPHS, [0, 2])
        for number in range(count)
    ]


def write(path: Path, items: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(item) + "\n" for item in items).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_reads_what_it_writes(tmp_path: Path, source: str) -> None:
    path = write(tmp_path / "mine.jsonl", records(source, 3))
    samples, report = load_samples(source, str(path), "train")
    assert [sample.id for sample in samples] == ["r0", "r1", "r2"]
    assert {sample.source for sample in samples} == {source}
    assert {sample.support for sample in samples} == {(0, 2)}
    assert (report.read, report.kept, report.skipped) == (3, 3, {})
    assert report.files == (str(path),)
    assert report.summary() == f"{source}: kept 3 of 3 records of mine.jsonl"


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("split", ["train", "dev"])
def test_official_file_in_a_folder(tmp_path: Path, source: str, split: Any) -> None:
    (official,) = SOURCES[source].OFFICIAL[split]
    path = write(tmp_path / official, records(source, 1))
    assert load_samples(source, str(tmp_path), split)[1].files == (str(path),)


def test_bad_records_are_skipped_counted_and_placed(tmp_path: Path) -> None:
    good = records("hotpotqa", 3)
    broken = records("hotpotqa", 4, "bad")
    broken[0]["supporting_facts"] = []
    broken[1]["supporting_facts"] = [["Dusk", 9]]
    broken[2]["supporting_facts"] = []
    del broken[3]["context"]
    path = write(tmp_path / "a.jsonl.gz", [good[0], *broken, good[1], good[0], good[2]])
    samples, report = load_samples("hotpotqa", str(path), "train")
    assert [sample.id for sample in samples] == ["r0", "bad1", "r1", "r2"]
    assert (report.read, report.kept) == (8, 4)
    mended = "sentence index out of range, paragraph kept"
    assert report.mended == {mended: 1}
    assert report.skipped == {
        "no supporting facts": 2,
        "missing field 'context'": 1,
        "duplicate id": 1,
    }
    assert report.first == {
        "no supporting facts": "a.jsonl.gz:2",
        mended: "a.jsonl.gz:3",
        "missing field 'context'": "a.jsonl.gz:5",
        "duplicate id": "a.jsonl.gz:7",
    }
    assert report.summary() == (
        "hotpotqa: kept 4 of 8 records of a.jsonl.gz (skipped: 2 no supporting facts, "
        f"1 missing field 'context', 1 duplicate id); 1 with {mended}"
    )


def test_duplicate_ids_across_files(tmp_path: Path) -> None:
    write(tmp_path / "train_a.jsonl", records("musique", 2))
    write(tmp_path / "train_b.jsonl", records("musique", 3))
    samples, report = load_samples("musique", str(tmp_path), "train")
    assert len(samples) == 3
    assert report.skipped == {"duplicate id": 2}
    assert report.first == {"duplicate id": "train_b.jsonl:1"}


def test_limit_stops_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", records("two_wiki", 5))
    path.write_bytes(path.read_bytes() + b"broken")
    samples, report = load_samples("two_wiki", str(path), "train", limit=2)
    assert len(samples) == report.read == report.kept == 2
    with pytest.raises(InputError, match="line 6, is not JSON"):
        load_samples("two_wiki", str(path), "train")


def test_nothing_left_is_fatal_and_says_why(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*records("musique", 2), {"question": "Who?"}])
    with pytest.raises(InputError) as caught:
        load_samples("hotpotqa", str(path), "train")
    text = str(caught.value)
    assert str(path) in text
    assert "no usable hotpotqa record among 3" in text
    assert "2 missing field 'context', 1 missing field '_id'" in text
    assert "the first is a.jsonl:1: missing field 'context'" in text
    assert "\n" not in text


def test_unknown_source_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two_wiki"):
        load_samples("squad", str(tmp_path), "train")
    with pytest.raises(InputError, match="'synthetic'"):
        load_samples("synthetic", str(tmp_path), "train")
    with pytest.raises(InputError, match="'babilong'"):
        load_samples("babilong", str(tmp_path), "train")


@pytest.mark.parametrize(
    ("source", "folder"),
    [
        ("hotpotqa", "hotpotqa"),
        ("musique", "musique"),
        ("two_wiki", "two_wiki"),
        ("two_wiki", "2wikimultihopqa"),
    ],
)
def test_one_parent_folder_serves_a_mixture(tmp_path: Path, source: str, folder: str) -> None:
    path = write(tmp_path / folder / "train.jsonl", records(source, 1))
    (tmp_path / "other").mkdir()
    assert load_samples(source, str(tmp_path), "train")[1].files == (str(path),)
    own = write(tmp_path / "train.jsonl", records(source, 2))
    assert load_samples(source, str(tmp_path), "train")[1].files == (str(own),)


def test_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is empty"):
        load_samples("hotpotqa", str(tmp_path), "train")
    (tmp_path / "musique").mkdir()
    with pytest.raises(InputError, match="train file: looked"):
        load_samples("hotpotqa", str(tmp_path), "train")
    with pytest.raises(InputError, match="does not exist"):
        load_samples("hotpotqa", str(tmp_path / "nowhere"), "train")


@pytest.mark.parametrize(
    ("source", "split", "kept"),
    [
        ("hotpotqa", "train", 991 + 244),
        ("hotpotqa", "dev", 189 + 465),
        ("musique", "train", 552),
        ("musique", "dev", 221),
        ("two_wiki", "train", 276),
        ("two_wiki", "dev", 152),
    ],
)
def test_real_data_is_kept_whole(source: str, split: Any, kept: int) -> None:
    samples, report = load_samples(source, str(real("README.md").parent), split)
    assert len(samples) == report.read == report.kept == kept
    assert report.skipped == {}


def test_weights_are_normalised() -> None:
    assert mix_weights({"hotpotqa": 3, "musique": 1.0}) == {"hotpotqa": 0.75, "musique": 0.25}
    assert mix_weights({"two_wiki": 0.2}) == {"two_wiki": 1.0}


def test_shares_by_size() -> None:
    """Those of HotpotQA, MuSiQue and 2WikiMultihopQA, whole, as one heap."""
    sizes = {"hotpotqa": 90_447, "musique": 19_938, "two_wiki": 167_454}
    shares = mix_weights(dict.fromkeys(sizes, 1.0), sizes)
    assert [round(share, 2) for share in shares.values()] == [0.33, 0.07, 0.60]
    del sizes["two_wiki"]
    shares = mix_weights(dict.fromkeys(sizes, 0.5), sizes)
    assert [round(share, 2) for share in shares.values()] == [0.82, 0.18]
    assert mix_weights({"a": 1, "b": 3}, {"a": 30, "b": 10}) == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), "1", None, True])
def test_weight_that_is_no_positive_number(weight: Any) -> None:
    with pytest.raises(InputError, match="'musique'"):
        mix_weights({"hotpotqa": 1.0, "musique": weight})


def test_no_weight_at_all() -> None:
    with pytest.raises(InputError, match="names no source"):
        mix_weights({})


def test_workers_import_no_jax() -> None:
    code = "import sys, qrag_jax.data.sources.registry; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_source_without_passages_is_for_query_writers(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'hover'"):
        load_samples("hover", str(tmp_path), "train")


@pytest.mark.parametrize("name", ["hotpotqa", "musique", "two_wiki"])
def test_titles_of_a_corpus_are_joined_as_those_of_the_training(name: str) -> None:
    paragraphs = [("Acme", ["Made by Ada.", "In Oslo."]), ("Oslo", ["A city."])]
    chunks = SOURCES[name].parse(SOURCES[name].to_record("q", "Who?", "Ada", paragraphs, [0, 1]))
    separator = DataConfig(sources={name: 1.0}).passage_separator
    assert chunks.chunks[0] == passage_text("Acme", "Made by Ada. In Oslo.", separator)
    assert DataConfig(sources={name: 1.0}, title_separator=": ").passage_separator == ": "

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


def test_bad_records_are_skipped_counted_and_placed(tmp_path: Path) -> None:
    good = records("hotpotqa", 3)
    broken = records("hotpotqa", 4, "bad")
    broken[0]["supporting_facts"] = []
    broken[1]["supporting_facts"] = [["Dusk", 9]]
    broken[2]["supporting_facts"] = []
    del broken[3]["context"]
    write(tmp_path / "train_a.jsonl.gz", [good[0], *broken, good[1]])
    write(tmp_path / "train_b.jsonl", [good[0], good[2]])
    samples, report = load_samples("hotpotqa", str(tmp_path), "train")
    assert [sample.id for sample in samples] == ["r0", "bad1", "r1", "r2"]
    assert (report.read, report.kept) == (8, 4)
    assert [*report.mended.values()] == [1]
    assert [*report.skipped.values()] == [2, 1, 1]  # no facts, no context, one id twice
    assert sorted(report.first.values()) == [
        *(f"train_a.jsonl.gz:{line}" for line in (2, 3, 5)),
        "train_b.jsonl:1",
    ]


@pytest.mark.parametrize("folder", ["two_wiki", "2wikimultihopqa"])
def test_one_parent_folder_serves_a_mixture(tmp_path: Path, folder: str) -> None:
    path = write(tmp_path / folder / "train.jsonl", records("two_wiki", 1))
    assert load_samples("two_wiki", str(tmp_path), "train")[1].files == (str(path),)
    own = write(tmp_path / "train.jsonl", records("two_wiki", 2))
    assert load_samples("two_wiki", str(tmp_path), "train")[1].files == (str(own),)


def test_real_data_is_kept_whole() -> None:
    for source, kept in (("hotpotqa", 189 + 465), ("musique", 221), ("two_wiki", 152)):
        samples, report = load_samples(source, str(real("README.md").parent), "dev")
        assert len(samples) == report.read == report.kept == kept


def test_shares_by_size() -> None:
    """Those of HotpotQA, MuSiQue and 2WikiMultihopQA, whole, as one heap."""
    sizes = {"hotpotqa": 90_447, "musique": 19_938, "two_wiki": 167_454}
    shares = mix_weights(dict.fromkeys(sizes, 1.0), sizes)
    assert [round(share, 2) for share in shares.values()] == [0.33, 0.07, 0.60]
    assert mix_weights({"a": 1, "b": 3}, {"a": 30, "b": 10}) == {"a": 0.5, "b": 0.5}
    for weight in (0, -1.0, float("nan"), float("inf"), "1", None, True):
        with pytest.raises(InputError, match="'b'"):
            mix_weights({"a": 1.0, "b": weight})
    with pytest.raises(InputError, match=r"data\.sources"):
        mix_weights({})


@pytest.mark.parametrize("name", ["hotpotqa", "musique", "two_wiki"])
def test_titles_of_a_corpus_are_joined_as_those_of_the_training(name: str) -> None:
    (record,) = records(name, 1)
    separator = DataConfig(sources={name: 1.0}).passage_separator
    chunks = SOURCES[name].parse(record).chunks
    assert chunks[0] == passage_text("Dusk", "By Ada.", separator)


def test_workers_import_no_jax() -> None:
    code = "import sys, qrag_jax.data.sources.registry; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_what_is_fatal(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*records("musique", 2), {"question": "Who?"}])
    with pytest.raises(InputError, match=r"a\.jsonl:1: .*'context'") as caught:
        load_samples("hotpotqa", str(path), "train")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    # A limit stops reading before what is broken.
    path.write_bytes(path.read_bytes() + b"broken")
    assert load_samples("musique", str(path), "train", limit=2)[1].read == 2
    for source in ("squad", "synthetic", "babilong", "hover"):
        with pytest.raises(InputError, match=f"'{source}'"):
            load_samples(source, str(tmp_path), "train")

"""The suite `long`: its tables, and the document whose texts are all different."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import long
from benchmarks.long_texts import Texts, count_texts, different_cases
from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.evaluators.lengths import documents_of_length
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder
from qrag_jax.runtime.saved_config import CONFIG_NAME, save_config
from qrag_jax.systems.q_rag_config import QRagConfig

PARTS = ["qa1", "qa2", "qa1-beam", "qa2-beam", "cost", "different", "needles"]


def result(chunks: int, em: float, **other: Any) -> dict[str, Any]:
    return {
        "chunks": chunks,
        "tokens": 20 * chunks,
        "fits": 90,
        "stories": 100,
        "samples": 50,
        "fact_em": em,
        "em_shortest": 0.8,
        "fact_f1": 0.5,
        "fact_precision": 0.4,
        "fact_recall": 0.9,
        "steps": 2.0,
        "embedded": chunks,
        "embed_seconds": 1.0,
        "seconds_per_episode": 0.25,
        "peak_memory_mib": 1000.0,
        "mapped_mib": 0.0,
        "intervals": {"fact_em": {"mean": em, "low": em - 0.1, "high": em + 0.1}},
    } | other


def test_every_part_can_be_run_alone(tmp_path: Path) -> None:
    assert list(long._parts(tmp_path)) == PARTS


def test_tables_of_finished_parts() -> None:
    scored = {"lengths": [result(50, 0.8), result(4600, 0.7)], "checkpoints": 7}
    table = long.lengths_table({"qa1": scored, "cost": {"cases": []}})
    header, _, first, last = table.strip().split("\n")
    assert header.startswith("| task | chunks | tokens, about | documents | fact EM |")
    cells = ["qa1", "50", "1000", "50", "0.800 [0.700, 0.900]", "0.800", "0.500", "0.400", "0.900"]
    assert first == f"| {' | '.join([*cells, '50', '0.250', '1000'])} |"
    assert last.startswith("| qa1 | 4600 |")
    cases = long.all_cases({"qa1": scored, "cost": {"cases": []}})
    assert [case.holds for case in cases] == [None, False]  # 0.7 is less than 0.9 of 0.8
    assert "best of 7 checkpoints, chosen on documents of the length trained on" in cases[0].case


def test_a_document_of_different_texts_says_what_it_really_has() -> None:
    first = result(420_000, 1.0, mapped_mib=768.0, embedded=407_000)
    again = result(420_000, 1.0, mapped_mib=768.0, embedded=0)
    texts = Texts(420_000, 407_000, 7_000_000, 3)
    tokens, cold, warm = different_cases([first, again], texts, 400_000)
    assert tokens.value == 7_000_000
    assert "420,000 chunks, 407,000 different texts" in tokens.case
    assert all(case.holds for case in (tokens, cold, warm))
    # Too few different ones, a table that is no mapped file, texts that are embedded again.
    fewer = texts._replace(different=399_999)
    unmapped = result(420_000, 1.0, mapped_mib=0.0, embedded=5)
    assert not any(case.holds for case in different_cases([first, unmapped], fewer, 400_000))


def test_texts_are_counted_by_the_runs_tokenizer(tmp_path: Path) -> None:
    from configs import babilong

    config = babilong.get_config("tiny")
    config.data.sources.babilong.noise = "books"  # is to be overridden
    folder = tmp_path / "encoder"
    folder.mkdir()
    scratch = ScratchConfig(**config.encoder.scratch.to_dict())
    make_scratch_folder(folder, ["Mary went to the kitchen."] * 50, scratch, 0)
    save_config(config, tmp_path / CONFIG_NAME)
    found = count_texts(tmp_path, 300, long.DIFFERENT)
    config.data.sources.babilong.noise = ""
    (document,) = documents_of_length(QRagConfig.of(config).dev_data, 300, 1)
    encoded = TextTokenizer.load(folder).encode(document.chunks)
    assert found.chunks == 300
    assert found.different == len(set(document.chunks)) > 280
    assert found.tokens == sum(map(len, encoded))
    row = config.data.max_chunk_tokens - 2
    assert found.cut == sum(len(ids) > row for ids in encoded)


@pytest.mark.parametrize("value", [None, 0.25])
def test_cells(value: float | None) -> None:
    assert long._cell("seconds_per_episode", value) == ("" if value is None else "0.250")

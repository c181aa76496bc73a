"""Data named as path,config,split: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets.arrow_reader import ReadInstruction

from qrag_jax.data.reading import WITHOUT, DatasetPart, parse_parts, read_parts
from qrag_jax.errors import InputError
from tests.support.worlds import record_of, write_lines

PARAGRAPHS = [("J. R. R. Lake", ["It is deep."]), ("Ada Berg", ["She sails there. ", "Often."])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve questions of MuSiQue for training, five of HotpotQA for evaluation."""
    for name, source, count in (("train", "musique", 12), ("dev", "hotpotqa", 5)):
        records = [
            record_of(source, f"{name}{number}", "Where?", "a lake", PARAGRAPHS, [0])
            for number in range(count)
        ]
        write_lines(tmp_path / f"{name}.jsonl", records)
    return tmp_path


def test_strings_of_several_parts() -> None:
    text = "bdsaglam/musique,answerable,train[:256]; bdsaglam/musique-mini , , validation"
    assert parse_parts(text) == (
        DatasetPart("bdsaglam/musique", "answerable", "train", "[:256]"),
        DatasetPart("bdsaglam/musique-mini", "", "validation"),
    )
    assert parse_parts("ir/scifact,dev", WITHOUT) == (DatasetPart("ir/scifact", "", "dev"),)
    for text in ("a,b,train", "a", ""):
        with pytest.raises(InputError, match="path,split"):
            parse_parts(text, WITHOUT)


@pytest.mark.parametrize(
    "text",
    [
        *(" ", "a,b,train;", "a,train", "a,b,train,16", ",b,train", "a,b,", "a,b,train[16]"),
        *("a,b,train[:16", "a,b,train[:16]+dev[:2]", "a,b,train[10:50%]", "a,b,train[:120%]"),
    ],
)
def test_a_string_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_parts(text)
    assert "\n" not in str(caught.value)


BOUNDS = "|[:]|[:16]|[3:]|[2:20]|[-5:]|[:-1]|[10%:90%]|[-33%:]|[:5%]"


@pytest.mark.parametrize("count", [1, 7, 117])
@pytest.mark.parametrize("bounds", BOUNDS.split("|"))
def test_slices_are_those_of_datasets(bounds: str, count: int) -> None:
    (part,) = parse_parts(f"a,b,train{bounds}")
    (theirs,) = ReadInstruction.from_spec(f"train{bounds}").to_absolute({"train": count})
    if theirs.from_ >= theirs.to:
        with pytest.raises(InputError, match=str(count)):
            part.of(count)
    else:
        assert part.of(count) == range(theirs.from_, theirs.to)


def test_files_are_read_with_titles(folder: Path) -> None:
    samples, (report,) = read_parts(f"{folder},answerable,train[2:5]")
    assert [each.id for each in samples] == ["train2", "train3", "train4"]
    assert samples[0].titles == ("J. R. R. Lake", "Ada Berg")
    assert samples[0].chunks[0] == "J. R. R. Lake. It is deep."
    assert (report.read, report.kept) == (3, 3)
    samples, _ = read_parts(f"{folder},hotpotqa,validation")
    assert [each.source for each in samples] == ["hotpotqa"] * 5
    assert samples[0].titles == ("J. R. R. Lake", "Ada Berg")
    assert samples[0].chunks[1] == "Ada Berg She sails there. Often."
    assert len(read_parts(f"{folder / 'train.jsonl'},,anything[:1]")[0]) == 1

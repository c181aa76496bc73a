"""Rows of language models from the command to the lists, with a chat model of random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.kept_runs import Kept
from benchmarks.which_cases import answers, published, rewrite_row, rlvr_row, single, writers
from benchmarks.which_cases.answers import Reader
from benchmarks.which_cases.found import Found
from benchmarks.which_cases.measured import costs_of
from benchmarks.which_cases.row import (
    TRAINED,
    TWICE_WITH_WORDS,
    UNTRAINED,
    WITH_WORDS,
    Place,
    Result,
)
from benchmarks.which_cases.rows import SMOLLM2
from benchmarks.which_cases.settings import TRAIN, TWO_WIKI, Asked, Setting
from qrag_jax.errors import InputError
from qrag_jax.runtime.minilm import find_minilm
from tests.benchmarks import invented_setting
from tests.llm.model_server import Call, ModelServer, Reply
from tests.support import tiny_qwen3 as tiny_llm


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return invented_setting.make(tmp_path_factory.mktemp("setting"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llm.save(tiny_llm.model(0), tmp_path_factory.mktemp("chat"))
    tokenizer = tiny_llm.tokenizer()
    # Here turns end with a special token, as a policy's must.
    tokenizer.chat_template = tiny_llm.TEMPLATE.replace("m.content }}", "m.content }}<eos>")
    tokenizer.save_pretrained(folder)
    return folder


def lists_are_of(given: Setting, found: Found) -> None:
    corpus = {passage.name for passage in given.corpus}
    assert {*found.lists} == {asked.id for asked in given.test}
    assert all({*names} <= corpus for names in found.lists.values())
    assert found.index_bytes > 0


@pytest.mark.long
def test_rlvr_imitates_learns_and_is_asked(
    given: Setting, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_minilm(download=False) is None:
        pytest.skip("MiniLM is not on this machine")
    monkeypatch.setattr(writers, "smollm2", lambda: chat)
    # Its tokenizer has few words, so prompts are long.
    small = ("--config.model.lora.rank=4", "--config.eval.samples=2", "--config.sampling.room=1500")
    small += ("--config.train.checkpoint_every=1", "--config.train.eval_every=1")
    imitation = (f"--config.model.path={chat}", "--config.sft.steps=1", *small)
    flags = (*small, "--config.train.steps=1", "--config.train.batch_size=1")
    flags += ("--config.grpo.members=2",)
    place = Place(given, tmp_path / "row", 42, flags=flags, transfer_questions=0)
    result = rlvr_row.rlvr(place, imitation)
    ways = {TRAINED, UNTRAINED, rlvr_row.IMITATED, writers.DENSE}
    assert {*result.ways} == ways
    for tests in result.ways.values():
        lists_are_of(given, tests[TWO_WIKI])
    assert result.training is not None
    invented_setting.check_course(result.training)
    costs = costs_of(place.folder)
    assert result.training.minutes > costs["train"].seconds / 60
    assert {writers.COMPILING, writers.FEW, "imitate", "export"} <= {*costs}
    assert "checkpoint" in result.about
    # A further seed is asked its own test alone, by what it began with, too.
    again = rlvr_row.rlvr(Place(given, place.folder, 42, flags=flags, every_way=False), imitation)
    assert {*again.ways} == {TRAINED, rlvr_row.IMITATED}
    assert again.ways[TRAINED] == result.ways[TRAINED]


@pytest.mark.long
def test_a_passage_that_the_model_wrote_is_searched_for(
    given: Setting, chat: Path, tmp_path: Path
) -> None:
    result = rewrite_row.pseudo_document(Place(given, tmp_path / "row"), model=str(chat), room=1500)
    found = result.ways[UNTRAINED][TWO_WIKI]
    lists_are_of(given, found)
    assert all(found.lists.values())  # the question is searched for, too
    assert 1 <= found.asking.written_tokens <= rewrite_row.PASSAGE_TOKENS
    assert found.asking.read_tokens > 20


@pytest.mark.long
def test_answers_are_kept_and_asked_for_once(
    given: Setting, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept("which", tmp_path / "runs", tmp_path / "results")
    monkeypatch.setattr(writers, "smollm2", lambda: chat)
    monkeypatch.setattr(answers, "QUESTIONS", 4)
    monkeypatch.setattr(answers, "WRITTEN", 4)
    monkeypatch.delenv(answers.URL, raising=False)
    found = single.bm25(given)
    untrained = Result({UNTRAINED: {TWO_WIKI: found}})
    finish(kept, "bm25", untrained)
    elsewhere = {f"{TWO_WIKI}/{name}": untrained.to_json() for name in ("bm25", "minilm")}
    monkeypatch.setattr(published, "published", lambda: elsewhere)
    ways = (TRAINED, UNTRAINED, WITH_WORDS, TWICE_WITH_WORDS)
    trained = Result({way: {TWO_WIKI: found} for way in ways})
    finish(kept, "q_rag-42", trained)
    finish(kept, "q_rag-43", trained)
    written: list[str] = []
    said = Reader._written

    def counted(reader: Reader, prompts: Sequence[str]) -> Iterator[tuple[str, str]]:
        written.extend(prompts)
        return said(reader, prompts)

    monkeypatch.setattr(Reader, "_written", counted)
    part = answers.part(lambda name: given, kept, TWO_WIKI)
    assert {name: [*ways] for name, ways in part["lines"].items()} == {
        "bm25": [UNTRAINED],
        "minilm": [UNTRAINED],  # finished elsewhere
        "q_rag-42": [TRAINED, WITH_WORDS, TWICE_WITH_WORDS],
    }
    assert part["questions"] == 4
    assert [*part["bounds"]] == [answers.GOLD, answers.NOTHING]
    # Four questions, with three lists each; equal prompts are asked once.
    assert len(written) == len(set(written)) == 12
    # A killed part goes on, also where the last line of its file is broken.
    file = tmp_path / "runs" / TWO_WIKI / "answers" / "said.jsonl"
    file.write_text(file.read_text()[:-5])
    monkeypatch.setattr(Reader, "_opened", None)
    again = answers.part(lambda name: given, kept, TWO_WIKI)
    assert len(written) == 13
    assert json.dumps(again) == json.dumps(part)


@pytest.mark.long
def test_a_server_answers_by_its_url(
    given: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked by the command, with the first passages that were found, or with none."""
    monkeypatch.setattr(answers, "QUESTIONS", 4)
    monkeypatch.setenv(answers.MODEL, "tiny")
    asked, texts = answers.chosen(given), {each.name: each.text for each in given.corpus}
    kept = Kept("which", tmp_path / "runs", tmp_path / "results")
    monkeypatch.setattr(published, "published", dict)
    finish(kept, "bm25", Result({UNTRAINED: {TWO_WIKI: single.bm25(given)}}))

    def reply(call: Call) -> Reply:
        """The right answer where a gold passage is seen."""
        of = next(each for each in asked if each.text in call.prompt)
        sees = texts[of.gold[0]] in call.prompt
        return Reply(text=f"Final answer: {of.answers[0] if sees else 'nobody'}")

    with ModelServer(reply) as server:
        monkeypatch.setenv(answers.URL, server.url)
        part = answers.part(lambda name: given, kept, TWO_WIKI)
    assert part["reader"] == "tiny"
    rows = {**part["bounds"], "bm25": part["lines"]["bm25"][UNTRAINED]}
    matched = {
        name: [each for each in columns["em@4"] if not np.isnan(each)]
        for name, columns in rows.items()
    }
    assert matched == {answers.GOLD: [1.0] * 4, answers.NOTHING: [0.0] * 4, "bm25": [1.0] * 4}


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


@pytest.mark.long
def test_what_prompts_begin_with_is_read_once(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts are those of each prompt alone, read whole."""
    import torch

    monkeypatch.setattr(answers, "WRITTEN", 8)
    monkeypatch.setattr(answers, "_AT_ONCE", 3)
    reader = Reader(chat, tmp_path / "said.jsonl")
    ends = ("who", "which river", "when was the lamp of the river lit", "a stone", "of what")
    read: list[int] = []
    forward = reader.model.forward

    def counted(input_ids: Any, **given: Any) -> Any:
        read.append(input_ids.shape[1])
        return forward(input_ids, **given)

    for begin in ("the river is long. " * 9, ""):
        prompts = [begin + end for end in ends]
        alone = []
        for prompt in prompts:
            rows = reader.tokenizer(prompt, return_tensors="pt")
            with torch.no_grad():
                out = reader.model.generate(**rows, max_new_tokens=8, do_sample=False)
            new = out[0, rows["input_ids"].shape[1] :]
            alone.append(first_line(reader.tokenizer.decode(new, skip_special_tokens=True)))
        assert len(set(alone)) > 1
        reader.kept.clear()
        read.clear()
        with monkeypatch.context() as patch:
            patch.setattr(reader.model, "forward", counted)
            assert [first_line(text) for text in reader.said(prompts)] == alone
        whole = len(reader.tokenizer(prompts[0])["input_ids"])
        assert not begin or read[0] > 0.9 * whole > max(read[1:]) * 2


def finish(kept: Kept, name: str, result: Result) -> None:
    path = kept.results / TWO_WIKI / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result.to_json()))


def test_answers_are_forgotten_when_a_row_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "published", dict)
    kept = Kept("which", tmp_path / "runs", tmp_path / "results")
    finish(kept, "bm25", Result({}))
    path = kept.results / TWO_WIKI / "answers.json"
    made = {"lines": {"bm25": {}}, "reader": SMOLLM2}
    path.write_text(json.dumps(made))
    answers.forget_if_older(kept, f"{TWO_WIKI}/answers")
    assert path.exists()
    finish(kept, "q_rag-43", Result({}))  # not the first training
    answers.forget_if_older(kept, f"{TWO_WIKI}/answers")
    assert path.exists()
    finish(kept, "q_rag-42", Result({}))
    answers.forget_if_older(kept, f"{TWO_WIKI}/answers")
    assert not path.exists()
    path.write_text(json.dumps({**made, "lines": {"bm25": {}, "q_rag-42": {}}}))
    answers.forget_if_older(kept, f"{TWO_WIKI}/answers")
    assert path.exists()
    monkeypatch.setenv(answers.URL, "http://127.0.0.1:8000/v1")
    monkeypatch.delenv(answers.MODEL, raising=False)
    with pytest.raises(InputError, match="names no model of it; give both"):
        answers.forget_if_older(kept, f"{TWO_WIKI}/answers")
    assert path.exists()
    monkeypatch.setenv(answers.MODEL, "another model")
    answers.forget_if_older(kept, f"{TWO_WIKI}/answers")
    assert not path.exists()


def test_the_reader_sees_training_questions_of_several_kinds() -> None:
    texts = {name: f"{name} " * size for name, size in (("a", 9), ("b", 1), ("c", 2), ("d", 80))}

    def asked(name: str, text: str, answer: str) -> Asked:
        return Asked(name, text, (answer,), gold=tuple(name))

    train = [
        asked("a", "Who is A?", "Ada"),
        asked("c", "Who is C?", "Cy"),
        asked("d", "Is D one?", "no"),
        asked("b", "Where is B?", "Bonn"),
    ]
    given = Setting(TWO_WIKI, Path(), (), {TRAIN: train}, {})
    # The one of yes or no, then the shortest of each first word.
    assert [each.id for each in answers.shots(given, texts)] == ["d", "b", "c"]
    cut = answers._question(train[2], [texts["d"], texts["b"]])
    assert cut == f"{'d ' * (answers.WORDS - 1)}d\nb\nQuestion: Is D one?\nAnswer:"


def test_an_answer_ends_with_its_line(given: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []

    class Fixed:
        def said(self, asked: Sequence[str]) -> list[str]:
            prompts.extend(asked)
            return [" Ada \nQuestion: Who?", "\n", ""][: len(asked)]

    monkeypatch.setattr(Reader, "opened", lambda said: Fixed())
    found = single.bm25(given)
    asked = given.test[:3]
    assert answers.by_smollm2(given, Path("unused"), asked, found, "bm25") == ["Ada", "", ""]
    assert len(prompts) == 3
    for each, prompt in zip(asked, prompts, strict=True):
        assert prompt.endswith(f"Question: {each.text}\nAnswer:")
        assert prompt.count("Question: ") == 1 + len(
            answers.shots(given, {p.name: p.whole for p in given.corpus})
        )


def test_answered_questions_are_spread_over_the_test(
    given: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers.chosen(given) == [*given.test]
    monkeypatch.setattr(answers, "QUESTIONS", 3)
    assert answers.chosen(given) == [given.test[0], given.test[2], given.test[4]]

"""Answers of a language model that reads the first passages of every finished row.

With QRAG_WHICH_URL and QRAG_WHICH_MODEL a running server answers, by `qrag_jax.answer`, as its page
says. Otherwise SmolLM2 answers on this machine, by transformers, with the same prompt; equal
prompts are asked once, and its answers are kept, so that a killed part goes on. EM and F1 are
HotpotQA's. Answers take far longer than searches, so that the same `QUESTIONS` test questions are
answered for every row, of its first training: those that stand evenly in the test's order. A row
that is not finished on this machine is taken from the results in the repository. The model also
reads the gold passages, and none: what lies between is all that a search can bring to it.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import Kept, command
from benchmarks.which_cases import published, single, writers
from benchmarks.which_cases.found import READ, Asking, Found
from benchmarks.which_cases.row import COMPARED_WAYS, TRAINED, Result
from benchmarks.which_cases.rows import ROWS, SMOLLM2
from benchmarks.which_cases.scores import AP
from benchmarks.which_cases.settings import TEST, TRAIN, Asked, Setting, qrels
from qrag_jax.environments.query_writing.state import BY_PASSAGE
from qrag_jax.errors import InputError
from qrag_jax.metrics import answer_log, answers, hop_log
from qrag_jax.metrics.answer_log import AnswerRow, Miss
from qrag_jax.metrics.hop_log import Hop, Searched
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.retrieval.opening import BM25
from qrag_jax.runtime.whole_files import write_whole

QUESTIONS = 100  # of a test, at most
URL, MODEL = "QRAG_WHICH_URL", "QRAG_WHICH_MODEL"
WRITTEN = 16  # tokens of an answer, at most
WORDS = 60  # of a passage, at most
SHOTS = 4  # training questions before the question
SAID = "said.jsonl"  # what the model wrote, by prompts
GOLD, NOTHING = "the gold passages", "no passage"
_AT_ONCE = 8  # prompts

# Questions, what was read, and a name for files → an answer for each; None: it has none.
Ask = Callable[[Sequence[Asked], Found, str], list[str | None]]


def part(settings: Callable[[str], Setting], kept: Kept, where: str) -> dict[str, Any]:
    """EM and F1 of all finished rows of a setting, and of reading `GOLD` and `NOTHING`.

    Raises:
        InputError: no row is finished, or there is no model; see also `reader`.
    """
    given = settings(where)
    finished = {name: Result.of_json(made) for name, made in _finished(kept, where).items()}
    if not finished:
        raise InputError(f"no row of {where} is finished; run one first, such as {where}/bm25.")
    folder = kept.runs / where / "answers"
    url = os.environ.get(URL)
    ask: Ask = partial(by_server, given, folder, url) if url else partial(by_smollm2, given, folder)
    lines = {
        name: {
            way: scores(given, tests[where], ask, f"{name}-{way}")
            for way, tests in result.ways.items()
            if way in COMPARED_WAYS or TRAINED not in result.ways
        }
        for name, result in finished.items()
    }
    asked = chosen(given)
    nothing: dict[str, tuple[str, ...]] = {each.id: () for each in asked}
    bounds = {GOLD: {each.id: each.gold for each in asked}, NOTHING: nothing}
    return {
        "lines": lines,
        "bounds": {
            name: scores(given, Found(lists, Asking()), ask, name) for name, lists in bounds.items()
        },
        "reader": reader(),
        "questions": len(asked),
    }


def reader() -> str:
    """The name of the model that answers.

    Raises:
        InputError: a server is named, and no model of it.
    """
    if not os.environ.get(URL):
        return SMOLLM2
    if model := os.environ.get(MODEL):
        return model
    raise InputError(f"{URL} names a server, but {MODEL} names no model of it; give both.")


def _finished(kept: Kept, where: str) -> dict[str, dict[str, Any]]:
    """The results of rows, of one training each, in the order of the rows."""
    parts = [f"{where}/{row.parts[0]}" for row in ROWS]
    there = published.published() | kept.finished(parts)
    return {part.partition("/")[2]: there[part] for part in parts if part in there}


def forget_if_older(kept: Kept, name: str) -> None:
    """Deletes the part's result if rows have been finished since, or another model is to answer.

    Answers that are kept stay.

    Raises:
        InputError: see `reader`.
    """
    path, model = kept.results / f"{name}.json", reader()
    if path.exists():
        rows, part = _finished(kept, path.parent.name), json.loads(path.read_text())
        if rows.keys() - part["lines"].keys() or part["reader"] != model:
            path.unlink()


def chosen(given: Setting) -> list[Asked]:
    """The test questions that are answered, evenly from the test's order."""
    count = min(QUESTIONS, len(given.test))
    return [given.test[number * len(given.test) // count] for number in range(count)]


def scores(given: Setting, found: Found, ask: Ask, name: str) -> dict[str, list[float]]:
    """EM and F1 of each test question; NaN: it was not asked, or the server failed."""
    asked = [each for each in chosen(given) if each.id in found.lists]
    said = dict(zip((a.id for a in asked), ask(asked, found, name), strict=True))
    columns: dict[str, list[float]] = {f"em@{READ}": [], f"f1@{READ}": []}
    for each in given.test:
        answer = said.get(each.id)
        if answer is None:
            em = f1 = float("nan")
        else:
            em, f1 = answers.hotpotqa(answer, each.answers)
        columns[f"em@{READ}"].append(em)
        columns[f"f1@{READ}"].append(f1)
    return columns


def by_server(
    given: Setting, folder: Path, url: str, asked: Sequence[Asked], found: Found, name: str
) -> list[str | None]:
    """The answers of a running server, by the command; where it failed they are None."""
    model = reader()
    folder /= model.replace("/", "-")  # the answers of one model
    folder.mkdir(parents=True, exist_ok=True)
    plain = name.replace(",", "").replace(" ", "-")
    log, out = folder / f"{plain}.jsonl", folder / f"{plain}-said.jsonl"
    read = {each.id: found.lists[each.id][:READ] for each in asked}
    precisions = ranking_columns(read, qrels(given, TEST), [AP])[AP]
    rows = [_searched(each, read[each.id], precisions[each.id]) for each in asked]
    kind = "what a row of the suite which has read"
    hop_log.write(log, rows, {"kind": kind, "row": name, "search": {"gold_by": BY_PASSAGE}})
    corpus = single.index_of(given, (BM25,))
    words = (f"--log={log}", f"--out={out}", f"--corpus={corpus}", "--metric=hotpotqa")
    command("qrag_jax.answer", *words, f"--llm.url={url}", f"--llm.model={model}")
    lost = answer_log.read_partial(out.with_name(f"{out.stem}.failures.jsonl"), Miss)
    said = {row.id: "" for row in lost if not row.failed}  # no answer is a wrong one
    said |= {row.id: row.prediction for row in answer_log.read_partial(out, AnswerRow)}
    return [said.get(each.id) for each in asked]


def _searched(asked: Asked, names: Sequence[str], precision: float) -> Searched:
    hop = Hop(asked.text, "", tuple(names), {"ap": precision})
    return Searched(asked.id, asked.text, asked.answers, asked.gold, (hop,))


def by_smollm2(
    given: Setting, folder: Path, asked: Sequence[Asked], found: Found, name: str
) -> list[str | None]:
    """The answers of SmolLM2 on this machine; what it says is kept in the folder."""
    print(f"answering: {name}", flush=True)
    texts = {passage.name: passage.whole for passage in given.corpus}
    begin = "".join(
        f"{_question(shot, [texts[name] for name in shot.gold])} {shot.answers[0]}\n\n"
        for shot in shots(given, texts)
    )
    prompts = [
        begin + _question(each, [texts[name] for name in found.lists[each.id][:READ]])
        for each in asked
    ]
    # It would go on with a further question.
    read = (text.strip().partition("\n")[0] for text in Reader.opened(folder / SAID).said(prompts))
    return [each.strip() for each in read]


def shots(given: Setting, texts: Mapping[str, str]) -> list[Asked]:
    """The training questions with the shortest gold passages, of different kinds.

    One is answered by yes or no, and the others begin with different words.

    Args:
        texts: of all passages, by their names.
    """

    def length(asked: Asked) -> int:
        return sum(len(texts[name]) for name in asked.gold)

    kinds: dict[str, Asked] = {}
    for asked in sorted(given.questions[TRAIN], key=length):
        is_yes_no = asked.answers[0].lower() in ("yes", "no")
        kinds.setdefault("yes or no" if is_yes_no else asked.text.split()[0].lower(), asked)
    first = [kinds.pop("yes or no")] if "yes or no" in kinds else []
    return [*first, *kinds.values()][:SHOTS]


def _question(asked: Asked, passages: Iterable[str]) -> str:
    """The passages and the question, up to its answer."""
    lines = [" ".join(text.split()[:WORDS]) for text in passages]
    return "\n".join([*lines, f"Question: {asked.text}", "Answer:"])


class Reader:
    """A language model by transformers, greedy; keeps what it said in a file."""

    _opened: Reader | None = None

    def __init__(self, folder: Path, said: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        where: Mapping[str, Any] = {"local_files_only": True}
        self.tokenizer = AutoTokenizer.from_pretrained(str(folder), padding_side="left", **where)
        self.model = AutoModelForCausalLM.from_pretrained(str(folder), **where).eval()
        self.file = said
        said.parent.mkdir(parents=True, exist_ok=True)
        whole = said.read_text().split("\n")[:-1] if said.exists() else []
        # A kill can leave half a line at the end, which is written over.
        write_whole(said, "".join(f"{line}\n" for line in whole))
        self.kept: dict[str, str] = dict(json.loads(line) for line in whole)

    @classmethod
    def opened(cls, said: Path) -> Reader:
        """SmolLM2, one for the process and the file."""
        if cls._opened is None or cls._opened.file != said:
            cls._opened = cls(writers.smollm2(), said)
        return cls._opened

    def said(self, prompts: Iterable[str]) -> list[str]:
        """Its text to each prompt."""
        wanted = list(prompts)
        new = [each for each in dict.fromkeys(wanted) if each not in self.kept]
        for prompt, text in self._written(new):
            with self.file.open("a") as file:
                file.write(json.dumps([prompt, text]) + "\n")
            self.kept[prompt] = text
        return [self.kept[each] for each in wanted]

    def _written(self, prompts: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Each prompt with its text, short ones first. What all begin with is read once."""
        import torch
        from transformers import DynamicCache

        rows = {prompt: self.tokenizer(prompt)["input_ids"] for prompt in prompts}
        short_first = sorted(rows, key=lambda prompt: len(rows[prompt]))
        begin = _common([*rows.values()])
        read = DynamicCache(config=self.model.config)
        with torch.no_grad():
            if begin:
                self.model(torch.tensor([begin]), past_key_values=read)
            for start in range(0, len(short_first), _AT_ONCE):
                part = short_first[start : start + _AT_ONCE]
                ends = [rows[prompt][len(begin) :] for prompt in part]
                yield from zip(part, self._greedy(len(begin), read, ends), strict=True)

    def _greedy(self, begun: int, read: Any, ends: list[list[int]]) -> list[str]:
        """The texts after rows of tokens, up to their first line's end.

        Args:
            begun: number of tokens that were read before, the same for all.
            read: their keys and values.
        """
        import torch

        padded = self.tokenizer.pad({"input_ids": ends}, return_tensors="pt")
        ids, own = padded["input_ids"], padded["attention_mask"]
        # Padding stands between what was read and a shorter row, where none sees it.
        seen = torch.cat([torch.ones(len(ends), begun, dtype=own.dtype), own], dim=1)
        places = begun + (own.cumsum(1) - 1).clamp(min=0)
        keys = copy.deepcopy(read)
        keys.batch_repeat_interleave(len(ends))
        written, eos = ids[:, :0], self.tokenizer.eos_token_id
        for _ in range(WRITTEN):
            given = {"attention_mask": seen, "position_ids": places, "past_key_values": keys}
            ids = self.model(ids, **given).logits[:, -1:].argmax(-1)
            written = torch.cat([written, ids], dim=1)
            texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
            ended = (written == eos).any(1).tolist()
            if all(e or "\n" in t.strip() for e, t in zip(ended, texts, strict=True)):
                break
            seen = torch.cat([seen, torch.ones_like(ids)], dim=1)
            places = places[:, -1:] + 1
        # A row that has ended goes on until the others have.
        kept = [[*itertools.takewhile(lambda t: t != eos, row)] for row in written.tolist()]
        return self.tokenizer.batch_decode(kept, skip_special_tokens=True)


def _common(rows: Sequence[Sequence[int]]) -> list[int]:
    """What all rows begin with, and after which each of them has something."""
    if not rows:
        return []
    shortest = min(map(len, rows)) - 1
    columns = zip(*(row[:shortest] for row in rows), strict=True)
    return [column[0] for column in itertools.takewhile(lambda c: len(set(c)) == 1, columns)]

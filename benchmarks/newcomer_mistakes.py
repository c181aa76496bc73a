"""Typical mistakes of a first hour: what each command says to them.

Each mistake is a command as a newcomer would type it, on small files that are made for it. It must
end with a status other than 0, without a traceback, and its last line must be one sentence that
names what is wrong (the words that are looked for) and says what to do.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import ROOT

_LONGEST = 700  # characters of a sentence
_PATIENCE = 240.0  # seconds of a command
_TINY = "--config=configs/own.py:tiny"


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One wrong command.

    Attributes:
        what: the mistake, in words.
        command: a module of the package and its arguments.
        names: what the sentence must name, all of these.
        says: what to do, one of these.
    """

    what: str
    command: tuple[str, ...]
    names: tuple[str, ...]
    says: tuple[str, ...]


def mistakes() -> list[Mistake]:
    """All of them; paths are relative to the folder that `make_files` fills."""

    def train(what: str, *given: str, names: tuple[str, ...], says: tuple[str, ...]) -> Mistake:
        return Mistake(what, ("train", *given), names, says)

    own = (_TINY, "--config.data.path=own")
    return [
        train("no config", names=("--config",), says=("give", "use", "such as", "must")),
        train(
            "a config that is not there",
            "--config=configs/hotpotq.py",
            names=("configs/hotpotq.py",),
            says=("hotpotqa", "use", "give"),
        ),
        train(
            "a variant that is not there",
            "--config=configs/hotpotqa.py:minlm",
            names=("minlm",),
            says=("minilm",),
        ),
        train(
            "a misspelt field", *own, "--config.train.stpes=10", names=("stpes",), says=("steps",)
        ),
        train(
            "a word for a number",
            *own,
            "--config.train.steps=ten",
            names=("train.steps", "ten"),
            says=("number", "int", "integer"),
        ),
        train(
            "an empty batch",
            *own,
            "--config.train.batch_size=0",
            names=("config.train.batch_size", "0"),
            says=("at least", "1"),
        ),
        train(
            "a learning rate below 0",
            *own,
            "--config.optimizer.learning_rate=-1",
            names=("config.optimizer.learning_rate", "-1"),
            says=("above 0",),
        ),
        train(
            "a folder of data that is not there",
            _TINY,
            "--config.data.path=nowhere",
            names=("nowhere",),
            says=("config.data.path", "name", "give"),
        ),
        train(
            "an empty folder of data",
            _TINY,
            "--config.data.path=empty",
            names=("empty",),
            says=("put",),
        ),
        train(
            "data that are no JSON",
            _TINY,
            "--config.data.path=broken",
            names=("broken",),
            says=("line", "JSON"),
        ),
        train(
            "columns under other names",
            _TINY,
            "--config.data.path=renamed",
            names=("question",),
            says=("columns",),
        ),
        train(
            "a column that no record has",
            *own,
            "--config.data.columns.question=queri",
            names=("queri",),
            says=("columns", "question"),
        ),
        train(
            "supporting passages that are not there",
            _TINY,
            "--config.data.path=beyond",
            names=("support",),
            says=("validate_data",),
        ),
        train(
            "an encoder that is not there",
            *own,
            "--config.encoder.path=my-encoder",
            names=("my-encoder",),
            says=("config.encoder.path", "folder", "hub"),
        ),
        train(
            "an encoder's folder without a model",
            *own,
            "--config.encoder.path=empty",
            names=("empty",),
            says=("config.json",),
        ),
        train(
            "more devices than there are",
            *own,
            "--config.runtime.mesh=4,1,1",
            names=("4",),
            says=("config.runtime.mesh",),
        ),
        train(
            "parts of a batch that do not divide it",
            *own,
            "--config.train.batch_size=6",
            "--config.train.accumulation=4",
            names=("config.train.accumulation", "6"),
            says=("divide", "multiple", "divisor"),
        ),
        train(
            "a workdir that is a file",
            *own,
            "--workdir=file.txt",
            names=("file.txt",),
            says=("--workdir", "folder"),
        ),
        train(
            "a reward that is not there",
            *own,
            "--config.reward.name=exact",
            names=("exact",),
            says=("use", "one of", "names"),
        ),
        train(
            "a judge without a server",
            *own,
            "--config.reward.name=judge",
            "--config.llm.url=http://127.0.0.1:9/v1",
            "--config.llm.model=any",
            "--config.llm.deadline=5",
            "--config.llm.attempts=1",
            names=("127.0.0.1:9",),
            says=("config.llm", "start", "server"),
        ),
        train(
            "a reward's file that is not there",
            *own,
            "--config.reward.path=mine.py:score",
            names=("mine.py",),
            says=("config.reward.path",),
        ),
        train(
            "a reward's file without the function",
            *own,
            "--config.reward.path=own_reward.py:points",
            names=("own_reward.py", "points"),
            says=("score", "function", "name"),
        ),
        train(
            "hosts that cannot be read",
            *own,
            "--hosts=two",
            names=("two",),
            says=("--hosts", "ADDRESS", "auto"),
        ),
        Mistake(
            "no run to score", ("evaluate",), ("--workdir",), ("give", "name", "required", "set")
        ),
        Mistake(
            "a run that is not there",
            ("evaluate", "--workdir=runs/mine"),
            ("runs/mine",),
            ("train", "--workdir", "run"),
        ),
        Mistake(
            "an index of no corpus",
            ("index", "--corpus=corpus.jsonl", "--index=made", "--engine=bm25"),
            ("corpus.jsonl",),
            ("give",),
        ),
        Mistake(
            "a search of a folder that is no index",
            ("search", "--index=empty", "Where?"),
            ("empty",),
            ("index",),
        ),
        Mistake(
            "an export of no run",
            ("export", "--workdir=runs/mine", "--out=exported"),
            ("runs/mine",),
            ("train", "--workdir", "run"),
        ),
        Mistake(
            "a page of no run", ("show", "runs/mine"), ("runs/mine",), ("run", "folder", "log")
        ),
        Mistake(
            "answers by no log",
            (
                "answer",
                "--log=eval.jsonl",
                "--out=answers.jsonl",
                "--llm.url=http://127.0.0.1:9/v1",
                "--llm.model=any",
            ),
            ("eval.jsonl",),
            ("--log", "evaluate", "there"),
        ),
        Mistake(
            "a source of data that is not there",
            ("validate_data", "--source=hotpot", "--path=own"),
            ("hotpot",),
            ("hotpotqa",),
        ),
        Mistake(
            "a misspelt flag", ("train", "--confg=configs/hotpotqa.py"), ("confg",), ("--config",)
        ),
        Mistake("a misspelt command", ("trian",), ("trian",), ("train",)),
    ]


def make_files(folder: Path) -> None:
    """The files that the mistakes are made with."""
    right = {
        "question": "Where was the founder of Acme born?",
        "chunks": [
            "Acme was founded by Ada Berg.",
            "Ada Berg was born in Oslo.",
            "Oslo is a city.",
        ],
        "support": [0, 1],
        "answers": ["Oslo"],
    }
    renamed = {"query" if name == "question" else name: value for name, value in right.items()}
    beyond = right | {"support": [7]}
    (folder / "empty").mkdir()
    (folder / "file.txt").write_text("no folder\n")
    (folder / "own_reward.py").write_text(
        "def score(question, answers, taken, gold):\n    return 1\n"
    )
    for name, record in {"own": right, "renamed": renamed, "beyond": beyond}.items():
        (folder / name).mkdir()
        for split in ("train", "dev"):
            rows = [numbered(record, f"{split}-{number}") for number in range(8)]
            text = "\n".join(map(json.dumps, rows))
            (folder / name / f"{split}.jsonl").write_text(text + "\n")
    (folder / "broken").mkdir()
    for split in ("train", "dev"):
        (folder / "broken" / f"{split}.jsonl").write_text("question: Where?\n" * 8)


def numbered(record: dict[str, Any], number: str) -> dict[str, Any]:
    """The record about a firm of its own."""
    return json.loads(json.dumps(record | {"id": number}).replace("Acme", f"Acme {number}"))


def tried(mistake: Mistake, folder: Path) -> dict[str, Any]:
    """What a command says: `fault`, "" if that is as it should be, `sentence` and `seconds`."""
    module, *arguments = mistake.command
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    began = time.monotonic()
    try:
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", "qrag_jax", module, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"fault": f"no end within {_PATIENCE:.0f} s", "sentence": "", "seconds": _PATIENCE}
    told = (done.stdout + "\n" + done.stderr).strip()
    return {
        "fault": fault_of(mistake, done.returncode, told),
        "sentence": _last_line(told),
        "seconds": time.monotonic() - began,
    }


def _last_line(told: str) -> str:
    return told.splitlines()[-1] if told else ""


def fault_of(mistake: Mistake, status: int, told: str) -> str:
    """What is wrong with what a command said, and with its exit status; "": nothing."""
    sentence = _last_line(told)
    if not status:
        return "it ended with status 0"
    if "Traceback (most recent call last)" in told:
        return "it showed a traceback"
    if not sentence.startswith("error: "):
        return "its last line is no error"
    if len(sentence) > _LONGEST:
        return f"its sentence has {len(sentence)} characters"
    missing = [name for name in mistake.names if name not in sentence]
    if missing:
        return f"its sentence does not name {', '.join(missing)}"
    if not any(word in sentence for word in mistake.says):
        return "its sentence does not say what to do"
    return ""

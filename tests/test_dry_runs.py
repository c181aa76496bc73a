"""`--dry_run` of every command: it says what would be done, writes nothing, and refuses the same.

That of `train` is in test_train.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qrag_jax import __main__ as console
from tests.entry_points import ROOT, Commands, refusal
from tests.retrieval_logs import played_rows, write_log
from tests.systems.corpora import write_corpus_file

DONE = "dry run: nothing was written"
URL = "--llm.url=http://127.0.0.1:9/v1"  # nobody listens there, and nobody is asked


def files(*folders: Path) -> dict[Path, tuple[int, int]]:
    """All files and folders with their sizes and times."""
    found = [each for folder in folders for each in folder.rglob("*") if "forks-" not in str(each)]
    return {each: (each.stat().st_size, each.stat().st_mtime_ns) for each in found}


def told(commands: Commands, folder: Path, module: str, *arguments: str) -> str:
    """What a dry run says; it must leave `folder`, and the caches, as they are."""
    before = files(folder, commands.folder)
    lines = commands.succeed(module, *arguments, "--dry_run").splitlines()
    now = files(folder, commands.folder)
    assert now == before
    assert lines[-1] == DONE
    return "\n".join(lines[:-1])


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """With caches of their own: into the shared ones the tests beside these write, too."""
    made = Commands(tmp_path_factory.mktemp("dry") / "entry_points")
    yield made
    made.forks.stop()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "logs" / "eval.jsonl", played_rows(40, seed=0))


def test_every_command_that_writes_has_a_dry_run() -> None:
    for name in console.COMMANDS:
        text = (ROOT / "qrag_jax" / f"{name}.py").read_text()
        writes = name != "validate_data"
        assert bool(re.search(r"dry_run", text)) == writes, name


def test_filter_log(commands: Commands, log: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "short.jsonl"
    flags = (f"--log={log}", f"--out={out}", "--filter=retrieval_step")
    found = told(commands, tmp_path, "filter_log", *flags, "--steps=2")
    assert found == f"would filter 40 rows of {log} and write {out}"
    wrong = refusal(commands.run("filter_log", *flags, "--dry_run"))
    assert wrong == refusal(commands.run("filter_log", *flags))


def test_tune_stopping(commands: Commands, log: Path, tmp_path: Path) -> None:
    found = told(commands, tmp_path, "tune_stopping", f"--log={log}")
    assert "would tune a threshold on " in found
    assert f"write stopping.json and stopping.png into {log.parent}" in found
    flags = (f"--log={log}", "--budgets=0")
    wrong = refusal(commands.run("tune_stopping", *flags, "--dry_run"))
    assert wrong == refusal(commands.run("tune_stopping", *flags))


def test_answer(commands: Commands, log: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    flags = (f"--log={log}", f"--out={out}", URL, "--samples=7")
    found = told(commands, tmp_path, "answer", *flags, "--llm.model=small", "--judge")
    assert "would ask small at http://127.0.0.1:9/v1 7 of 7 questions of" in found
    assert "at most 14 requests" in found
    assert found.endswith(f"would write {out}, {out.with_name('answers.judge.jsonl')}")
    wrong = refusal(commands.run("answer", *flags, "--dry_run"))
    assert wrong == refusal(commands.run("answer", *flags))
    assert "--llm.model" in wrong


def test_show(commands: Commands, log: Path, tmp_path: Path) -> None:
    found = told(commands, tmp_path, "show", str(log))
    assert found == f"would write {log.parent / 'show.html'}: 1 run, 40 episodes."
    wrong = refusal(commands.run("show", str(tmp_path / "none"), "--dry_run"))
    assert wrong == refusal(commands.run("show", str(tmp_path / "none")))


def test_analyze(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lines = [{"step": step, "eval/em": step / 9, "train/loss": 1.0} for step in range(3)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    found = told(commands, tmp_path, "analyze", str(tmp_path / "run"))
    assert found.startswith(f"would write into {tmp_path / 'run' / 'analysis'}: 0 files of ")
    assert "1 learning curves" in found
    wrong = refusal(commands.run("analyze", str(tmp_path / "none"), "--dry_run"))
    assert wrong == refusal(commands.run("analyze", str(tmp_path / "none")))


def test_convert_data(commands: Commands, tmp_path: Path) -> None:
    row = {"question": "Who?", "chunks": ["Ada did.", "It rains."], "support": [0]}
    path, out = tmp_path / "own.jsonl", tmp_path / "out.jsonl"
    path.write_text(json.dumps(row) + "\n")
    flags = ("--source=own", f"--path={path}")
    found = told(commands, tmp_path, "convert_data", *flags, f"--out={out}")
    assert found.endswith(f"would write 1 records to {out}")
    wrong = refusal(commands.run("convert_data", *flags, f"--out={path}", "--dry_run"))
    assert wrong == refusal(commands.run("convert_data", *flags, f"--out={path}"))


def test_serve_llm(commands: Commands, tmp_path: Path) -> None:
    config = ("--config=configs/quickstart.py:tiny", f"--config.llm.server.python={sys.executable}")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    found = told(commands, tmp_path, "serve_llm", *config, f"--config.llm.server.model={model}")
    assert found == f"would serve {model} as model until it is told to stop"
    flags = (*config, "--config.llm.url=http://127.0.0.1:9/v1")
    wrong = refusal(commands.run("serve_llm", *flags, "--dry_run"))
    assert wrong == refusal(commands.run("serve_llm", *flags))


@pytest.mark.long
def test_index_search_and_serve_of_words(commands: Commands, tmp_path: Path) -> None:
    source, index = write_corpus_file(tmp_path / "corpus.jsonl", 20), tmp_path / "index"
    made = (f"--corpus={source}", f"--index={index}", "--engine=bm25")
    found = told(commands, tmp_path, "index", *made)
    assert found == f"would index {source} by its words, for the engine bm25, and write {index}"
    missing = (f"--corpus={tmp_path / 'none'}", *made[1:])
    wrong = refusal(commands.run("index", *missing, "--dry_run"))
    assert "does not exist" in wrong

    commands.succeed("index", *made)
    asked = (f"--index={index}", "--engine=bm25", "who wrote it?", "and when?")
    found = told(commands, tmp_path, "search", *asked)
    assert found == f"would search {index} for 2 questions and print what is found"
    wrong = refusal(commands.run("search", *asked, "--checkpoint=best", "--dry_run"))
    assert wrong == refusal(commands.run("search", *asked, "--checkpoint=best"))

    served = (f"--index={index}", "--engine=bm25", "--port=0")
    found = told(commands, tmp_path, "serve", *served)
    assert found.startswith(f"would serve {index} at http://127.0.0.1:")
    nowhere = (f"--index={tmp_path / 'none'}", *served[1:])
    refusal(commands.run("serve", *nowhere, "--dry_run"))


@pytest.mark.long
def test_evaluate_and_export_of_a_run(
    commands: Commands, finished_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run = f"--workdir={finished_run}"
    where = finished_run.parent
    found = told(commands, where, "evaluate", run, f"--out={out}", "--samples=5")
    assert "would play 5 questions step by step, by the untrained weights and by best-" in found
    assert not out.exists()
    wrong = refusal(commands.run("evaluate", run, "--sampled=2", "--dry_run"))
    assert wrong == refusal(commands.run("evaluate", run, "--sampled=2"))
    found = told(commands, where, "export", run, f"--out={out}", "--checkpoint=last")
    assert f"would write the towers state, chunk of last-24 into {out}" in found
    assert not out.exists()
    wrong = refusal(commands.run("export", run, f"--out={finished_run}", "--dry_run"))
    assert wrong == refusal(commands.run("export", run, f"--out={finished_run}"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "config", "said"),
    [
        ("filter_data", "configs/harr_grpo.py:tiny", "would play 64 training questions 8 times"),
        ("predict", "configs/rlvr.py:tiny", "would play "),
    ],
)
def test_commands_of_an_untrained_model(
    module: str, config: str, said: str, commands: Commands, tmp_path: Path
) -> None:
    flags = (f"--config={config}", f"--out={tmp_path / 'new.jsonl'}")
    assert said in told(commands, tmp_path, module, *flags)
    assert not list(tmp_path.iterdir())
    wrong = refusal(commands.run(module, flags[0], f"--out={tmp_path / 'new'}", "--dry_run"))
    assert wrong == refusal(commands.run(module, flags[0], f"--out={tmp_path / 'new'}"))


def test_sweep(commands: Commands, tmp_path: Path) -> None:
    out = tmp_path / "rates"
    flags = ("--config=configs/quickstart.py:tiny", f"--out={out}", "--seeds=1,2")
    found = told(commands, tmp_path, "sweep", *flags, "--set=train.steps=1,2")
    assert found.startswith(
        f"would train and score 4 runs of configs/quickstart.py:tiny into {out}"
    )
    wrong = refusal(commands.run("sweep", *flags, "--set=train.stpes=1", "--dry_run"))
    assert wrong == refusal(commands.run("sweep", *flags, "--set=train.stpes=1"))

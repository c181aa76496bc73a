"""Keys that a command reads are in no file, output or command line of it, whatever servers say."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.entry_points import SHARED, Commands, wait_until
from tests.llm.model_server import Call, ModelServer, Reply
from tests.llm.stand_in import StandIn, family, model_folder, running, stand_in

__all__ = ["model_folder", "stand_in"]
OURS = "OUR_LLM_KEY"
STEPS = 2
TRAINING = (
    *SHARED,
    *(f"--config.train.{name}={STEPS}" for name in ("steps", "eval_every")),
    "--config.reward.name=answer_f1",
    f"--config.llm.api_key_env={OURS}",
)


@pytest.fixture
def planted() -> dict[str, str]:
    """A key of its own for every variable that the code or a library of it reads."""
    of_api = (f"{name}_API_KEY" for name in ("NCBI", "QDRANT", "OPENAI", "VLLM"))
    names = (OURS, "HF_TOKEN", "MILVUS_TOKEN", *of_api)
    return {name: f"sk-{secrets.token_hex(16)}" for name in names}


@pytest.fixture
def environment(commands: Commands, planted: Mapping[str, str]) -> dict[str, str]:
    """That of a command: the keys, and a proxy with a password."""
    proxy = {"https_proxy": f"http://me:{planted['HF_TOKEN']}@127.0.0.1:9"}
    return {**commands.environment, **planted, **proxy}


def leaks(planted: Mapping[str, str], *places: Path, said: str = "") -> list[str]:
    """Where the keys are: in the names and bytes of files, and in what was said.

    Bytes that are compressed are not seen: those are arrays of numbers (Orbax).
    """
    assert all(place.is_dir() for place in places)
    files = [path for place in places for path in place.rglob("*")]
    texts = {str(path): path.read_bytes() if path.is_file() else b"" for path in files}
    texts["the output"] = said.encode()
    return [
        f"{name} in {place}"
        for name, key in planted.items()
        for place, text in texts.items()
        if key in place or key.encode() in text
    ]


def on_command_lines(planted: Mapping[str, str]) -> list[bytes]:
    """The command lines, of any process, that have a key."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            lines.append(path.read_bytes())
    return [line for line in lines if any(key.encode() in line for key in planted.values())]


def test_a_training_with_a_server_that_repeats_the_key(
    commands: Commands, planted: dict[str, str], environment: dict[str, str], tmp_path: Path
) -> None:
    """It repeats it in answers, which are kept in the cache, and in errors, which are shown."""
    lines: list[bytes] = []

    def repeats(call: Call) -> Reply:
        if not lines:
            lines.extend([*on_command_lines(planted), b"looked"])
        status = 200 if call.number % 2 else 401
        return Reply(f"Final answer: {dict(call.headers)}", status=status)

    workdir = tmp_path / "run"
    with ModelServer(repeats) as server:
        given = (f"--config.llm.url={server.url}", "--config.llm.model=tiny", "--verbosity=1")
        arguments = (*TRAINING, *given, f"--workdir={workdir}")
        ended = commands.run("train", *arguments, env=environment)
        sent = {call.headers["authorization"] for call in server.calls}
    assert sent == {f"Bearer {planted[OURS]}"}
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert lines == [b"looked"]
    (answers,) = workdir.rglob("*.sqlite")
    assert b"[the API key]" in answers.read_bytes()  # so what it repeated came this far
    cache = Path(environment["QRAG_CACHE"])
    assert leaks(planted, workdir, cache, said=ended.stdout + ended.stderr) == []


def test_a_training_with_a_server_of_its_own(
    commands: Commands,
    planted: dict[str, str],
    environment: dict[str, str],
    stand_in: StandIn,
    model_folder: Path,
    tmp_path: Path,
) -> None:
    workdir = tmp_path / "run"
    process = commands.start(
        "train",
        *TRAINING,
        f"--config.llm.server.model={model_folder}",
        f"--config.llm.server.python={stand_in.python}",
        "--config.llm.server.max_model_len=0",  # no budget: the folder has no tokenizer
        f"--workdir={workdir}",
        env=environment,
    )
    assert process.stdout is not None
    heard = ""
    for line in process.stdout:
        heard += line
        if "vLLM serves little" in line:
            break
    assert on_command_lines(planted) == []
    assert set(stand_in.pids()) & set(family(process.pid))  # so they were looked at
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    (start,) = stand_in.starts()
    # The server gets nothing that is secret.
    given = " ".join([*start["argv"], *start["env"].values()])
    assert leaks(planted, said=given) == []
    assert leaks(planted, workdir, said=heard + out + err) == []
    wait_until(lambda: not any(map(running, stand_in.pids())))

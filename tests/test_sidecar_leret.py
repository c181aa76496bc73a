"""LeReT's tries sampled by the real vLLM, on CPU: `make test-sidecar`.

The model is made by the run, and the server is the run's own. What is tested is that a run that is
killed in the middle of its tries goes on, and that no try is lost or made twice.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from qrag_jax.feedback.tries import Try
from qrag_jax.llm.outcomes import CAUSES
from tests.entry_points import Commands, losses
from tests.llm.server.test_sidecar import PYTHON, pytestmark
from tests.test_leret_commands import PAIRS, SCRIPT, SFT, TINY, in_the_tries

__all__ = ["pytestmark"]

SERVED = (
    "--config.iterations=1",
    "--config.model.lora.rank=4",
    "--config.sampling.engine=server",
    f"--config.llm.server.python={PYTHON}",
    "--config.llm.server.cpu_cache_gib=1",
    '--config.llm.server.arguments=("--enforce-eager",)',
)


def tries_of(path: Path) -> list[Try]:
    """The tries of a file, whose last line ends its last part."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert "part" in rows[-1]
    return [Try.from_json(row) for row in rows if "part" not in row]


def test_killed_in_the_middle_of_tries(commands: Commands, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    words = (*TINY, *SERVED, f"--workdir={workdir}")
    process = commands.start("train", *words)
    while not in_the_tries(workdir):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    path = workdir / "tries" / "iteration-1" / "hop-1.jsonl"
    kept = path.read_bytes()
    whole = kept[: kept.rindex(b'{"part"')] + kept[kept.rindex(b'{"part"') :].splitlines(True)[0]
    out = commands.succeed("train", *words)
    assert "are kept" in out
    assert path.read_bytes().startswith(whole)
    tries = tries_of(path)
    assert len(tries) == 8 * 2 * 4  # questions, prompts, draws
    assert len({each.key for each in tries}) == len(tries)
    assert {each.question for each in tries} == set(range(8))
    assert not any(each.outcome in CAUSES for each in tries)
    assert len(losses(workdir)) == SCRIPT + SFT + PAIRS

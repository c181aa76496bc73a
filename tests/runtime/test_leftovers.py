"""What killed processes left is deleted; what living ones use is not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from qrag_jax.runtime import leftovers

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_is_cleaned_of_what_is_half_made(tmp_path: Path) -> None:
    made = ["encoder", "checkpoints/last/4", "checkpoints/best/2"]
    half = [".encoder-1a2b", "checkpoints/last/8.orbax-checkpoint-tmp"]
    for name in (*made, *half):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".config.json.123.partial").write_text("{")
    told: list[str] = []
    leftovers.clean_run(tmp_path, told.append)
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {"config.json", *(f"{name}/file" for name in made)}
    assert len(told) == 3


PUBLISH = """
import pathlib, sys
from qrag_jax.llm.server.publish import Publisher
publisher = Publisher("http://127.0.0.1:1/v1", "m", folder=pathlib.Path(sys.argv[1]))
(publisher._folder / "model.safetensors").write_bytes(bytes(100))
print("made", flush=True)
sys.stdin.read()
"""


def test_weights_of_a_killed_process_are_deleted_and_no_others(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    processes = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", PUBLISH, str(memory)],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        processes.append((process, set(memory.iterdir())))
    (living, first), (killed, both) = processes
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert set(memory.iterdir()) == both
    (memory / "qrag-weights-not-ours").mkdir()  # without a lock: nobody knows whose it is
    told: list[str] = []
    leftovers.clean_weights(memory, told.append)
    assert set(memory.iterdir()) == first | {memory / "qrag-weights-not-ours"}
    assert len(told) == 1
    with leftovers.weights_folder(memory) as folder:
        leftovers.clean_weights(memory, told.append)
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    living.communicate(timeout=60)

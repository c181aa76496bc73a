"""The log of a vLLM server: the cause of a failure is told, not what follows from it alone."""

from pathlib import Path

from qrag_jax.llm.server.server_log import LAST_LINES, ServerLog

FOLLOWS = "RuntimeError: Engine core initialization failed. See root cause above."
CAUSE = "ValueError: Available memory on node 0 (8.01/23.54 GiB) is less than desired"
ENGINE = "(EngineCore pid=2) ERROR 11-26 09:10:07 [core.py:1510]"
LINES = [
    "(APIServer pid=1) WARNING 11-26 [utils.py:255] such as `OSError: [Errno 24] Too many`",
    f"{ENGINE} Traceback (most recent call last):",
    f"{ENGINE}     raise ValueError(",
    f"{ENGINE} {CAUSE}",
    *(f'  File "core.py", line {line}, in start' for line in range(3 * LAST_LINES)),
    "",
    FOLLOWS,
]


def log_of(path: Path, *lines: str) -> ServerLog:
    path.write_text("".join(f"{line}\n" for line in lines))
    return ServerLog(path)


def test_the_cause_is_told_beside_the_last_lines(tmp_path: Path) -> None:
    log = log_of(tmp_path / "vllm.log", *LINES)
    assert log.first_error() == CAUSE
    words = log.last_words()
    assert words.startswith(f"the first error in its log is {CAUSE}; the last lines of its log ")
    assert words.endswith(f"\n    {FOLLOWS}")
    assert words.count("\n") == LAST_LINES


def test_an_exception_of_a_module_at_the_beginning_of_a_line(tmp_path: Path) -> None:
    log = log_of(tmp_path / "vllm.log", "loading", "torch.cuda.OutOfMemoryError: out of memory")
    assert log.first_error() == "torch.cuda.OutOfMemoryError: out of memory"


def test_no_error_and_no_log(tmp_path: Path) -> None:
    log = log_of(tmp_path / "vllm.log", "one", "two")
    assert log.first_error() == ""
    assert log.last_words() == f"the last lines of its log {log.path}:\n    one\n    two"
    assert ServerLog(tmp_path / "none.log").tail(3) == []


def test_only_the_present_process_counts(tmp_path: Path) -> None:
    log = log_of(tmp_path / "vllm.log", *LINES)
    log.start = log.path.stat().st_size
    with log.path.open("a") as file:
        file.write("OSError: its own\n")
    assert log.first_error() == "OSError: its own"
    assert log.tail(2) == ["OSError: its own"]

"""The console script, wrong command lines, help, messages, and a wheel without a checkout."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qrag_jax import __main__ as console
from qrag_jax.errors import InputError
from qrag_jax.runtime import config_files
from qrag_jax.runtime.saved_config import flat
from qrag_jax.systems import q_rag_config
from tests.entry_points import ROOT, Commands, refusal

TINY = "--config=configs/hotpotqa.py:tiny"


def test_commands_are_listed_and_others_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, status in (([], 0), (["--help"], 0), (["--version"], 0), (["trian"], 2)):
        monkeypatch.setattr(sys, "argv", ["qrag", *words])
        assert console.main() == status
        out, err = capsys.readouterr()
        if words in ([], ["--help"]):
            assert {line.split()[0] for line in out.splitlines()[2:-2]} == {*console.COMMANDS}
    assert err.startswith("error: 'trian'")
    # The top of the package is their list.
    found = {path.stem for path in (ROOT / "qrag_jax").glob("*.py")}
    assert found == {*console.COMMANDS, "__init__", "__main__", "errors"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "configs/rlvr.py"),  # without an experiment all are listed
        (("--config.train.stpes=1",), "steps"),  # what is meant
        (("--config.train.steps=abc",), "config.train.steps"),
        (("--config=configs/hotpotqa.py:huge",), "huge"),
    ],
)
def test_a_wrong_command_line(
    words: tuple[str, ...], named: str, commands: Commands, tmp_path: Path
) -> None:
    config = [] if not words or words[0].startswith("--config=") else [TINY]
    workdir = tmp_path / "run"
    assert named in refusal(commands.run("train", *config, *words, f"--workdir={workdir}"))
    assert not workdir.exists()


def test_help_lists_flags_and_the_fields_of_the_experiment_with_a_comment(
    commands: Commands,
) -> None:
    out = commands.succeed("train", "--help", "--config=configs/harr_grpo.py:tiny")
    assert "--workdir" in out
    assert "grpo.members=4" in out
    assert "pqn." not in out
    assert "--workdir" in commands.succeed("evaluate", "--help")
    known = {name: comment for name, _, comment in q_rag_config.help_lines()}
    assert all(known.values())
    for name in ("hotpotqa", "niah", "published"):
        config = importlib.import_module(f"configs.{name}").get_config("tiny")
        for field in flat(config.to_dict()).keys() - {"system"}:
            assert re.sub(r"sources\.\w+\.weight", "sources.NAME.weight", field) in known


@pytest.mark.parametrize("mark", ["\r", "\x00", "\x1b", "\x7f"])
def test_marks_of_control_in_a_message_are_shown_and_not_obeyed(mark: str) -> None:
    text = str(InputError(f"the file{mark} is broken"))
    assert text == f"the file{repr(mark)[1:-1]} is broken"


def test_a_message_stays_as_it_is_unless_it_is_long() -> None:
    text = "data/train.jsonl, line 3: the field 'Übung' is 5 … ; give a text."
    assert str(pickle.loads(pickle.dumps(InputError(text)))) == text  # noqa: S301
    long = str(InputError(f"{'a' * 2499} {'y' * 1_000_000} {'b' * 999}"))
    assert len(long) < 4000
    assert (long[:2499], long[-999:]) == ("a" * 2499, "b" * 999)


def test_experiments_are_found_in_the_working_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = config_files.own_folder()
    assert own == ROOT / "configs"
    argv = ["train", TINY, "--config.path=configs/hotpotqa.py"]
    packaged = f"{own / 'hotpotqa.py'}:tiny"
    assert config_files.resolved(argv) == ["train", f"--config={packaged}", argv[2]]
    split = ["evaluate", "--eval_config", "configs/niah.py", "--x"]
    assert config_files.resolved(split) == [*split[:2], str(own / "niah.py"), "--x"]
    other = ["train", "--config=mine/hotpotqa.py"]
    assert config_files.resolved(other) == other
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "hotpotqa.py").touch()
    assert config_files.resolved(argv) == argv


def test_a_wheel_trains_where_there_is_no_checkout(tmp_path: Path, commands: Commands) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path)]
    subprocess.run([*pip, *build, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    install = ["install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([*pip, *install], check=True)
    empty.mkdir()
    environment = commands.environment
    path = [str(site), str(ROOT / "tests" / "without_torch")]

    def qrag(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(site / "bin" / "qrag"), *arguments],
            cwd=empty,
            env=environment | {"PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            text=True,
            check=False,
        )

    done = qrag(
        *("train", "--config=configs/quickstart.py:tiny", "--config.train.steps=1"),
        *("--config.encoder.length_buckets=1", "--config.encoder.block_sizes=1"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (empty / "runs" / "quickstart-tiny" / "checkpoints" / "last" / "1").is_dir()
    # An experiment of the user's own may build on the package's.
    (empty / "mine.py").write_text(
        "from configs import common\n"
        "def get_config():\n"
        "    config = common.get_config('hotpotqa')\n"
        "    config.train.steps = 0\n"
        "    return config\n"
    )
    done = qrag("train", "--config=mine.py")
    assert done.returncode == 2
    assert "config.train.steps" in done.stderr


def test_the_list_of_commands_may_be_cut_short(commands: Commands) -> None:
    """As by `qrag --help | head -1`: the reader is gone before the text is written."""
    for more in ("", "exec 1>&- 2>&-; "):
        done = subprocess.run(
            [
                "bash",
                "-c",
                f'set -o pipefail; {more}"$0" -m qrag_jax --help | true',
                sys.executable,
            ],
            cwd=ROOT,
            env=commands.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")

"""The console script, the help of commands, and a wheel that works where there is no checkout."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qrag_jax import __main__ as console
from qrag_jax import __version__
from qrag_jax.runtime import config_files
from qrag_jax.runtime.saved_config import flat
from qrag_jax.systems import q_rag_config, run_flags
from tests.entry_points import ROOT, Commands, refusal


def test_every_command_is_listed_and_is_a_module(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in ([], ["--help"], ["help"]):
        monkeypatch.setattr(sys, "argv", ["qrag", *arguments])
        assert console.main() == 0
        listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:-2]]
        assert listed == list(console.COMMANDS)
    for name in console.COMMANDS:
        text = (ROOT / "qrag_jax" / f"{name}.py").read_text()
        assert 'if __name__ == "__main__":' in text
        assert f"python -m qrag_jax.{name}" in text
    # The top of the package is their list.
    found = {path.stem for path in (ROOT / "qrag_jax").glob("*.py")}
    assert found == {*console.COMMANDS, "__init__", "__main__", "errors"}


def test_an_unknown_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["qrag", "trian"])
    assert console.main() == 2
    assert "'trian' is no command; use one of train, evaluate," in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["qrag", "--version"])
    assert console.main() == 0
    assert __version__ in capsys.readouterr().out


def test_without_an_experiment_all_are_listed(commands: Commands) -> None:
    listed = re.findall(r"configs/\w+\.py", refusal(commands.run("train")))
    assert {"configs/quickstart.py", "configs/hotpotqa.py", "configs/rlvr.py"} <= {*listed}


@pytest.mark.parametrize(("name", "model"), [("hotpotqa", "encoder"), ("rlvr", "model")])
def test_a_model_that_is_not_there_is_refused_before_the_data(
    name: str, model: str, commands: Commands, tmp_path: Path
) -> None:
    data = {"encoder": "data.path", "model": "questions.dev"}[model]
    nowhere = [f"--config.{data}={tmp_path / 'data'}", f"--config.{model}.path={tmp_path / model}"]
    told = commands.run(
        "train", f"--config=configs/{name}.py:tiny", *nowhere, f"--workdir={tmp_path / 'run'}"
    )
    assert str(tmp_path / model) in refusal(told)


def test_transformers_says_nothing_of_torch(commands: Commands) -> None:
    imports = "from qrag_jax.runtime.fast_tokenizer import auto_tokenizer; auto_tokenizer()"
    done = subprocess.run(
        [sys.executable, "-c", imports],
        env=commands.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "PyTorch" not in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_help_is_no_error(command: str, commands: Commands) -> None:
    told = commands.succeed(command, "--help")
    assert told.startswith("Trains a" if command == "train" else "Scores a")
    assert "--workdir: Folder of " in told
    assert "Traceback" not in told
    fields = "\n  optimizer.learning_rate=1.5e-05\n      lr_0, peak\n"
    assert (fields in told) == (command == "train")


def test_help_tells_the_fields_of_an_experiment() -> None:
    told = run_flags.fields_help(["--config=configs/babilong.py:qa2-tiny"])
    assert (
        "\n  data.sources.babilong.task='qa2'\n      qa1 to qa20; without story files qa1 to qa5\n"
        in told
    )
    assert "\n  optimizer.learning_rate=0.001\n      lr_0, peak\n" in told
    assert "\n  llm.max_tokens=256 (not read)\n" in told
    # Every field of every experiment is told, with a comment of its own.
    known = {name: comment for name, _, comment in q_rag_config.help_lines()}
    assert all(comment for name, comment in known.items())
    for name in ("hotpotqa", "niah", "published"):
        config = importlib.import_module(f"configs.{name}").get_config("tiny")
        fields = {
            re.sub(r"sources\.\w+\.weight", "sources.NAME.weight", f)
            for f in flat(config.to_dict())
        }
        assert fields - {"system"} <= known.keys()


def test_experiments_are_found_in_the_working_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = config_files.own_folder()
    assert own == ROOT / "configs"
    argv = ["train", "--config=configs/hotpotqa.py:tiny", "--config.path=configs/hotpotqa.py"]
    packaged = f"{own / 'hotpotqa.py'}:tiny"
    assert config_files.resolved(argv) == ["train", f"--config={packaged}", argv[2]]
    split = ["evaluate", "--eval_config", "configs/niah.py", "--x"]
    assert config_files.resolved(split) == [*split[:2], str(own / "niah.py"), "--x"]
    for other in ("configs/none.py", "mine/hotpotqa.py", "hotpotqa.py"):
        assert config_files.resolved(["train", f"--config={other}"])[1] == f"--config={other}"
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
    refused = qrag("train", "--config=mine.py")
    assert refused.returncode == 2
    assert "config.train.steps is 0; it must be at least 1." in refused.stderr


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

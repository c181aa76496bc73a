"""What a model folder of somebody else can bring into a run: files of known names, nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from configs import hotpotqa
from qrag_jax.errors import InputError
from qrag_jax.models.files.sentence_transformers import read_published
from qrag_jax.models.first_encoder import prepare_encoder
from qrag_jax.systems.q_rag_config import QRagConfig
from tests.support.small_models import read_tensors, write_small_model

PRIVATE = "machine example.org login me, which nobody else may read"
MODELS = "sentence_transformers.models"


@pytest.fixture(scope="module")
def small_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model("bert", tmp_path_factory.mktemp("bert"))


@pytest.fixture
def model(small_bert: Path, tmp_path: Path) -> Path:
    """A model unpacked in somebody's home folder."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    for name in (".netrc", "key.json", "config.json", "vocab.txt", ".ssh/config.json"):
        (home / name).write_text(PRIVATE)
    return Path(shutil.copytree(small_bert, home / "model"))


def write_modules(folder: Path, path: object, kind: str = "Normalize") -> None:
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{MODELS}.Transformer"}]
    entries.append({"idx": 1, "name": "1", "path": path, "type": f"{MODELS}.{kind}"})  # type: ignore[dict-item]
    (folder / "modules.json").write_text(json.dumps(entries))


def prepare(model: Path, workdir: Path) -> None:
    """What the training command does with `config.encoder.path`."""
    config = hotpotqa.get_config("tiny")
    config.encoder.path = str(model)
    prepare_encoder(QRagConfig.of(config).encoder, workdir, [], config.seed, is_kept=False)


def all_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def assert_refused(model: Path, tmp_path: Path, named: str) -> None:
    """One short line, and nothing from outside of the model's folder is in the run."""
    workdir = tmp_path / "run"
    with pytest.raises(InputError) as caught:
        prepare(model, workdir)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800
    assert names(workdir) == set()


OUTSIDE: list[object] = [
    *("..", ".", "../model", "a/../..", "1_Pooling/../..", "..\\..", "1_Pooling/", ".ssh", ""),
    *("checkpoints", "adapters", "config.json", "1_Normalize\0/../..", "\ud800", "/etc"),
    *("1_" + "x" * 300, None, 7, ["1_Pooling"]),
]


def test_modules_outside_of_the_folder_are_refused(model: Path, tmp_path: Path) -> None:
    for path in (*OUTSIDE, str(model.parent)):
        write_modules(model, path)
        assert_refused(model, tmp_path, "model/modules.json: the path")
    for kind in ("Pooling", "Dense", "LSTM"):  # read by the same rule
        for path in ("../.ssh", ""):
            write_modules(model, path, kind)
            with pytest.raises(InputError, match=rf'modules\.json: the path "{path}"'):
                read_published(model)


def test_links_out_of_the_folder_are_not_followed(model: Path, tmp_path: Path) -> None:
    home = model.parent
    for name in ("chat_template.jinja", "vocab.txt", "config.json", "model.safetensors"):
        whole = (model / name).read_bytes() if (model / name).exists() else None
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(home / ".netrc")
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
    assert PRIVATE.encode() not in all_bytes(tmp_path / "run")
    kept = names(encoder)
    assert {"config.json", "modules.json", "1_Normalize/config.json", "model.safetensors"} <= kept
    assert not [name for name in kept if "netrc" in name or "run.py" in name or "notes" in name]


def test_links_of_the_hubs_cache_are_followed(small_bert: Path, tmp_path: Path) -> None:
    """Its files are links into the blobs of the same model; links elsewhere are still refused."""
    cache = tmp_path / "hub" / "models--org--name"
    snapshot = cache / "snapshots" / "0123abcd"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    write_modules(snapshot, "1_Normalize")
    (snapshot / "modules.json").rename(cache / "blobs" / "m")
    (snapshot / "modules.json").symlink_to("../../blobs/m")
    (cache / "blobs" / "n").write_text("{}")
    (snapshot / "1_Normalize").mkdir()
    (snapshot / "1_Normalize" / "config.json").symlink_to("../../../blobs/n")
    for number, file in enumerate(sorted(small_bert.iterdir())):
        shutil.copyfile(file, cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
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


SHARDS: list[object] = [
    *("../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "..", "", "a\\x.safetensors"),
    *("\0.safetensors", "\ud800.safetensors", ".x.safetensors", "x.bin", 5, None),
    *("x" * 300 + ".safetensors", "é" * 140 + ".safetensors"),  # too long for a file's name
]


def test_shards_have_plain_names(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for shard in SHARDS:
        index.write_text(json.dumps({"weight_map": {"f": shard}}))
        with pytest.raises(InputError, match=r"index\.json: .*weight_map") as caught:
            read_tensors(tmp_path)
        assert len(str(caught.value)) < 500

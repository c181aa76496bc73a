"""Folders go to a hub on this machine with the real client; every refusal is one sentence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.entry_points import ROOT
from tests.hub_server import OWNER_KEY, Hub, running

pytest.importorskip("huggingface_hub")

OTHER_KEY = "hf_ofSomebodyElse"
FILES = {"README.md": b"card\n", "state/model.safetensors": b"state", "chunk/config.json": b"{}\n"}
# The client reads its settings when it is imported, so each push is a process.
CODE = """
import sys
from pathlib import Path
if "--without" in sys.argv:
    sys.modules["huggingface_hub"] = None
from qrag_jax.errors import InputError
from qrag_jax.models.files.hub_push import HubTarget
try:
    target = HubTarget.of(sys.argv[1], private="--private" in sys.argv)
    print(target)
    print(target.push(Path(sys.argv[2]), "the message"))
except InputError as error:
    print(f"refused: {error}")
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "out"


def pushed(folder: Path, name: str, *words: str, **environment: str) -> str:
    """What a push prints; it has no login of this machine, and the token is never in it."""
    own = {
        "HF_HOME": str(folder.parent / "hf"),
        "HF_HUB_DISABLE_XET": "1",  # plain uploads of large files, which the hub here takes
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
        "HF_TOKEN": OWNER_KEY,
    }
    result = subprocess.run(
        [sys.executable, "-c", CODE, name, str(folder), *words],
        cwd=ROOT,
        env=os.environ | own | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    key = environment.get("HF_TOKEN", OWNER_KEY).strip()
    assert not key or key not in result.stdout + result.stderr
    return result.stdout


def test_a_folder_becomes_one_commit(hub: Hub, folder: Path) -> None:
    told = pushed(folder, "me/model", HF_ENDPOINT=hub.url)
    assert told.splitlines()[-1] == f"{hub.url}/me/model"
    assert hub.files == FILES
    assert hub.message == "the message"
    assert sum("/commit/" in line for line in hub.asked) == 1
    assert hub.made is not None
    assert "visibility" not in hub.made  # as the owner's account has it

    # Again: what an older export left in the towers' folders goes, other files stay.
    hub.files |= {"state/model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"}
    pushed(folder, "me/model", HF_ENDPOINT=hub.url)
    assert hub.files == FILES | {"notes.txt": b"mine"}


def test_private_repositories(hub: Hub, folder: Path) -> None:
    pushed(folder, "me/model", "--private", HF_ENDPOINT=hub.url)
    assert hub.made is not None
    assert hub.made["visibility"] == "private"
    assert hub.files == FILES
    hub.made, hub.files = {"organization": "me", "name": "model"}, {}
    told = pushed(folder, "me/model", "--private", HF_ENDPOINT=hub.url)
    assert "refused: --push=me/model: the repository is public already, but --private" in told
    assert hub.files == {}


def test_the_token_of_a_login_is_used(hub: Hub, folder: Path) -> None:
    (folder.parent / "hf").mkdir()
    (folder.parent / "hf" / "token").write_text(OWNER_KEY + "\n")
    pushed(folder, "me/model", HF_ENDPOINT=hub.url, HF_TOKEN="")
    assert hub.files == FILES


@pytest.mark.parametrize("name", ["model", "a/b/c", "/x", "me/", "me/-x", "me/a b", "me/a--b", ""])
def test_names_of_no_repository_are_refused(name: str, hub: Hub, folder: Path) -> None:
    told = pushed(folder, name, HF_ENDPOINT=hub.url)
    assert told.startswith(f"refused: --push={name} is not the name of a repository; give OWNER/NA")
    assert hub.asked == []


def test_a_missing_library_or_token_is_refused(hub: Hub, folder: Path) -> None:
    told = pushed(folder, "me/model", "--without", HF_ENDPOINT=hub.url)
    assert told == (
        "refused: --push=me/model needs huggingface_hub, which is not installed; pip install "
        "qrag_jax[hub], or leave --push out.\n"
    )
    told = pushed(folder, "me/model", HF_ENDPOINT=hub.url, HF_TOKEN="")
    assert told == (
        "refused: --push=me/model needs a token that may write there; set HF_TOKEN, or log in with "
        "`hf auth login`.\n"
    )
    assert hub.asked == []


def refused_by_hub(told: str, folder: Path) -> str:
    *_, line = told.splitlines()
    assert line.startswith(f"refused: --push=me/model: the hub did not take {folder} (")
    assert line.endswith(f"push it later with `hf upload me/model {folder}`.")
    return line


def test_a_hub_that_refuses_or_is_not_there(hub: Hub, folder: Path) -> None:
    told = pushed(folder, "me/model", HF_ENDPOINT=hub.url, HF_TOKEN=OTHER_KEY)
    assert "401" in refused_by_hub(told, folder)
    assert hub.made is None
    hub.refuse = (403, f"the token {OWNER_KEY} may not write")
    told = pushed(folder, "me/model", HF_ENDPOINT=hub.url)
    assert "403" in refused_by_hub(told, folder)
    assert hub.files == {}
    told = pushed(folder, "me/model", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert "offline" in refused_by_hub(told, folder).lower()
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        told = pushed(folder, "me/model", HF_ENDPOINT=nowhere)
    assert "Connect" in refused_by_hub(told, folder)

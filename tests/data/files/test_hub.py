"""The hub: what is said where it cannot be used. No test here touches the network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qrag_jax.data.files.hub import load_hub
from qrag_jax.data.sources.registry import SOURCES, load_samples
from qrag_jax.errors import InputError
from tests.data.real_data import ROOT


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError) as caught:
        load_hub("hotpotqa/hotpot_qa", "distractor", "validation")
    text = str(caught.value)
    assert "pip install 'qrag_jax[hub]'" in text
    assert "data.path" in text
    assert caught.value.__suppress_context__
    with pytest.raises(InputError, match="dgslibisey/MuSiQue"):
        load_samples("musique", "", "dev")


def test_unreachable_hub_is_one_sentence(tmp_path: Path) -> None:
    # A process of its own: both packages read these variables once, when they are imported.
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    code = (
        "from qrag_jax.data.sources.registry import load_samples\n"
        "from qrag_jax.errors import InputError\n"
        "try: load_samples('musique', '', 'dev')\n"
        "except InputError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "could not be had from the hub" in done.stdout
    assert "data.path" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_records_of_a_local_repository(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"id": "a", "n": [1, 2]}\n{"id": "b", "n": []}\n')
    assert list(load_hub(str(tmp_path), None, "train")) == [
        {"id": "a", "n": [1, 2]},
        {"id": "b", "n": []},
    ]


@pytest.mark.parametrize("source", [name for name in SOURCES if name not in ("niah", "own")])
def test_every_source_names_its_hub_splits(source: str) -> None:
    repo, _, splits = SOURCES[source].HUB or ("", None, {})
    assert repo.count("/") == 1
    assert splits == {"train": "train", "dev": "validation"}


def test_needles_are_on_no_hub() -> None:
    with pytest.raises(InputError, match="'niah'"):
        load_samples("niah", "", "dev")

"""What a card shows of paths: names, but no folder of the training machine."""

from __future__ import annotations

import pytest

from qrag_jax.systems.card_metadata import without_folders


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/home/me/data/hotpotqa", "hotpotqa"),
        ("~/data/2wiki,2wiki,train", "2wiki,2wiki,train"),
        ("/a/scifact,train;/b/c/nfcorpus,dev", "scifact,train;nfcorpus,dev"),
        (
            "/a/rows.jsonl,x,train[:9];~/b/rows.jsonl,y,dev",
            "rows.jsonl,x,train[:9];rows.jsonl,y,dev",
        ),
        ("id=/a/b,other=/c/d", "id=b,other=d"),
        ("/home/me/scifact/,train", "scifact/,train"),
        ("runs/one", "runs/one"),
        ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B"),
        ("https://127.0.0.1/v1", "https://127.0.0.1/v1"),
        ("f1 and/or em", "f1 and/or em"),
        ("", ""),
    ],
)
def test_folders_are_cut(given: str, shown: str) -> None:
    assert without_folders(given) == shown


def test_at_any_depth() -> None:
    given = {"a": {"b": ("/x/y", 3)}, "c": [{"d": "~/x/y"}, None, True], "e": 0.5}
    shown = {"a": {"b": ("y", 3)}, "c": [{"d": "y"}, None, True], "e": 0.5}
    assert without_folders(given) == shown

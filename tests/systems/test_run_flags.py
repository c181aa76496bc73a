"""Fields of several values on the command line."""

from __future__ import annotations

import pytest

from qrag_jax.errors import InputError
from qrag_jax.systems.run_flags import experiment_of


def stages(words: str) -> object:
    return experiment_of(["--config=configs/rlvr.py:tiny", f"--config.stages={words}"]).stages


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("sft,grpo", ("sft", "grpo")),
        ("sft, grpo", ("sft", "grpo")),
        ("grpo", ("grpo",)),
        ("('sft', 'grpo')", ("sft", "grpo")),
        ("('sft,grpo',)", ("sft,grpo",)),
        ("()", ()),
        ("1,2", (1, 2)),
    ],
)
def test_names_with_commas_between(words: str, read: tuple[object, ...]) -> None:
    assert stages(words) == read


def test_measures_have_their_cuts() -> None:
    words = ("--config=configs/deepretrieval.py:tiny", "--config.eval.measures=ndcg@10,rr@10")
    assert experiment_of(words).eval.measures == ("ndcg@10", "rr@10")


def test_other_texts_with_commas_are_not_taken_apart() -> None:
    assert stages("a/b,c") == ("a/b,c",)
    with pytest.raises(InputError, match=r"insert quotes around each element"):
        stages("--a=b,c")

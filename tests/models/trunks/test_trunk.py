"""Sizes in a `config.json`, which all families read by the same rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.models.trunks.bert import BertConfig
from qrag_jax.models.trunks.gte import GteConfig
from qrag_jax.models.trunks.modernbert import ModernBertConfig
from qrag_jax.models.trunks.mpnet import MpnetConfig
from qrag_jax.models.trunks.nomic_bert import NomicBertConfig
from qrag_jax.models.trunks.qwen3 import Qwen3Config
from qrag_jax.models.trunks.xlm_roberta import XlmRobertaConfig

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}
FAMILIES = {
    "bert": (BertConfig, {}),
    "xlm-roberta": (XlmRobertaConfig, {}),
    "new": (GteConfig, {}),
    "modernbert": (ModernBertConfig, {}),
    "mpnet": (MpnetConfig, {}),
    "nomic_bert": (NomicBertConfig, {}),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 2, "head_dim": 8}),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def read(family: str, **changes: Any) -> Any:
    cls, more = FAMILIES[family]
    fields = {"model_type": family} | SIZES | more | changes
    return cls.from_dict({name: v for name, v in fields.items() if v != "absent"}, "config.json")


def refusal(family: str, **changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(family, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@every_family
def test_sizes_are_read(family: str) -> None:
    found = dataclasses.asdict(read(family))
    assert {name: found[name] for name in SIZES} == SIZES


@every_family
def test_missing_sizes_are_named(family: str) -> None:
    told = refusal(family, hidden_size="absent", num_attention_heads=None)
    assert told == "config.json: the fields hidden_size, num_attention_heads are missing."


@every_family
@pytest.mark.parametrize("value", [0, -2, 2.5, "4", True])
def test_a_number_that_is_no_size_is_named(family: str, value: object) -> None:
    _, more = FAMILIES[family]
    for name in (*SIZES, *more, "max_position_embeddings"):
        told = refusal(family, **{name: value})
        assert told.startswith(f"config.json: {name} is {value!r}; it must be a whole number")


@every_family
@pytest.mark.parametrize("heads", [3, 5, 32])
def test_heads_that_do_not_share_the_width(family: str, heads: int) -> None:
    if family == "qwen3":  # its heads have a width of their own
        name = "num_key_value_heads"
        told = refusal(family, num_key_value_heads=heads)
    else:
        plain = family in ("bert", "xlm-roberta", "mpnet")
        name = "num_attention_heads" if plain else f"{heads} heads"
        told = refusal(family, num_attention_heads=heads)
    assert told.startswith("config.json: ")
    assert name in told

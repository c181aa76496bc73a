"""The fields `--llm.FIELD` of `qrag answer`."""

from __future__ import annotations

import dataclasses

import ml_collections
from ml_collections import config_dict

from qrag_jax.llm.config import ClientConfig
from qrag_jax.runtime.config_fields import fields_of


def answer_settings() -> ml_collections.ConfigDict:
    """The fields of `--llm.FIELD=VALUE`: those of `ClientConfig`, and how texts are drawn."""
    config = config_dict.ConfigDict(
        {
            "temperature": 0.0,
            "max_tokens": 256,
            "top_p": config_dict.placeholder(float),
            "seed": config_dict.placeholder(int),
            "enable_thinking": config_dict.placeholder(bool),
            "max_prompt_tokens": 0,
            "tokenizer": "",
        }
    )
    for field in fields_of(ClientConfig):
        given = field.default is not dataclasses.MISSING
        default = field.default if given else ""
        config[field.name] = config_dict.placeholder(float) if default is None else default
    return config

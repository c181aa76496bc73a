"""Every field of every system's config refuses what it cannot mean, and the message names it.

The fields and their types are those of the smallest config of each system. A config with a wrong
value comes as it would from a run's folder: `ConfigDict` itself refuses other types only if a value
is replaced.
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from ml_collections import ConfigDict

from qrag_jax import systems
from qrag_jax.errors import InputError, Rule
from qrag_jax.runtime.config_fields import flat, kinds_of, typed_fields
from qrag_jax.systems import run_flags

LLM = {"llm.url": "http://127.0.0.1:9/v1", "llm.model": "any"}


class Case(NamedTuple):
    """A config file and variant, and fields by which more of its sections are read."""

    config: str
    fields: Mapping[str, Any] = {}


CASES = {
    "q_rag": Case("hotpotqa:tiny", {"stages": ("imitate", "pqn")}),
    "q_rag, answers by a model": Case("hotpotqa:tiny", {"reward.name": "answer_em"} | LLM),
    "harr, grpo": Case("harr_grpo:tiny"),
    "harr, ppo": Case("harr_ppo:tiny"),
    "rlvr": Case("rlvr:tiny"),
    "rlvr, a server samples": Case("rlvr:tiny", {"sampling.engine": "server"}),
    "leret": Case("leret:tiny"),
    "deepretrieval": Case("deepretrieval:tiny"),
}
OF_TYPE: dict[type, tuple[Any, ...]] = {
    bool: ("yes",),
    int: ("many", 1.5),
    float: ("much", math.nan),
    str: (7, None),
    tuple: (7,),
}
# Values of each type, some of which break a field's rules.
OUTSIDE: dict[type, tuple[Any, ...]] = {
    int: (-(10**9), 10**9),
    float: (-1e9, 0.0, 1e9, math.inf),
    str: ("none such", "", "/", "\n", "x" * 101),
    tuple: (("none such",), ()),
}
# Any whole number means something here, or what it must be depends on machine or data.
ANY_NUMBER = re.compile(r"(^|[._])seed$|^runtime\.")
ANY_TYPE = re.compile(r"lora\.targets$")  # one name or several


def values(case: Case) -> dict[str, Any]:
    """The config's fields as nested dictionaries."""
    return copy.deepcopy(_values(case.config, tuple(case.fields.items())))


@functools.cache
def _values(name: str, fields: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    file, _, variant = name.partition(":")
    config = importlib.import_module(f"configs.{file}").get_config(variant).unlock()
    config.update_from_flattened_dict(dict(fields))
    return config.to_dict()


def read_fields(case: Case) -> dict[str, Any]:
    """The fields that a training with this config reads."""
    fields = flat(values(case))
    unread = type_of(case).unread(fields)
    return {
        name: value
        for name, value in fields.items()
        if name != "system" and not any(f"{name}.".startswith(f"{part}.") for part in unread)
    }


def new_fields(name: str) -> dict[str, Any]:
    """Those that no earlier case of the same system reads: their rules are the same."""
    earlier = [CASES[other] for other in [*CASES][: [*CASES].index(name)]]
    same = [case for case in earlier if type_of(case) is type_of(CASES[name])]
    known = {field for case in same for field in read_fields(case)}
    return {k: v for k, v in read_fields(CASES[name]).items() if k not in known}


def refusal(case: Case, field: str, value: Any) -> str:
    """What `check` says of the config with this value; "" if it is taken."""
    changed = section = values(case)
    *path, last = field.split(".")
    for name in path:
        section = section[name]
    section[last] = value
    try:
        systems.check(ConfigDict(changed))
    except InputError as error:
        return str(error)
    return ""


def names_it(message: str, field: str) -> bool:
    """Whether a message is one sentence of one line with the field's name."""
    plain = "\n" not in message and "object at 0x" not in message and "Traceback" not in message
    return plain and message.rstrip().endswith((".", "…")) and field.split(".")[-1] in message


@pytest.mark.parametrize("name", CASES)
def test_a_value_of_another_type(name: str) -> None:
    systems.check(ConfigDict(values(CASES[name])))  # which is taken itself
    wrong = []
    for field, value in new_fields(name).items():
        for other in OF_TYPE.get(type(value), ()):
            message = refusal(CASES[name], field, other)
            if not ANY_TYPE.search(field) and not names_it(message, field):
                wrong.append(f"{field} = {other!r}: {message or 'taken'}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", CASES)
def test_a_value_against_a_rule(name: str) -> None:
    """Every rule refuses something of the field's type; every whole number is checked."""
    wrong, rules = [], rules_of(type_of(CASES[name]))
    for field, value in new_fields(name).items():
        if field not in rules and (type(value) is not int or ANY_NUMBER.search(field)):
            continue
        broken = [
            other
            for other in OUTSIDE.get(type(value), ())
            if field not in rules or not all(rule.holds(other) for rule in rules[field])
        ]
        assert broken or value is None, field
        for other in broken:
            message = refusal(CASES[name], field, other)
            if not names_it(message, field):
                wrong.append(f"{field} = {other!r}: {message or 'taken'}")
    assert not wrong, "\n".join(wrong)


def type_of(case: Case) -> Any:
    system = values(case)["system"]
    return importlib.import_module(f"qrag_jax.systems.{system}.config").CONFIG


def rules_of(settings: Any, place: str = "") -> dict[str, list[Rule]]:
    """The rules of all fields, by their names with dots."""
    every: dict[str, list[Rule]] = {}
    for field, kind, nested in typed_fields(settings):
        rules = [rule for part in kinds_of(kind) for rule in getattr(part, "__metadata__", ())]
        if nested is not None:
            every |= rules_of(nested, f"{place}{field.name}.")
        elif rules:
            every[f"{place}{field.name}"] = rules
    return every


@pytest.mark.parametrize("name", CASES)
def test_an_unknown_field_in_each_section(name: str) -> None:
    for section, value in [("", None), *values(CASES[name]).items()]:
        if section == "" or isinstance(value, dict):
            field = f"{section}.no_such_field".lstrip(".")
            # A section that nothing reads may hold anything.
            if section and not any(f.startswith(f"{section}.") for f in read_fields(CASES[name])):
                continue
            assert names_it(refusal(CASES[name], field, 1), field), field


def test_words_of_the_command_line_that_a_run_does_not_read() -> None:
    unread = ["--config.agent.path=a.py:f", "--config.ppo.kl=1"]
    words = ["--config=x.py", unread[0], "--config.train.steps=3", "--out=y", unread[1]]
    assert run_flags.unread_words(words, ConfigDict(values(CASES["harr, grpo"]))) == unread

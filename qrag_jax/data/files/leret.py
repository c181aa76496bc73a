"""Reads and writes the files of LeReT (github.com/sher222/LeReT), as JSON with a schema version.

Preferences: prompt → {"responses": [text], "pairs": [[winner, loser]], "sft_target": text}; winner
and loser are places in `responses`. LeReT's trainer refuses other keys.

Records of tries, a list of objects:

    {"example_id": …, "question": text, "answer": [title of a gold page],
     "hop1": {"search_query": text, "score": {"em": number, "ap": number},
              "retrieved": [{"long_text": "title | text", "score": number}]},
     "hop2": …, "full_retrieved": [the pool after the last hop]}

`em` is the recall of the pool. Two keys are there at times: "model", the number of the prompt, and
"context", the pool before the last hop.

LeReT's own files have no version, and its trainer takes each key of the file for a prompt, so one
more key would be one more prompt. Ours wrap the whole: {"schema": name and version, "states": …} or
{"schema": …, "records": …}. `bare` writes LeReT's own form; both forms are read. What is written
and read again is the same, to the last bit.

LeReT writes its bootstrapped programs as Python, not JSON, and evaluates them. They are refused.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.data.files import strict_json
from qrag_jax.data.files.strict_json import check_keys, list_of, number_of, shown, text_of, texts_of
from qrag_jax.errors import InputError
from qrag_jax.runtime.whole_files import write_whole

PREFERENCES, RECORDS = "qrag_jax.leret.preferences.1", "qrag_jax.leret.records.1"
_KEYS = ("responses", "pairs", "sft_target")
_RECORD_KEYS = ("example_id", "question", "answer", "full_retrieved")
_AT_TIMES = ("model", "context")
_HOP = re.compile(r"hop([1-9][0-9]{0,5})")


@dataclasses.dataclass(frozen=True, slots=True)
class Preference:
    """What is preferred at one state.

    Attributes:
        responses: queries.
        pairs: (winner, loser), places in `responses`.
        sft_target: the query to imitate.
    """

    responses: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    sft_target: str


class Retrieved(NamedTuple):
    """A passage that was found.

    Attributes:
        long_text: "title | text".
        score: of the search.
    """

    long_text: str
    score: float


@dataclasses.dataclass(frozen=True, slots=True)
class HopRecord:
    """One hop of a record.

    Attributes:
        search_query: the query.
        em: recall of the pool after the hop.
        ap: average precision of this pool.
        retrieved: what the query found, best first.
    """

    search_query: str
    em: float
    ap: float
    retrieved: tuple[Retrieved, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TryRecord:
    """A try, with the hops that led to it.

    Attributes:
        example_id: of the question in its data set.
        question: its text.
        answer: titles of the gold pages.
        hops: number of the hop, from 1 → the hop, in their order.
        full_retrieved: the pool after the last hop.
        model: number of the prompt that asked at the last hop; None: not told.
        context: the pool before the last hop; None: not told.
    """

    example_id: str | int
    question: str
    answer: tuple[str, ...]
    hops: Mapping[int, HopRecord]
    full_retrieved: tuple[Retrieved, ...]
    model: int | None = None
    context: tuple[Retrieved, ...] | None = None


def long_text(title: str, text: str) -> str:
    """A passage as LeReT has it; a "|" in the title, which would end it, becomes a blank."""
    return f"{title.replace('|', ' ')} | {text}"


def write_preferences(path: Path, states: Mapping[str, Preference], *, bare: bool = False) -> None:
    """Writes preferences; the file appears whole or not at all.

    Args:
        states: by the text of the prompt.
        bare: without a version, for LeReT's own trainer.

    Raises:
        InputError: a state is not as it should be.
        OSError: the file cannot be written.
    """
    content = {prompt: dataclasses.asdict(each) for prompt, each in states.items()}
    text = strict_json.dumps(content if bare else {"schema": PREFERENCES, "states": content})
    _preferences(path, json.loads(text), None)
    write_whole(path, text)


def read_preferences(
    path: Path, of_template: Callable[[str], bool] | None = None
) -> dict[str, Preference]:
    """The states of a file, ours or LeReT's, by the text of the prompt.

    Args:
        of_template: whether a prompt was made by the template that is trained on; None: not asked.

    Raises:
        InputError: the file is missing, or is not such a file; the message names the state by its
            number in the file, from 1.
    """
    return _preferences(path, strict_json.load(path), of_template)


def write_records(path: Path, records: Sequence[TryRecord], *, bare: bool = False) -> None:
    """Writes records of tries; the file appears whole or not at all.

    Args:
        bare: without a version, as LeReT has it.

    Raises:
        InputError: a record is not as it should be.
        ValueError: a score is not finite.
        OSError: the file cannot be written.
    """
    content = [_record_to_json(each) for each in records]
    text = strict_json.dumps(content if bare else {"schema": RECORDS, "records": content})
    _records(path, json.loads(text))
    write_whole(path, text)


def read_records(path: Path) -> list[TryRecord]:
    """The records of a file, ours or LeReT's.

    Raises:
        InputError: the file is missing, or is not such a file; the message names the record by its
            number in the file, from 1.
    """
    return _records(path, strict_json.load(path))


# ---------------------------------------------------------------- preferences


def _preferences(
    path: Path, content: Any, of_template: Callable[[str], bool] | None
) -> dict[str, Preference]:
    states = _unwrapped(path, content, PREFERENCES, "states")
    if not isinstance(states, dict):
        raise InputError(f"{path} holds no object from prompts to preferences; write one.")
    found = {}
    for number, (prompt, value) in enumerate(states.items(), 1):
        place = f"{path}, state {number},"
        found[prompt] = _preference(place, value)
        if of_template is not None and not of_template(prompt):
            raise InputError(
                f"{place} has a prompt of another template, {shown(prompt)}; sample the tries "
                "again with the prompt of this run, or name that prompt in the config."
            )
    return found


def _preference(place: str, value: Any) -> Preference:
    check_keys(place, value, _KEYS)
    responses = texts_of(place, value, "responses")
    target = text_of(place, value, "sft_target")
    pairs = []
    for pair in list_of(place, value, "pairs"):
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(n) is int for n in pair):
            raise InputError(
                f"{place} has the pair {shown(pair)}; write the places of winner and loser."
            )
        winner, loser = pair
        for each in pair:
            if not 0 <= each < len(responses):
                raise InputError(
                    f"{place} has the pair {shown(pair)} and {len(responses)} responses; a place "
                    "is 0 at least and below their number."
                )
        if winner == loser:
            raise InputError(
                f"{place} has the pair {shown(pair)}, whose winner is its loser; drop it."
            )
        pairs.append((winner, loser))
    return Preference(responses, tuple(pairs), target)


# ---------------------------------------------------------------- records


def _record_to_json(record: TryRecord) -> dict[str, Any]:
    told: dict[str, Any] = {
        "example_id": record.example_id,
        "question": record.question,
        "answer": list(record.answer),
    }
    if record.context is not None:
        told["context"] = [each._asdict() for each in record.context]
    for number, hop in record.hops.items():
        told[f"hop{number}"] = {
            "search_query": hop.search_query,
            "score": {"em": hop.em, "ap": hop.ap},
            "retrieved": [each._asdict() for each in hop.retrieved],
        }
    told["full_retrieved"] = [each._asdict() for each in record.full_retrieved]
    return told if record.model is None else told | {"model": record.model}


def _records(path: Path, content: Any) -> list[TryRecord]:
    records = _unwrapped(path, content, RECORDS, "records")
    if not isinstance(records, list):
        raise InputError(f"{path} holds no list of records; write one.")
    return [_record(f"{path}, record {number},", each) for number, each in enumerate(records, 1)]


def _record(place: str, value: Any) -> TryRecord:
    keys = value if isinstance(value, dict) else ()
    hops = {int(found[1]): key for key in keys if (found := _HOP.fullmatch(key))}
    check_keys(place, value, (*_RECORD_KEYS, *hops.values()), _AT_TIMES)
    if not hops:
        raise InputError(f"{place} has no hop; write one at least, as hop1.")
    if type(value["example_id"]) not in (str, int):
        raise InputError(f"{place} has an example_id that is no text and no number; write one.")
    if type(value.get("model", 0)) is not int:
        raise InputError(f"{place} has a model that is no whole number; write the prompt's.")
    return TryRecord(
        example_id=value["example_id"],
        question=text_of(place, value, "question"),
        answer=texts_of(place, value, "answer"),
        hops={n: _hop(f"{place[:-1]}, {hops[n]},", value[hops[n]]) for n in sorted(hops)},
        full_retrieved=_passages(place, value, "full_retrieved"),
        model=value.get("model"),
        context=_passages(place, value, "context") if "context" in value else None,
    )


def _hop(place: str, value: Any) -> HopRecord:
    check_keys(place, value, ("search_query", "score", "retrieved"))
    score = value["score"]
    check_keys(f"{place} score", score, ("em", "ap"))
    return HopRecord(
        search_query=text_of(place, value, "search_query"),
        em=number_of(place, score, "em"),
        ap=number_of(place, score, "ap"),
        retrieved=_passages(place, value, "retrieved"),
    )


def _passages(place: str, value: Mapping[str, Any], name: str) -> tuple[Retrieved, ...]:
    found = []
    for each in list_of(place, value, name):
        check_keys(f"{place} {name}", each, Retrieved._fields)
        found.append(Retrieved(text_of(place, each, "long_text"), number_of(place, each, "score")))
    return tuple(found)


# ---------------------------------------------------------------- both


def _unwrapped(path: Path, content: Any, schema: str, name: str) -> Any:
    """What is under `name` in our form, or the whole in LeReT's."""
    if not isinstance(content, dict) or not isinstance(content.get("schema"), str):
        return content
    if content["schema"] != schema:
        raise InputError(
            f"{path} has the schema {shown(content['schema'])}, and this version reads {schema}; "
            "write it again."
        )
    check_keys(f"{path}", content, ("schema", name))
    return content[name]

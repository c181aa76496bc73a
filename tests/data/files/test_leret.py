"""LeReT's files: what they hold, the round trip, and every way in which one can be broken."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.files.leret import (
    HopRecord,
    Preference,
    Retrieved,
    TryRecord,
    long_text,
    read_preferences,
    read_records,
    write_preferences,
    write_records,
)
from qrag_jax.errors import InputError

PROMPT = "Context:\n[1] «River Ouse | It flows.»\n\n\nQuestion: Which sea?"
STATES = {
    PROMPT: Preference(("sea", "River Ouse", "River Ouse mouth"), ((1, 0), (2, 1)), "River Ouse"),
    "Question: Who?": Preference(("who",), (), "who"),
}
# By hand, as LeReT's code writes them.
PUBLISHED = (
    '{"Context:\\n[1] \\u00abRiver Ouse | It flows.\\u00bb\\n\\n\\nQuestion: Which sea?": '
    '{"responses": ["sea", "River Ouse", "River Ouse mouth"], "pairs": [[1, 0], [2, 1]], '
    '"sft_target": "River Ouse"}, "Question: Who?": {"responses": ["who"], "pairs": [], '
    '"sft_target": "who"}}'
)
OUSE, SEA = Retrieved("River Ouse | It flows.", 21.75), Retrieved("North Sea | Cold.", 1 / 3)
FIRST = TryRecord("5a8b", "Which sea?", ("River Ouse", "North Sea"), {}, (OUSE,), model=3)
FIRST = dataclasses.replace(FIRST, hops={1: HopRecord("ouse", 0.5, 0.5, (OUSE,))})
SECOND = dataclasses.replace(
    FIRST,
    example_id=7,
    hops={**FIRST.hops, 2: HopRecord("sea", 1, 1.0, (SEA, OUSE))},
    full_retrieved=(OUSE, SEA),
    model=None,
    context=(OUSE,),
)
PUBLISHED_RECORDS = (
    '[{"example_id": "5a8b", "question": "Which sea?", "answer": ["River Ouse", "North Sea"], '
    '"hop1": {"search_query": "ouse", "score": {"em": 0.5, "ap": 0.5}, "retrieved": '
    '[{"long_text": "River Ouse | It flows.", "score": 21.75}]}, "full_retrieved": '
    '[{"long_text": "River Ouse | It flows.", "score": 21.75}], "model": 3}]'
)


def test_preferences_as_leret_has_them(tmp_path: Path) -> None:
    path = tmp_path / "hop1_preference.json"
    path.write_text(PUBLISHED)
    assert read_preferences(path) == STATES
    write_preferences(path, STATES, bare=True)
    assert path.read_text() == PUBLISHED + "\n"


def test_our_preferences_have_a_version(tmp_path: Path) -> None:
    path = tmp_path / "new" / "preferences.json"
    write_preferences(path, STATES)
    told = json.loads(path.read_text())
    assert told == {"schema": "qrag_jax.leret.preferences.1", "states": json.loads(PUBLISHED)}
    assert read_preferences(path) == STATES
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_prompt_may_be_called_schema(tmp_path: Path) -> None:
    for bare in (True, False):
        states = {"schema": Preference(("a",), (), "a"), "states": Preference(("b",), (), "b")}
        write_preferences(tmp_path / "p.json", states, bare=bare)
        assert read_preferences(tmp_path / "p.json") == states


def test_records_as_leret_has_them(tmp_path: Path) -> None:
    path = tmp_path / "hop1.json"
    path.write_text(PUBLISHED_RECORDS)
    assert read_records(path) == [FIRST]
    write_records(path, [FIRST], bare=True)
    assert path.read_text() == PUBLISHED_RECORDS + "\n"


def test_our_records_have_a_version(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    write_records(path, [FIRST, SECOND])
    told = json.loads(path.read_text())
    assert told["schema"] == "qrag_jax.leret.records.1"
    assert told["records"][:1] == json.loads(PUBLISHED_RECORDS)
    assert list(told["records"][1]) == [
        *["example_id", "question", "answer", "context", "hop1", "hop2", "full_retrieved"]
    ]
    assert read_records(path) == [FIRST, SECOND]


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_round_trip_is_exact(tmp_path: Path, bare: bool, seed: int) -> None:
    """Whatever the texts and the numbers are; a second writing gives the same bytes."""
    draw = random.Random(seed)
    path = tmp_path / "file.json"

    def text() -> str:
        return "".join(draw.choices('a "\\\n\u2028é東\ud800|«', k=draw.randint(0, 9)))

    def passages() -> tuple[Retrieved, ...]:
        return tuple(Retrieved(text(), draw.uniform(-1, 9) / 3) for _ in range(3))

    states = {}
    for number in range(20):
        count = draw.randint(2, 5)
        pairs = tuple(tuple(draw.sample(range(count), 2)) for _ in range(3))
        states[f"{number} {text()}"] = Preference(
            tuple(text() for _ in range(count)),
            pairs,
            text(),  # type: ignore[arg-type]
        )
    write_preferences(path, states, bare=bare)
    again = read_preferences(path)
    assert (again, list(again)) == (states, list(states))
    before = path.read_bytes()
    write_preferences(path, again, bare=bare)
    assert path.read_bytes() == before

    records = [
        TryRecord(
            example_id=draw.choice((text(), number)),
            question=text(),
            answer=(text(), text()),
            hops={
                hop: HopRecord(text(), draw.random(), draw.random() / 3, passages())
                for hop in range(1, draw.randint(2, 12))
            },
            full_retrieved=passages(),
            model=draw.choice((None, 0, 3)),
            context=draw.choice((None, (), passages())),
        )
        for number in range(20)
    ]
    write_records(path, records, bare=bare)
    assert read_records(path) == records
    before = path.read_bytes()
    write_records(path, read_records(path), bare=bare)
    assert path.read_bytes() == before


def test_titles_of_long_texts() -> None:
    assert long_text("A|B", "text") == "A B | text"


# ---------------------------------------------------------------- broken files


def refused(path: Path, content: Any, read: Any = read_preferences, **how: Any) -> str:
    """The one-sentence error of reading this."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError) as caught:
        read(path, **how)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


GOOD = {"responses": ["a", "b"], "pairs": [[1, 0]], "sft_target": "b"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": []}, ', state 2, has the key "labels", which is none of pairs, responses, sft'),
        ({"pairs": [[2, 0]]}, ", state 2, has the pair [2, 0] and 2 responses; a place is 0 at"),
        ({"pairs": [[0, -1]]}, ", state 2, has the pair [0, -1] and 2 responses"),
        ({"pairs": [[1, 0], [1, 1]]}, ", state 2, has the pair [1, 1], whose winner is its loser"),
        ({"pairs": [[1]]}, ", state 2, has the pair [1]; write the places of winner and loser"),
        ({"pairs": [[True, False]]}, ", state 2, has the pair [true, false]; write the places"),
        ({"pairs": [[1.0, 0]]}, ", state 2, has the pair [1.0, 0]; write the places"),
        ({"pairs": "1,0"}, ', state 2, has pairs "1,0", no list'),
        ({"responses": ["a", None]}, ", state 2, has null in responses, no text"),
        ({"sft_target": None}, ", state 2, has sft_target null, no text"),
    ],
)
def test_broken_states_are_told(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "file.json"
    content = {"one": GOOD, "two": GOOD | change}
    assert refused(path, content).startswith(message)
    wrapped = {"schema": "qrag_jax.leret.preferences.1", "states": content}
    assert refused(path, wrapped).startswith(message)


def test_a_state_without_a_key_is_told(tmp_path: Path) -> None:
    short = {name: value for name, value in GOOD.items() if name != "pairs"}
    message = ', state 1, has no key "pairs"; write pairs, responses, sft_target.'
    assert refused(tmp_path / "file.json", {"one": short}) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([GOOD], " holds no object from prompts to preferences"),
        ({"one": [1]}, ", state 1, is [1], no object"),
        ({"schema": "2", "states": {}}, ' has the schema "2", and this version reads qrag_jax.'),
        ({"schema": "qrag_jax.leret.records.1", "records": []}, ' has the schema "qrag_jax.leret'),
        ({"schema": "qrag_jax.leret.preferences.1"}, ' has no key "states"'),
        ('{"a": ', " is not JSON (Expecting value at line 1 column 7)"),
        ("{'demos': [], 'lm': None}", " is Python from line 1 column 2 on, and not JSON; it is"),
        ('{"one": {}, "one": {}}', ' is not JSON that can be used (it has the key "one" twice)'),
    ],
)
def test_broken_preference_files_are_told(tmp_path: Path, content: Any, message: str) -> None:
    assert refused(tmp_path / "file.json", content).startswith(message)


def test_python_is_never_evaluated(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    refused(tmp_path / "file.json", f"[open({str(proof)!r}, 'w')]")
    refused(tmp_path / "file.json", f"__import__('os').mkdir({str(proof)!r})", read_records)
    assert not proof.exists()


def test_a_prompt_of_another_template_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    content = {"Question: a": GOOD, "Search for this: " + "b" * 90: GOOD}
    message = refused(path, content, of_template=lambda prompt: prompt.startswith("Question:"))
    assert message.startswith(', state 2, has a prompt of another template, "Search for this: bbb')
    assert len(message) < 250
    assert len(read_preferences(path, lambda prompt: "a" in prompt)) == 2


def record(**change: Any) -> dict[str, Any]:
    (good,) = json.loads(PUBLISHED_RECORDS)
    return good | change


HOP: dict[str, Any] = record()["hop1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": 1}, " holds no list of records"),
        (["a"], ', record 1, is "a", no object'),
        ([[1, 2]], ", record 1, is [1, 2], no object"),
        ([record(), record(gold=[])], ', record 2, has the key "gold", which is none of'),
        ([{"hop1": HOP}], ', record 1, has no key "answer"'),
        ([{k: v for k, v in record().items() if k != "hop1"}], ", record 1, has no hop"),
        ([record(example_id=1.5)], ", record 1, has an example_id that is no text and no number"),
        ([record(model="3")], ", record 1, has a model that is no whole number"),
        ([record(answer="River")], ', record 1, has answer "River", no list'),
        ([record(hop0=HOP)], ', record 1, has the key "hop0"'),
        ([record(hop2=HOP | {"rationale": ""})], ', record 1, hop2, has the key "rationale"'),
        ([record(hop1=HOP | {"score": {"em": 1}})], ', record 1, hop1, score has no key "ap"'),
        ([record(hop1=HOP | {"score": {"em": 1, "ap": "1"}})], ', record 1, hop1, has ap "1", no'),
        ([record(full_retrieved=["a | b"])], ', record 1, full_retrieved is "a | b", no object'),
        ("[{'example_id': 1}]", " is Python from line 1 column 3"),
    ],
)
def test_broken_records_are_told(tmp_path: Path, content: Any, message: str) -> None:
    assert refused(tmp_path / "file.json", content, read_records).startswith(message)


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("before")
    with pytest.raises(InputError, match="whose winner is its loser"):
        write_preferences(path, {"one": Preference(("a", "b"), ((1, 1),), "b")})
    with pytest.raises(InputError, match="has no hop"):
        write_records(path, [dataclasses.replace(FIRST, hops={})])
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_records(
            path, [dataclasses.replace(FIRST, full_retrieved=(Retrieved("a", float("nan")),))]
        )
    assert path.read_text() == "before"

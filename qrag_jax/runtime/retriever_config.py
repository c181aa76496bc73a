"""`retriever.json`, the file that makes a folder of exported towers a whole retriever.

It says all that a search needs besides the two models: how states are composed, how long texts may
be, where chunks are rotated, how actions are searched and when a search stops. This module needs
neither jax nor flax nor torch, so that any environment can read the file.

Composing a state: the question's first `max_question_tokens` tokens, then of each chunk taken its
first `max_chunk_tokens_in_state` tokens, joined by `separator` without spaces; chunks in document
order if `sort_by_index`, else in the order taken. The towers' tokenizers add the opening token, the
prefix and the last separator, and cut rows at `Tower.max_tokens`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_json
from qrag_jax.runtime.digests import sha256
from qrag_jax.runtime.whole_files import reason, write_whole

NAME = "retriever.json"
TITLE_SEPARATOR = " "  # between a title and a text, unless a run's data have another one
FORMAT = 1  # of the file; grows when a field is added or means something else
# What format 1 knows. A test compares these names with those of the trainer.
POSITIONS = ("none", "absolute", "random", "random_published", "relative")
BEAM_SCORES = ("policy", "sum", "last")
MAX_BYTES = 2**20
PLAIN = re.compile(r"[A-Za-z0-9][\w.-]{0,200}")  # names of folders and files below the folder
EXPORT = "export the run again"

T = TypeVar("T")


class Rule(NamedTuple):
    """What a field's value must be: a test, and the words for a message."""

    holds: Callable[[Any], bool]
    told: str


def _is_number(value: object) -> bool:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _is_text(value: object) -> bool:
    # JSON can hold half a surrogate pair, which no tokenizer takes.
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _are_digests(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(PLAIN.fullmatch(name) for name in value)
        and all(isinstance(x, str) and re.fullmatch("[0-9a-f]{64}", x) for x in value.values())
    )


def _whole(least: int) -> Any:
    told = f"a whole number of at least {least}"
    return _field(Rule(lambda value: type(value) is int and value >= least, told))


def _one_of(names: tuple[str, ...]) -> Any:
    told = f"one of {', '.join(names)}"
    return _field(Rule(lambda value: isinstance(value, str) and value in names, told))


def _field(rule: Rule) -> Any:
    return dataclasses.field(metadata={"rule": rule})


_TEXT = Rule(_is_text, "a text")
_SOME_TEXT = Rule(lambda value: _is_text(value) and value != "", "a text that is not empty")
_FLAG = Rule(lambda value: isinstance(value, bool), "true or false")
_POSITIVE = Rule(lambda value: _is_number(value) and value > 0, "a number above 0")
_SHARE = Rule(lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
_THRESHOLD = Rule(lambda value: value is None or _is_number(value), "a number, or null for never")
_FOLDER = Rule(
    lambda value: isinstance(value, str) and bool(PLAIN.fullmatch(value)),
    "the name of a folder beside the file",
)
_DIGESTS = Rule(_are_digests, "an object that gives each file of weights its SHA-256 in hex")


def passage_text(title: str, text: str, separator: str = TITLE_SEPARATOR) -> str:
    """A passage as it is embedded, searched and shown: its title, if any, before its text."""
    return separator.join(part for part in (title.strip(), text.strip()) if part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
    """One of the two models.

    Attributes:
        folder: its folder beside the file, as sentence-transformers reads it.
        prefix: the text that its rows begin with; the tokenizer in the folder adds it.
        max_tokens: length of its longest row, in tokens, special ones included; longer rows are
            cut by its tokenizer.
        width: D, of its vectors; even, each half is one critic.
        scale: factor on the vectors that only the module Dense of the folder holds; 1: there is no
            such module. A server that skips it gives vectors too short by this factor.
        weights: SHA-256 of each file of weights in the folder, by its name.
    """

    folder: str = _field(_FOLDER)
    prefix: str = _field(_TEXT)
    max_tokens: int = _whole(1)
    width: int = _whole(2)
    scale: float = _field(_POSITIVE)
    weights: Mapping[str, str] = _field(_DIGESTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Positions:
    """Where chunk vectors are rotated before the inner product (arXiv 2511.07328).

    Each half of a vector (width H = D/2) is rotated by itself: its pair (2j, 2j+1) turns by the
    angle p·theta^(-2j/H), p the chunk's position. States are not rotated.

    Attributes:
        kind: "none": no rotation; "absolute" and "random" (in a search the same): p = 0, 1, 2, …;
            "relative": the m chunks between two taken ones stand at step·j + ⌊linspace(0, span,
            m)⌋, j the number of taken ones up to there; "random_published": 0, 1, 2, … with an
            indent drawn for each of `parts` parts, for documents of at most `most_chunks` chunks.
        theta: base of the angles.
        step, span: of "relative".
        parts, most_chunks: of "random_published".
    """

    kind: str = _one_of(POSITIONS)
    theta: float = _field(_POSITIVE)
    step: int = _whole(1)
    span: int = _whole(1)
    parts: int = _whole(1)
    most_chunks: int = _whole(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """How actions are searched, and when a search stops.

    Attributes:
        max_steps: T, chunks taken at most.
        beam: W, paths kept at every step; 1 is greedy.
        beam_score: what ranks paths: "policy", Σ log π with π = softmax(Q / alpha) over the best
            max(top_k_actions, W) chunks; "sum", Σ gamma^t·Q; or "last", the newest Q.
        gamma: γ of the sum.
        alpha: α, the temperature of the policy.
        top_k_actions: k of the policy.
        stop_action: whether the empty text, embedded as a chunk, is the action STOP.
        stop_threshold: a search stops before a chunk whose Q is not above it; None: never.
    """

    max_steps: int = _whole(1)
    beam: int = _whole(1)
    beam_score: str = _one_of(BEAM_SCORES)
    gamma: float = _field(_SHARE)
    alpha: float = _field(_POSITIVE)
    top_k_actions: int = _whole(1)
    stop_action: bool = _field(_FLAG)
    stop_threshold: float | None = _field(_THRESHOLD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrieverConfig:
    """The content of `retriever.json`; its fields have the names that they have in the file.

    Attributes:
        format: `FORMAT`.
        library_version: version of qrag_jax that exported the towers.
        base_model: hub name, or last part of the path, of the model that training started from;
            "": an encoder from scratch.
        state: the tower of states.
        chunk: the tower of chunks.
        title_separator: text between a passage's title and its text (see `passage_text`).
        separator: the token between the parts of a state, as it is written in texts.
        separator_id: its id in both tokenizers.
        max_question_tokens: longer questions are cut.
        max_chunk_tokens_in_state: longer chunks are cut inside a state.
        sort_by_index: whether a state lists chunks in document order, else in the order taken.
        positions: where chunk vectors are rotated.
        search: how actions are searched, and when a search stops.
    """

    format: int = _whole(1)
    library_version: str = _field(_SOME_TEXT)
    base_model: str = _field(_TEXT)
    state: Tower
    chunk: Tower
    title_separator: str = _field(_SOME_TEXT)
    separator: str = _field(_SOME_TEXT)
    separator_id: int = _whole(0)
    max_question_tokens: int = _whole(1)
    max_chunk_tokens_in_state: int = _whole(1)
    sort_by_index: bool = _field(_FLAG)
    positions: Positions
    search: Search

    @classmethod
    def of(cls, fields: object, where: str) -> RetrieverConfig:
        """The config with these fields, as JSON has them.

        Args:
            fields: the parsed file.
            where: names the file in errors.
        """
        version = fields.get("format") if isinstance(fields, Mapping) else FORMAT
        if version is not None and (type(version) is not int or version != FORMAT):
            raise InputError(
                f"{where}: the field format is {_shown(version)}, but this version of qrag_jax "
                f"reads format {FORMAT}; install the one that wrote the file, or {EXPORT}."
            )
        config = _filled(cls, fields, where, "")
        config._check_together(where)
        return config

    @classmethod
    def read(cls, folder: Path) -> RetrieverConfig:
        """Reads the file of an exported folder."""
        path = folder / NAME
        try:
            fields = bounded_json.load(path, finite=False, most=MAX_BYTES)  # `of` names the field
        except OSError as error:
            raise InputError(
                f"{path}: cannot be read ({reason(error)}); give a folder that qrag_jax.export "
                "wrote."
            ) from None
        except ValueError as error:
            raise InputError(f"{path}: not readable as JSON ({reason(error)}); {EXPORT}.") from None
        return cls.of(fields, str(path))

    def write(self, folder: Path) -> None:
        """Writes the file into a folder.

        Raises:
            OSError: the file cannot be written.
        """
        fields, path = dataclasses.asdict(self), folder / NAME
        self.of(fields, str(path))
        write_whole(path, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")

    def check_weights(self, folder: Path) -> None:
        """Compares the weights in the towers' folders with their digests."""
        for tower in (self.state, self.chunk):
            for name, digest in tower.weights.items():
                path = folder / tower.folder / name
                try:
                    found = sha256(path)
                except OSError as error:
                    raise InputError(
                        f"{path}: cannot be read ({reason(error)}), but {NAME} names it; {EXPORT}."
                    ) from None
                if found != digest:
                    raise InputError(
                        f"{path}: is not the file that {NAME} was written for (its SHA-256 is "
                        f"{found}); {EXPORT}."
                    )

    def _check_together(self, where: str) -> None:
        state, chunk, turns = self.state, self.chunk, self.positions.kind != "none"
        wrong = None
        if state.folder == chunk.folder:
            wrong = f"state.folder and chunk.folder are both {state.folder}"
        elif state.width != chunk.width:
            wrong = f"state.width is {state.width} and chunk.width {chunk.width}"
        elif state.width % (4 if turns else 2):
            pairs = "both halves are rotated in pairs" if turns else "a vector has two halves"
            wrong = f"state.width is {state.width}, but {pairs}"
        elif self.positions.span >= self.positions.step:
            wrong = (
                f"positions.span is {self.positions.span} and positions.step "
                f"{self.positions.step}, so that intervals would overlap"
            )
        if wrong:
            raise InputError(f"{where}: {wrong}; {EXPORT}.")


def _filled(kind: type[T], given: object, where: str, place: str) -> T:
    """The dataclass with the fields given, each checked by its rule.

    Args:
        place: name of the section with a dot behind it; "" for the whole file.
    """
    if not isinstance(given, Mapping):
        what = f"the field {place[:-1]}" if place else "the file"
        raise InputError(f"{where}: {what} must be an object; {EXPORT}.")
    hints, values = typing.get_type_hints(kind), {}
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in fields:
            raise InputError(
                f"{where}: the field {place}{_shown(name)} is unknown in format {FORMAT}; there "
                f"are {', '.join(fields)}."
            )
    for name, field in fields.items():
        if name not in given:
            raise InputError(f"{where}: the field {place}{name} is missing; {EXPORT}.")
        value = given[name]
        rule = field.metadata.get("rule")
        if rule is None:
            value = _filled(hints[name], value, where, f"{place}{name}.")
        elif not rule.holds(value):
            raise InputError(
                f"{where}: the field {place}{name} is {_shown(value)}; it must be {rule.told}."
            )
        elif hints[name] in (float, float | None) and value is not None:
            value = float(value)
        values[name] = value
    return kind(**values)


def _shown(value: object) -> str:
    """A value for a message, on one line and cut."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}…"

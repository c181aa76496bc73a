"""The retrieval log: one JSON line per evaluated sample, resumable after a kill."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.metrics import row_log
from qrag_jax.runtime import bounded_files, bounded_json, typed_json
from qrag_jax.runtime.whole_files import write_whole


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What the retriever did on one sample.

    Attributes:
        id: the sample's id.
        question, answer: the sample's texts; `answer` may be empty.
        sf_idx: indices of the supporting facts in the document; empty if nobody knows them.
        pred_idx: indices of the chunks taken, in the order taken, without padding; may be empty.
        q_values: Q of each chunk taken, at the step that took it; finite. Empty when the chunks
            were not played (the chunk filter `gt`).
        sf_texts, pred_texts: the texts of the chunks in `sf_idx` and `pred_idx`.
        ret: the episode's discounted return; written as "return". None, and then not written: there
            is none, because it would be that of the supporting facts.
        text_len: length of the document, in characters.
        f1, em: Fact F1 and Fact EM of this sample. None, and then not written, without the facts.
        aliases: other right answers, or the other values that are asked for; written only if there
            are any.
        source: see `Sample`; "", and then not written, if nobody knows it.
    """

    id: str
    question: str
    answer: str
    sf_idx: list[int]
    pred_idx: list[int]
    q_values: list[float]
    sf_texts: list[str]
    pred_texts: list[str]
    ret: float | None
    text_len: int
    f1: float | None
    em: float | None
    aliases: list[str] = dataclasses.field(default_factory=list)
    source: str = ""


_OPTIONAL = {"aliases", "source"}
_OF_FACTS = ("return", "f1", "em")  # may be missing where nobody knows the supporting facts

_MOST_NAMED = 8  # most differing settings named in one message

_BEGIN_ANEW = "pass --restart, or delete the log, to begin anew"
_WRITE_ANEW = "write the log anew with python -m qrag_jax.evaluate"


def log_name(seed: int, num_chunks: int | None = None) -> str:
    """File name of a log: `eval_seed{seed}.jsonl`, or `eval_seed{seed}_ns{num_chunks}.jsonl`."""
    chunks = "" if num_chunks is None else f"_ns{num_chunks}"
    return f"eval_seed{seed}{chunks}.jsonl"


def append(path: Path, rows: Iterable[Row]) -> None:
    """Adds rows at the end of the log and waits until they are on disk.

    To continue an old log, call `read_partial` first: it cuts off a torn last line.

    Raises:
        ValueError: a row holds a NaN or an infinity (its id is named); nothing is written.
    """
    lines = b"".join(_encode(row) for row in rows)
    row_log.append_lines(path, lines)


def read_partial(path: Path) -> list[Row]:
    """Reads a log that may have been cut off, and makes it fit to be appended to.

    A last line without a newline was being written when the process was killed. It is dropped, and
    the file is truncated to the last whole line. If there is no file, there are no rows.
    """
    return row_log.read_partial(
        path, lambda line, place: _decode(line, place, _BEGIN_ANEW), _BEGIN_ANEW
    )


def read(path: Path, *, needs_facts: bool = True) -> list[Row]:
    """Reads a finished log, or the rows so far of a log in progress; does not change the file.

    A last line that has no newline and is not a whole row is still being written; it is left out.

    Args:
        needs_facts: whether a row without supporting facts is refused.
    """
    rows: list[Row] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(bounded_files.lines(file, path, _WRITE_ANEW), start=1):
                place = f"{path}, line {number}"
                try:
                    row = _decode(line, place, _WRITE_ANEW)
                except InputError:
                    if not line.endswith(b"\n"):
                        break
                    raise
                _check_row(row, place, needs_facts=needs_facts)
                rows.append(row)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); give a retrieval log, as "
            "python -m qrag_jax.evaluate writes it"
        ) from None
    if not rows:
        raise InputError(f"{path} holds no row; {_WRITE_ANEW}")
    return rows


def parsed_row(line: bytes, place: str) -> Row:
    """One row, which can be scored.

    Args:
        place: file and line, for the error.
    """
    row = _decode(line, place, _WRITE_ANEW)
    _check_row(row, place, needs_facts=False)
    return row


def _check_row(row: Row, place: str, *, needs_facts: bool) -> None:
    """Raises InputError when the fields of a row do not fit together."""
    wrong = None
    if needs_facts and not row.sf_idx:
        wrong = "field 'sf_idx' is empty, but its supporting facts are needed here"
    elif len(row.sf_texts) != len(row.sf_idx):
        wrong = f"'sf_texts' has {len(row.sf_texts)} values and 'sf_idx' {len(row.sf_idx)}"
    elif len(row.pred_texts) != len(row.pred_idx):
        wrong = f"'pred_texts' has {len(row.pred_texts)} values and 'pred_idx' {len(row.pred_idx)}"
    elif row.q_values and len(row.q_values) != len(row.pred_idx):
        wrong = f"'q_values' has {len(row.q_values)} values and 'pred_idx' {len(row.pred_idx)}"
    elif min((*row.sf_idx, *row.pred_idx, 0)) < 0:
        wrong = "an index in 'sf_idx' or 'pred_idx' is negative"
    elif len(set(row.pred_idx)) < len(row.pred_idx):
        wrong = "field 'pred_idx' holds a chunk twice"
    if wrong:
        raise InputError(f"{place}: {wrong}; {_WRITE_ANEW}")


def meta_path(path: Path) -> Path:
    """The file that records what the log at `path` was made with: `<log>.meta.json`."""
    return path.with_name(path.name + ".meta.json")


def read_meta(path: Path) -> dict[str, Any]:
    """What the log at `path` was made with; {} when nothing is recorded beside it."""
    if not meta_path(path).exists():
        return {}
    return _decode_meta(meta_path(path), "delete it")


def check_meta(
    path: Path,
    meta: Mapping[str, Any],
) -> None:
    """Guards the log at `path` against rows from two different evaluations.

    The first call writes `meta` (for example the checkpoint and the config) beside the log; later
    calls compare. Call it before the first `append`.

    Args:
        path: the log.
        meta: what the rows of this evaluation depend on.
    """
    side = meta_path(path)
    fix = f"pass --restart, or delete {path} and {side.name}, to begin anew"
    now = _as_read(meta)
    if not side.exists():
        if path.exists() and path.stat().st_size > 0:
            raise InputError(f"{path} has rows but {side.name} is missing beside it: {fix}")
        write_whole(side, json.dumps(now, indent=1, sort_keys=True) + "\n")
        return
    then = _decode_meta(side, fix)
    old, new = _leaves(then), _leaves(now)
    differing = [
        f"{key} (was {bounded_json.shown(old.get(key))}, now {bounded_json.shown(new.get(key))})"
        for key in sorted({*old, *new})
        if key not in old or key not in new or old[key] != new[key]
    ]
    if differing:
        fields = ", ".join(differing[:_MOST_NAMED])
        if len(differing) > _MOST_NAMED:
            fields += f" and {len(differing) - _MOST_NAMED} more"
        raise InputError(f"{path} was begun with other settings, {fields}: {fix}")


def check_count(path: Path, rows: int, questions: int) -> None:
    """Refuses a log that more than one evaluation wrote to."""
    if rows > questions:
        raise InputError(
            f"{path} has {rows} rows, but there are {questions} questions: more than one process "
            f"wrote to it; {_BEGIN_ANEW}"
        )


def _as_read(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The record as it will be read back: tuples become lists."""
    return json.loads(json.dumps(dict(meta)))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings, by dotted names; an empty mapping is a leaf."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        below = isinstance(value, dict) and value
        found |= _leaves(value, f"{prefix}{key}.") if below else {prefix + key: value}
    return found


def discard(path: Path) -> None:
    """Deletes the log at `path` and its meta file, if they exist (`--restart`)."""
    path.unlink(missing_ok=True)  # rows first: rows without a meta file are refused
    meta_path(path).unlink(missing_ok=True)


def as_json(row: Row) -> dict[str, Any]:
    """The row as a line of the log has it."""
    record = {
        "return" if field.name == "ret" else field.name: getattr(row, field.name)
        for field in dataclasses.fields(Row)
        if field.name not in _OPTIONAL or getattr(row, field.name)
    }
    return {key: value for key, value in record.items() if value is not None}


def _encode(row: Row) -> bytes:
    try:
        return json.dumps(as_json(row), allow_nan=False).encode() + b"\n"
    except ValueError as error:
        message = f"sample {row.id} has a NaN or an infinity, which a retrieval log cannot hold"
        raise ValueError(message) from error


def _decode_meta(side: Path, fix: str) -> dict[str, Any]:
    try:
        meta = bounded_json.load(side, finite=False)
    except OSError as error:
        raise InputError(f"{side} cannot be read ({error.strerror}): {fix}") from None
    except ValueError as error:
        raise InputError(f"{side} is not valid JSON: {fix}") from error
    if not isinstance(meta, dict):
        raise InputError(f"{side} is not a JSON object: {fix}")
    return meta


def _decode(line: bytes, place: str, fix: str) -> Row:
    try:
        record = bounded_json.parsed(line)
        if b"\\u" in line:  # JSON can hold half a surrogate pair, which no file or tokenizer takes
            json.dumps(record, ensure_ascii=False).encode()
        if isinstance(record, dict):
            for name in _OF_FACTS:
                if record.get("sf_idx") == []:
                    record.setdefault(name, None)
                elif record.get(name) is None:
                    raise ValueError(f"the field {name} is missing")
            record["ret"] = record.pop("return")
        return typed_json.made(Row, record)
    except ValueError as error:
        raise InputError(f"{place}: is no row of this log ({error}); {fix}") from None

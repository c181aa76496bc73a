"""Small parts of the invented world, as `config.data.path` names them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from examples.worlds.records import LAYOUTS, Question, own, records

PATH = __file__
WORLD = "examples/worlds/records.py"
_few = partial(records, hops=(2,), chunks=8)
few_hotpotqa = partial(_few, layout="hotpotqa", train=24, dev=8)
few_chains = partial(_few, comparison=0.0, train=24, dev=8)
chains = partial(records, train=30, dev=10)
many_chains = partial(records, train=200, dev=200)
more_chains = partial(_few, comparison=0.0, train=96)

_six = partial(_few, comparison=0.0, train=6, dev=4)
six_own = _six
six_hotpotqa = partial(_six, layout="hotpotqa")
six_musique = partial(_six, layout="musique")
six_two_wiki = partial(_six, layout="two_wiki")


def path_of(name: str) -> str:
    """The path of a function of this file."""
    return f"{PATH}:{name}"


def _niah(question: Question) -> dict[str, Any]:
    """RULER's layout, already split into sentences."""
    return {
        "id": question.id,
        "input_prefix": "",
        "sentences": own(question)["chunks"],
        "input_suffix": f"\n{question.question}",
        "outputs": [question.answer] if question.answer else [],
        "supporting": list(question.support),
    }


def record_of(source: str, *parts: Any, **named: Any) -> dict[str, Any]:
    """A record in the layout of a source; the other arguments are those of `Question`."""
    return (LAYOUTS | {"niah": _niah})[source](Question(*parts, **named))


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Writes a file of JSON lines, packed if its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path

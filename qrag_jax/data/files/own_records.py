"""Records from a user's own function, by the path of its file.

    def records(split):  # "train" or "dev"
        for row in my_rows(split):
            yield {"question": row.text, "chunks": row.passages, "answers": [row.answer]}

The function runs in this process: there is no sandbox (`runtime.own_code`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.runtime import own_code

FIELD = "data.path"


def own_records(spec: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs (where, record) of a split; `where` has the number of the record, from 1.

    Args:
        spec: FILE.py:FUNCTION, called with `split`.

    Raises:
        InputError: the function cannot be used (see `own_code.load`), raises, gives something that
            is no dict, or nothing at all.
    """
    code = own_code.load(spec, FIELD, ("split",))
    name, number = Path(spec.rpartition(":")[0]).name, 0
    try:
        for number, record in enumerate(code.function(split=split), 1):
            if not isinstance(record, dict):
                raise InputError(
                    f"{FIELD} is {spec}, whose record {number} of {split} is {record!r:.60}, no "
                    "dict; give dicts."
                )
            yield f"{name}, {split} record {number}", record
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{FIELD} is {spec}, which failed after record {number} of {split} "
            f"({own_code.told(error)}); mend it."
        ) from error
    if not number:
        raise InputError(f"{FIELD} is {spec}, which has no {split} record; give one at least.")

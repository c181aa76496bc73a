"""Records which books a run was trained on, so that later scoring uses none of them.

The choice of dev books depends on all books of a folder: if one book is added, a training book may
become a dev book. A run therefore keeps the digests of its training books, and scoring compares
them with the dev books.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from qrag_jax.data.generators.books import Book
from qrag_jax.data.generators.noise import NoiseConfig, books_of
from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_json
from qrag_jax.runtime.typed_json import made
from qrag_jax.runtime.whole_files import reason, write_whole

NAME = "books.json"  # in the run's folder
SHOWN = 5  # books named in one sentence


def write_books(workdir: Path, backgrounds: Sequence[NoiseConfig]) -> None:
    """Writes the digests of the books that training documents draw from; no file without books.

    Raises:
        OSError: the file cannot be written.
    """
    found = {config.source: _digests(books_of(config, "train")) for config in backgrounds}
    if any(found.values()):
        write_whole(workdir / NAME, json.dumps(found, indent=1) + "\n")


def check_unseen(workdir: Path, backgrounds: Sequence[NoiseConfig]) -> None:
    """Refuses dev books that the run in `workdir` was trained on.

    Runs without such a record, and backgrounds whose splits share all books, are not checked.
    """
    path = workdir / NAME
    if not path.exists():
        return
    trained = _read(path)
    for config in backgrounds:
        if config.is_shared:
            continue
        # Books that are still training books do no harm: `noise` takes their sentences out of dev.
        now = set(_digests(books_of(config, "train")).values())
        known = set(trained.get(config.source, {}).values()) - now
        dev = _digests(books_of(config, "dev"))
        if seen := [name for name, digest in dev.items() if digest in known]:
            more = f" and {len(seen) - SHOWN} more" if len(seen) > SHOWN else ""
            raise InputError(
                f"the books {', '.join(seen[:SHOWN])}{more} would be scored on, but {workdir} was "
                f"trained among them ({NAME}): which books are for evaluation depends on all books "
                f"of {config.section}.noise; give that folder as it was in training, and others "
                f"as {config.section}.noise_dev."
            )


def _digests(books: Sequence[Book]) -> dict[str, str]:
    return {
        book.name: hashlib.sha256("\n".join(book.sentences).encode()).hexdigest()[:32]
        for book in books
    }


def _read(path: Path) -> Mapping[str, Mapping[str, str]]:
    try:
        return made(dict[str, dict[str, str]], bounded_json.load(path))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({reason(error)}); make it readable, or restore it from a "
            "backup."
        ) from None
    except ValueError:
        raise InputError(f"{path} is broken; restore it from a backup, or train anew.") from None

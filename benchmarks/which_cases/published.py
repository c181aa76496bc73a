"""The results of which docs/which.md is made, part by part, in the repository.

Each has the passages that were found for each question. So the page and its intervals can be made
anew on any machine that has the data, without a training, and another retriever can be compared
with a row question by question.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qrag_jax.runtime.whole_files import write_whole

FOLDER = Path(__file__).parents[1] / "which_results"
_END = ".json.gz"


def publish(results: Mapping[str, Mapping[str, Any]], folder: Path = FOLDER) -> None:
    """Writes the results of parts, such as 2wiki/bm25; those of other parts stay."""
    for name, result in results.items():
        path = folder / f"{name}{_END}"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, separators=(",", ":")) + "\n"
        # Without a time, so that equal results are equal files.
        write_whole(path, gzip.compress(text.encode(), mtime=0))


def published(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """The results that are there, by part."""
    return {
        path.relative_to(folder).as_posix().removesuffix(_END): json.loads(
            gzip.decompress(path.read_bytes())
        )
        for path in sorted(folder.rglob(f"*{_END}"))
    }


def versions(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Sentences that tell which parts are of which version of the trainer, if there are several."""
    parts: dict[str, list[str]] = {}
    for name, result in results.items():
        parts.setdefault(result["trainer"], []).append(name)
    if len(parts) > 1:
        for version, names in parts.items():
            yield f"Of version {version} of the trainer: {', '.join(names)}."

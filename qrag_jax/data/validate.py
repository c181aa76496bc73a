"""Checks a data file before a training does: python -m qrag_jax.data.validate --source S --path P.

Ends with status 0 when every record is usable, 1 when some are skipped, 2 when nothing can be read.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from qrag_jax.data.sources import SOURCES, load_samples
from qrag_jax.errors import InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what was read, skipped and found; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m qrag_jax.data.validate")
    parser.add_argument("--source", required=True, help=f"layout: {', '.join(SOURCES)}")
    parser.add_argument("--path", required=True, help="data file or folder")
    parser.add_argument("--split", choices=("train", "dev"), default="train")
    args = parser.parse_args(argv)
    try:
        if not args.path:
            raise InputError("--path is empty; give a data file or folder")
        samples, report = load_samples(args.source, args.path, args.split)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for file in report.files:
        print(f"file     {file}")
    print(f"records  {report.read} read, {report.kept} kept, {report.read - report.kept} skipped")
    for reason, count in report.skipped.items():
        print(f"skipped  {count} {reason}, the first at {report.first[reason]}")
    print(_spread("chunks per question", [len(sample.chunks) for sample in samples]))
    print(_spread("supporting facts per question", [len(sample.support) for sample in samples]))
    words = [len(chunk.split()) for sample in samples for chunk in sample.chunks]
    print(_spread("words per chunk", words))
    return 1 if report.skipped else 0


def _spread(what: str, counts: list[int]) -> str:
    middle = statistics.median(counts)
    return f"{what}: min {min(counts)}, median {middle:g}, max {max(counts)}"


if __name__ == "__main__":
    sys.exit(main())

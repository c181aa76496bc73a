"""Writes any data in the neutral schema: python -m qrag_jax.convert_data --help

The schema is that of `data.sources`, one JSON object a line. The exit status is 0 if every record
is usable, 1 if some are left out, and 2 if nothing can be read or written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from qrag_jax.data.sources import SOURCES, neutral_record
from qrag_jax.errors import InputError
from qrag_jax.runtime.output import lasting_output
from qrag_jax.runtime.whole_files import reason, write_whole
from qrag_jax.validate_data import arguments, read


def main(argv: Sequence[str] | None = None) -> int:
    """Reads, writes, and prints what was left out; returns the exit status."""
    parser = arguments("convert_data", SOURCES)
    parser.add_argument("--out", required=True, help="file to write, .jsonl")
    args = parser.parse_args(argv)
    try:
        out = Path(args.out)
        if out.suffix != ".jsonl":
            raise InputError(f"--out is {args.out!r}; give a name that ends in .jsonl")
        samples, report = read(args)
        if any(out.absolute() == Path(file).absolute() for file in report.files):
            raise InputError(f"--out is {args.out}, which is read; give another name")
        lines = [json.dumps(neutral_record(each), ensure_ascii=False) + "\n" for each in samples]
        try:
            write_whole(out, "".join(lines))
        except OSError as error:
            raise InputError(
                f"{out} cannot be written ({reason(error)}); free space, or give another --out"
            ) from None
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report.summary())
    print(f"file     {out}")
    return 1 if report.skipped else 0


if __name__ == "__main__":
    with lasting_output():
        sys.exit(main())

"""Runs a benchmark suite: python -m benchmarks --suite NAME [--run] [--quick] [--only=PART,PART]

A full run adds its figures to benchmarks/results/; `make results` writes docs/results.md from them.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks import report
from qrag_jax.errors import InputError

SUITES = ("speed", "quality", "gpu", "published")


def main() -> int:
    """Runs one suite; returns 1 if a case could not run. A missed target is no error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--suite", required=True, choices=SUITES)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, within 50 seconds on 2 cores"
    )
    parser.add_argument(
        "--only",
        default="",
        help="parts of the suite, with commas between; an unknown one lists them",
    )
    parser.add_argument(
        "--run",
        action="store_true",
        help="suite gpu: measure on the GPU of this machine; without it the suite only compiles",
    )
    arguments = parser.parse_args()
    if arguments.run and arguments.suite != "gpu":
        parser.error("--run is for the suite gpu")
    name = "gpu.measured" if arguments.run else arguments.suite
    suite = importlib.import_module(f"benchmarks.{name}")
    only = [part for part in arguments.only.split(",") if part]
    load_before = report.load()
    try:
        cases = suite.run(arguments.quick, only)
    except InputError as error:
        parser.error(str(error))
    status = report.show(arguments.suite, cases)
    if not arguments.quick:
        print(f"stored: {report.store(arguments.suite, cases, load_before)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())

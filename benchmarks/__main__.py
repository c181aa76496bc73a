"""Runs a benchmark suite: python -m benchmarks --suite NAME [--run] [--quick] [--only=PART,PART]"""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks import report
from qrag_jax.errors import InputError

SUITES = (
    *("encoders", "estimate", "faults", "gpu", "inputs", "memory", "published", "quality"),
    *("retrieval", "scaling", "sidecar", "speed", "tokens", "verifiers"),
)
IN_PARTS = ("faults", "gpu", "gpu --run", "quality", "retrieval", "scaling", "tokens", "verifiers")


def main() -> int:
    """Runs one suite; returns 1 if a case could not run, or if a suite that must hold does not.

    Other suites return 0 even if a target is missed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--suite", required=True, choices=SUITES)
    parser.add_argument("--quick", action="store_true", help="end within 50 seconds on 2 cores")
    parser.add_argument(
        "--only",
        default="",
        help="parts of the suites faults, quality, retrieval, scaling, tokens, verifiers and of "
        "gpu --run, with commas between; results are kept, so parts can be run one by one and the "
        "whole suite at last; of the suite gpu, "
        "rows in whose names (h100/MiniLM/full/1x8x1/update) one of these regular expressions is "
        "found",
    )
    parser.add_argument(
        "--run",
        action="store_true",
        help="suite gpu: measure on the GPUs of this machine, beside the estimates; without it the "
        "suite only compiles",
    )
    arguments = parser.parse_args()
    if arguments.run and arguments.suite != "gpu":
        parser.error("--run is for the suite gpu")
    name = "gpu --run" if arguments.run else arguments.suite
    suite = importlib.import_module(f"benchmarks.{name.replace(' --', '_')}")
    only = [name for name in arguments.only.split(",") if name]
    if only and name not in IN_PARTS:
        parser.error(f"--only is for the suites {', '.join(IN_PARTS)}")
    if only and arguments.quick and name != "gpu":
        parser.error("--quick has no parts; leave out --only")
    try:
        cases = suite.run(arguments.quick, only) if only else suite.run(arguments.quick)
    except InputError as error:
        parser.error(str(error))
    status = report.show(arguments.suite, cases)
    missed = getattr(suite, "MUST_HOLD", False) and any(case.holds is False for case in cases)
    return max(status, int(missed))


if __name__ == "__main__":
    sys.exit(main())

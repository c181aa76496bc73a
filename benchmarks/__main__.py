"""python -m benchmarks --suite NAME [--quick]"""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks import report

SUITES = ("encoders", "learn", "long", "memory", "published", "sidecar", "speed")


def main() -> int:
    """Runs one suite; 0 whatever its targets say, 1 when a case could not run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--suite", required=True, choices=SUITES)
    parser.add_argument("--quick", action="store_true", help="end within 50 seconds on 2 cores")
    arguments = parser.parse_args()
    suite = importlib.import_module(f"benchmarks.{arguments.suite}")
    return report.show(arguments.suite, suite.run(arguments.quick))


if __name__ == "__main__":
    sys.exit(main())

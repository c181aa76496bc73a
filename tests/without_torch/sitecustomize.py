"""Python runs this file at its start where the folder is on PYTHONPATH: torch is then not there.

Users of the trainer have no torch; it is here as the tests' reference, and takes seconds to import.
"""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]

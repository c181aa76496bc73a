"""Rules for names that were read from a file, and for links in a folder that may be anyone's."""

from __future__ import annotations

import os
from pathlib import Path

from qrag_jax.errors import InputError

MAX_NAME_BYTES = 255  # of a file's name, as on common file systems


def is_plain(name: object) -> bool:
    """Whether a name read from a file is a plain name in the same folder, on any system."""
    if not isinstance(name, str) or not name or name.startswith(".") or not name.isprintable():
        return False
    return not set(name) & set('/\\:"<>|?*') and len(name.encode()) <= MAX_NAME_BYTES


def check_links(folder: Path) -> None:
    """Refuses a folder with a link that leads out of it; the folder itself may be a link.

    Without this, a folder from someone else could make a program read any file of its user.
    """
    root = folder.resolve()
    for where, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(where, name)
            if not path.is_symlink():
                continue
            try:
                inside = path.resolve().is_relative_to(root)
            except (OSError, RuntimeError):  # links in a circle
                inside = False
            if not inside:
                raise InputError(
                    f"{path} is a link out of {folder}, which is not followed; put the file itself "
                    "there."
                )

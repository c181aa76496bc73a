"""Paths as an exported card shows them: folders of the training machine mean nothing elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# An absolute path, up to the last slash before its last part. Parts of data are written as
# path,split;path,split and settings as name=path.
_FOLDERS = re.compile(r"(?<![^=,;])[~/][^=,;]*/(?=[^=,;/])")


def without_folders(value: Any) -> Any:
    """The value with all absolute paths in it, at any depth, cut to their last part.

    Args:
        value: a text, or mappings, lists and tuples of such values; all else stays as it is.
    """
    if isinstance(value, Mapping):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_folders(item) for item in value)
    return _FOLDERS.sub("", value) if isinstance(value, str) else value

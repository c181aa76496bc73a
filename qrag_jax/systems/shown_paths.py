"""Paths as an exported card shows them: folders of the training machine mean nothing elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def without_folders(value: Any) -> Any:
    """The value with all absolute paths in it, at any depth of mappings, cut to their last part."""
    if isinstance(value, Mapping):
        return {name: without_folders(item) for name, item in value.items()}
    return re.sub(r"(?<![^=,])[~/][^=,]*/", "", value) if isinstance(value, str) else value

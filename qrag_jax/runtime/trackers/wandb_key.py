"""Whether W&B will find a key; without one it would ask for it on the terminal and wait."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

_WITHOUT_KEY = ("offline", "dryrun", "disabled")
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_HOST = "https://api.wandb.ai"


def is_given() -> bool:
    """Whether a key is in the environment, or in the netrc file of `wandb login`, or none is
    needed."""
    if os.environ.get("WANDB_MODE", "") in _WITHOUT_KEY:
        return True
    if any(os.environ.get(name) for name in _KEYS):
        return True
    file = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or _HOST).hostname or ""
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False

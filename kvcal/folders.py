"""Where kvcal keeps what it fetched, converted or measured once."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$KVCAL_CACHE``, else the user's cache folder."""
    if os.environ.get("KVCAL_CACHE"):
        return Path(os.environ["KVCAL_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcal"

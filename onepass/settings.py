"""The only reader of environment variables.

| variable | meaning | default |
| --- | --- | --- |
| `ONEPASS_BACKEND` | force one backend for every op of this process | let dispatch choose |
| `ONEPASS_CACHE_DIR` | where compiled kernels and tuning results are kept | the user's cache folder |
| `TRITON_INTERPRET` | `1` runs Triton kernels in Triton's interpreter, on CPU tensors (read by Triton too) | `0` |
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def forced_backend() -> str | None:
    """The backend named by `ONEPASS_BACKEND`, or None."""
    return os.environ.get("ONEPASS_BACKEND") or None


@lru_cache(maxsize=1)
def cache_dir() -> Path:
    """The folder of compiled kernels and tuning results. It may not exist yet, and may not be writable."""
    configured = os.environ.get("ONEPASS_CACHE_DIR")
    if configured:
        return Path(configured).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("onepass"))


@lru_cache(maxsize=1)
def triton_interpret() -> bool:
    """Whether Triton kernels run in the interpreter. Fixed once per process: Triton decides at import."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")

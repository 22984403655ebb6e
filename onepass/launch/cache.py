"""The folders where compiled kernels are kept between processes."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path

from onepass import settings
from onepass.errors import CacheNotWritableWarning


@cache
def cache_folder(name: str) -> Path:
    """The folder `name` of the cache, created if need be.

    Where it cannot be written, a warning says so, and a temporary folder serves this process alone.
    """
    folder = settings.cache_dir() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        warnings.warn(
            f"compiled kernels cannot be kept in {folder} ({error.strerror}); each process compiles them again. "
            "Set ONEPASS_CACHE_DIR to a folder that can be written.",
            CacheNotWritableWarning,
            stacklevel=2,
        )
    temporary = Path(tempfile.mkdtemp(prefix="onepass-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary

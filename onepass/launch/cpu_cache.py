"""Compiled CPU kernels on disk, so that the next process loads them instead of compiling.

Numba's own cache is not used, for three reasons. It watches only the file of the kernel, so a change in the
helpers that the kernel calls would leave a stale kernel in use. It numbers its data files through an index that
two processes can update at once, after which one signature can load the machine code of another. And its folder
is a setting of the whole process. Here every kernel has one file, named by a digest of all it was made from, and
the file is put in place whole.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import compiler
from numba.core.caching import _Cache
from numba.core.serialize import dumps

from onepass.errors import CacheNotWritableWarning
from onepass.launch.cache import cache_folder

_DIGEST_BYTES = hashlib.sha256().digest_size


class KernelCache(_Cache):
    """The cache of one Numba dispatcher, made from the text of the given source files."""

    def __init__(self, name: str, sources: tuple[str, ...]) -> None:
        self._name = name
        self._sources = sources

    @property
    def cache_path(self) -> str:
        return str(cache_folder("numba"))

    def enable(self) -> None: ...

    def disable(self) -> None: ...

    def flush(self) -> None: ...

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled kernel of this signature, or None. A damaged file counts as none."""
        target_context.refresh()
        try:
            content = self._file(sig, target_context.codegen()).read_bytes()
        except OSError:
            return None
        digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            return None
        return compiler.CompileResult._rebuild(target_context, *pickle.loads(payload))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled kernel. Where that fails, a warning says so: the kernel itself works."""
        payload = dumps(data._reduce())
        try:
            path = self._file(sig, data.codegen)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(hashlib.sha256(payload).digest() + payload)
                os.replace(temporary, path)
            except OSError:
                os.unlink(temporary)
                raise
        except OSError as error:
            warnings.warn(
                f"a compiled kernel cannot be kept in {self.cache_path} ({error.strerror})",
                CacheNotWritableWarning,
                stacklevel=2,
            )

    def _file(self, sig: Any, codegen: Any) -> Path:
        made_from = (
            self._name,
            sig,
            codegen.magic_tuple(),
            platform.python_version(),
            numba.__version__,
            llvmlite.__version__,
            _digest(self._sources),
        )
        name = hashlib.sha256(repr(made_from).encode()).hexdigest()[:32]
        return cache_folder("numba") / f"{self._name}-{name}.bin"


@lru_cache(maxsize=64)
def _digest(sources: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(hashlib.sha256(Path(source).read_bytes()).digest())
    return digest.hexdigest()

"""These tests need a process in which Triton interprets its kernels: tests/cpu/test_triton_interpreter.py starts it."""

from __future__ import annotations

import pytest

from onepass import settings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not settings.triton_interpret():
        for item in items:
            if "interpreter" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="runs with TRITON_INTERPRET=1, in a process of its own"))

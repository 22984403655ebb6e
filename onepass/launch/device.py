"""Facts about the devices of this process."""

from __future__ import annotations

from functools import lru_cache

import torch


def default_device() -> torch.device:
    """The first GPU, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@lru_cache(maxsize=64)
def architecture(device: torch.device) -> str:
    """The name of a GPU's architecture in file names: "sm90", "gfx942"."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"

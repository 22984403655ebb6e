"""The activations that ops apply, in plain torch ops.

SiLU is from Elfwing, Uchibe and Doya (2017), GELU from Hendrycks and Gimpel (2016).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}

ACTIVATIONS = (None, *ACTIVATION_FUNCTIONS)

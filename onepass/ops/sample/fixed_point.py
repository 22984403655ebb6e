"""The arithmetic that all sampling kernels share, so that they draw the same tokens.

The code of a logit is how far it lies below the largest, in octaves of weight and in fixed point:
floor((largest - logit) · (log2(e) / temperature) · 2^24), with float32 operations; at most CODE_END, which stands for
weight 0. A smaller code is a larger weight. The weight of a code is floor(2^16 · 2^-n · m): n is the code's integer
part, and m = floor(2^24 · 2^-f) by a polynomial in fused multiply-adds, f being the upper 23 bits of its fraction. From
there on everything is exact integer arithmetic, so neither the order of a sum nor how a row is cut changes a bit.
"""

from __future__ import annotations

CODE_BITS = 24
CODE_END = 41 << CODE_BITS
"""The weight is 0 from here on."""
CODE_BEYOND = (1 << 30) - 1
"""The code of a place past the row's end: larger than any other."""

# 2^-(g + 1/2) for |g| ≤ 1/2, highest power first, fitted for the least relative error: 2^-29. In float32 it is exactly
# 1 at one end and 1/2 at the other.
POLYNOMIAL = (
    0.00010851127444766462,
    -0.0009475182159803808,
    0.0068012988194823265,
    -0.039246752858161926,
    0.16986577212810516,
    -0.4901290833950043,
    0.7071067690849304,
)

WEIGHT_BITS = 40
LIMIT_BITS = 30
"""top_p and min_p are multiples of 2^-30."""
MAX_LOG2_VOCAB = 22
"""Up to 2^22 tokens sums of weights stay below 2^63; above, each doubling drops a bit of the weights."""


def dropped_bits(vocab_size: int) -> int:
    """How many low bits of the weights are dropped, so that their sum fits into 63 bits."""
    return max(0, (vocab_size - 1).bit_length() - MAX_LOG2_VOCAB)

"""rms_norm_rope in Triton: the kernel that all ops with RoPE share, `onepass/ops/rope_triton.py`."""

from onepass.ops.rope_triton import prepare, unsupported_reasons

__all__ = ["prepare", "unsupported_reasons"]

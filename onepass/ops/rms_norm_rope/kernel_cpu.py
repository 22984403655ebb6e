"""rms_norm_rope on the CPU: the kernel that all ops with RoPE share, `onepass/ops/rope_cpu.py`."""

from onepass.ops.rope_cpu import prepare, unsupported_reasons

__all__ = ["prepare", "unsupported_reasons"]

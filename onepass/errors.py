"""Every exception and warning that onepass raises on purpose.

Argument errors say which argument is wrong, what was expected and what was given, and derive from the
builtin that a caller would expect (`TypeError` for a wrong type or dtype, `ValueError` for everything else).
"""

from __future__ import annotations


class OnepassError(Exception):
    """Base class of all errors raised by onepass."""


class _ArgumentError(OnepassError):
    def __init__(self, op: str, argument: str, expected: str, got: object) -> None:
        super().__init__(f"{op}: argument '{argument}': expected {expected}, got {got}")
        self.op, self.argument, self.expected, self.got = op, argument, expected, got


class ArgumentTypeError(_ArgumentError, TypeError):
    """An argument has the wrong type or dtype."""


class ArgumentValueError(_ArgumentError, ValueError):
    """An argument has the wrong shape, device, memory or value."""


class GradientsNotSupportedError(OnepassError, NotImplementedError):
    """The op has no backward pass, and the call would need one."""

    def __init__(self, op: str, argument: str, unfused: str) -> None:
        super().__init__(
            f"{op}: argument '{argument}' requires grad, and {op} has no backward pass. "
            f"Call it under torch.no_grad() or torch.inference_mode(), or use the unfused {unfused}."
        )


class NoBackendError(OnepassError, RuntimeError):
    """No backend can run the call; the message lists the reasons of each."""


class KernelLoadError(OnepassError, RuntimeError):
    """A compiled kernel could not be loaded on the device."""


class UnknownNameError(OnepassError, ValueError):
    """An op, backend or option that does not exist; the message suggests the nearest that does."""

    def __init__(self, kind: str, name: object, known: tuple[str, ...]) -> None:
        import difflib

        nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
        super().__init__(f"unknown {kind} '{name}'.{hint} Known: {', '.join(known)}.")


class MissingDependencyError(OnepassError, ImportError):
    """An optional package is needed and not installed; the message gives the command that installs it."""

    def __init__(self, package: str, needed_for: str, command: str) -> None:
        super().__init__(
            f"{needed_for} needs the package '{package}', which is not installed. Install it with: {command}"
        )


class CacheNotWritableWarning(UserWarning):
    """Compiled kernels cannot be kept on disk: they work, and are compiled again by the next process."""


class TunedConfigWarning(UserWarning):
    """A file of tuned configs cannot be used: default configs are used instead, and results stay right."""


class OutputFolderError(OnepassError, OSError):
    """Results cannot be written where they were asked for."""

    def __init__(self, folder: object, why: str, how: str = "Choose another with --out.") -> None:
        self.why = why
        super().__init__(f"cannot write to the output folder '{folder}': {why}. {how}")


class ProviderUnavailableError(OnepassError, RuntimeError):
    """A peer of a benchmark cannot run on this machine; the message says what is missing."""

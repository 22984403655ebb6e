"""The command line: `onepass study`, `bench`, `warmup` and the others. Thin: the work is in the modules below it.

Torch is imported by the commands that need it, not for `--help`.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from onepass.errors import ArgumentValueError, OnepassError, UnknownNameError
from onepass.progress import progress_bar

if TYPE_CHECKING:
    import torch

    from onepass.bench.study import Plan

INTERRUPTED = 130

app = typer.Typer(
    name="onepass",
    help="Fused kernels for LLM inference: measure them on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DtypeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        help="fp32, bf16 or fp16; may be given more than once.",
        show_default="bf16 on a GPU, else fp32 and bf16",
    ),
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="the GPU, if there is one")]
OutOption = Annotated[Path | None, typer.Option(help="Folder for the files.", show_default="results/<this machine>")]


def main() -> None:
    """The entry point."""
    app()


@app.command()
def study(
    name: Annotated[str, typer.Argument(help="The study: layer_norm_silu.")] = "layer_norm_silu",
    real: Annotated[bool, typer.Option("--real", help="Also on the hidden states of SmolLM2-135M.")] = False,
    roofline: Annotated[bool, typer.Option("--roofline", help="Also draw this machine's roofline.")] = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Compare a fused op with the unfused ops, and say what bounds each size."""
    with _errors_as_text():
        from onepass.bench.study import STUDIES, plan_study

        if name not in STUDIES:
            raise UnknownNameError("study", name, STUDIES)
        target, dtypes = _device(device), _dtypes(dtype)
        _run(lambda: plan_study(name, target, dtypes), target, out, real=real, roofline=roofline)


@app.command()
def bench(
    op: Annotated[str | None, typer.Argument(help="The op; all ops where none is named.", show_default=False)] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Measure an op's sweep against every peer that is installed."""
    with _errors_as_text():
        from onepass.bench.study import plan_bench
        from onepass.dispatch import TABLE

        if op is not None and op not in TABLE:
            raise UnknownNameError("op", op, tuple(TABLE))
        target, dtypes = _device(device), _dtypes(dtype)
        for each in (op,) if op else tuple(TABLE):
            _run(lambda each=each: plan_bench(each, target, dtypes), target, out)  # type: ignore[misc]


@app.command()
def warmup(
    op: Annotated[str, typer.Argument(help="The op.", show_default=False)],
    shape: Annotated[list[str], typer.Option("--shape", help="As 1x4096; may be given more than once.")],
    argument: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="NAME=VALUE", help="An argument of the op: activation=silu, bias=none."),
    ] = None,
    residual: Annotated[bool, typer.Option("--residual", help="With a residual.")] = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Compile the kernels that calls of these shapes need, and keep them on disk."""
    with _errors_as_text():
        from onepass.warming import warmup as warm

        arguments: dict[str, Any] = dict(_argument(text) for text in argument or ())
        if residual:
            import torch

            arguments["residual"] = torch.zeros_like
        shapes = [_shape(text) for text in shape]
        target, dtypes = _device(device), _dtypes(dtype)
        for warmed in warm(op, shapes, dtypes=dtypes or None, device=target, **arguments):
            _console().print(Text(str(warmed)), soft_wrap=True)


@app.command()
def tune(
    op: Annotated[str, typer.Argument(help="The op.", show_default=False)],
    n: Annotated[
        list[int] | None,
        typer.Option(
            "--n", min=1, help="Length of a row; may be given more than once.", show_default="well-known ones"
        ),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="fp32, bf16 or fp16.", show_default="bf16")] = None,
    ship: Annotated[bool, typer.Option("--ship", help="For maintainers: write into the package's folder.")] = False,
) -> None:
    """Time every config of an op's kernel on this GPU, and keep those that beat the default ones."""
    with _errors_as_text():
        from onepass.tuning.command import tune as run

        run(op, n or (), _dtypes(dtype), ship, _console(), sys.stdout.isatty())


@app.command()
def ops() -> None:
    """List the ops with their backends and dtypes."""
    with _errors_as_text():
        from onepass.bench.report import print_ops

        print_ops(_console())


@app.command()
def doctor() -> None:
    """Say what this machine has, which backends work, and how to get the missing ones."""
    with _errors_as_text():
        from onepass.bench.report import print_doctor

        if not print_doctor(_console()):
            raise typer.Exit(1)


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete what onepass keeps there.")] = False,
) -> None:
    """Show the folder of compiled kernels and tuning results, and its size."""
    with _errors_as_text():
        from onepass.bench.report import clear_cache, print_cache

        if clear:
            clear_cache(_console())
        else:
            print_cache(_console())


def _run(
    plan_of: Callable[[], Plan], device: torch.device, out: Path | None, real: bool = False, roofline: bool = False
) -> None:
    """Check the output folder, measure with a progress bar, print, and write the files."""
    from onepass.bench import machine
    from onepass.bench.record import check_folder
    from onepass.bench.study import add_real, run_plan, write_files
    from onepass.bench.table import print_run

    folder = out or Path("results") / machine.describe(device).slug
    check_folder(folder)
    plan = plan_of()
    with progress_bar(sys.stdout.isatty()) as (advance, set_total):
        if real:
            plan = add_real(plan, advance)
        set_total(plan.steps)
        run = run_plan(plan, _command(), advance)
        advance("files")
        files = write_files(run, folder, roofline)
    console = _console()
    print_run(run, console)
    for sentence in run.reading:
        console.print(Text(f"• {sentence}"))
    console.print()
    console.print(Text(f"{run.machine.name}, {run.seconds:.0f} s. Written:", style="dim"))
    for file in files:
        console.print(Text(f"  {file}", style="dim"), soft_wrap=True)


@contextmanager
def _errors_as_text() -> Iterator[None]:
    """What a user can act on becomes one line and exit code 2; Ctrl-C exits with 130."""
    try:
        _load_torch()
        yield
    except OnepassError as error:
        Console(stderr=True).print(Text(f"onepass: {error}", style="red"), soft_wrap=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as interrupt:
        Console(stderr=True).print("onepass: interrupted; no half-written file is left")
        raise typer.Exit(INTERRUPTED) from interrupt


def _load_torch() -> None:
    """Import torch, the long part of a start. Ctrl-C ends the process at once here, without a word.

    As an exception it would leave libraries half loaded, which then fail in ways of their own.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import torch  # noqa: F401
    finally:
        signal.signal(signal.SIGINT, before)


def _console() -> Console:
    return Console(highlight=False)


def _command() -> str:
    """The command as it was typed."""
    return shlex.join(["onepass", *sys.argv[1:]])


def _dtypes(names: list[str] | None) -> tuple[torch.dtype, ...]:
    from onepass.bench.study import DTYPES

    for name in names or ():
        if name not in DTYPES:
            raise UnknownNameError("dtype", name, tuple(DTYPES))
    return tuple(dict.fromkeys(DTYPES[name] for name in names or ()))


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if not all(size.isdecimal() for size in sizes):
        raise ArgumentValueError("command line", "--shape", "sizes as in 1x4096", text)
    return tuple(map(int, sizes))


def _argument(text: str) -> tuple[str, str | float | None]:
    """NAME=VALUE: a number, "none", or a name."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ArgumentValueError("command line", "--with", "NAME=VALUE", text)
    try:
        return name, float(value)
    except ValueError:
        return name, None if value.lower() == "none" else value


def _device(name: str | None) -> torch.device:
    import torch

    from onepass.launch.device import default_device

    if name is None:
        return default_device()
    if name not in ("cpu", "cuda"):
        raise UnknownNameError("device", name, ("cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentValueError("command line", "--device", "a device that torch can use here: cpu", name)
    return default_device() if name == "cuda" else torch.device(name)

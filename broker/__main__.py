"""Start and end of the process: `broker`, or `python -m broker`."""

import gc
import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run one command and exit with its code."""
    from broker.cli.interrupts import end_on_interrupt

    end_on_interrupt()
    _prepare_streams()
    if os.getenv("_BROKER_COMPLETE"):
        _complete()
    # Importing creates tens of thousands of objects and no garbage: with its default threshold, the collector takes a
    # thirtieth of `plan`.
    gc.set_threshold(50_000)
    from broker.cli.main import main as run

    try:
        run()
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    end_process(code)


def _prepare_streams() -> None:
    """Let commands read and write regardless of the terminal and the shell.

    A program's output may contain characters that a Latin-1 or ASCII terminal lacks, which are shown as escapes. For a
    stream that the shell closed (`>&-`), Python has none.
    """
    for name, mode, flag in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_WRONLY), ("stderr", "w", os.O_WRONLY)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flag), mode, encoding="utf-8"))
        elif mode == "w" and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _complete() -> None:
    """Answer the shell and exit, or return if Typer has to answer."""
    from broker.cli.completion import complete

    try:
        is_done = complete()
    except SystemExit as leave:
        end_process(int(leave.code or 0))
    if is_done:
        end_process(0)


def end_process(code: int) -> NoReturn:
    """Exit without finalizing the interpreter object by object, which takes an eighth of `broker plan`.

    No cleanup depends on it.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = code or 141
    except OSError as error:
        sys.stderr.write(f"error: cannot write the output: {error.strerror}\n")
        code = code or 1
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

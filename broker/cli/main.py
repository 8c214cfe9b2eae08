"""The entry point: a lazy table of commands. Only this module turns errors into text and exit codes."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from broker.cli import interrupts
from broker.cli.commands import COMMANDS, EMBEDDED, GROUPS, HIDDEN, PANELS, PRICED

NAME_WIDTH = max(map(len, COMMANDS))
WITH_OTHER_WORDS = ("gpus", "jobs", "local")  # whose first argument may be one of `other_words`
BROKEN_PIPE = 141  # as a shell reports SIGPIPE: 128 + 13
COMMAND = "broker.command"  # in click's context: the running command; not set while help is shown


class LazyGroup(TyperGroup):
    """List commands from the table and import a command only when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        names: Any = dict.fromkeys(COMMANDS)  # Typer suggests near misses from the keys
        self.commands = names

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = {**COMMANDS, **HIDDEN}.get(cmd_name)
        if found is None:
            return None
        module = importlib.import_module(found[0])
        if cmd_name in GROUPS:
            app: typer.Typer = module.app
        else:
            app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
            app.command(name=cmd_name)(getattr(module, cmd_name.replace("exec", "exec_")))
        command = typer.main.get_command(app)
        command.name = cmd_name
        _check_numbers(command)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command; from here on, Ctrl-C raises KeyboardInterrupt in it."""
        if args and args[0] not in COMMANDS:
            from broker.cli.other_words import COMMANDS as OTHER_COMMANDS

            if args[0] in OTHER_COMMANDS:
                ctx.fail(f"No such command '{args[0]}': {OTHER_COMMANDS[args[0]]}")
        elif args[1:] and args[0] in WITH_OTHER_WORDS:
            from broker.cli.other_words import COMMANDS as OTHER_COMMANDS

            if hint := OTHER_COMMANDS.get(f"{args[0]} {args[1]}"):
                ctx.fail(f"No such command '{args[0]} {args[1]}': {hint}")
        found = super().resolve_command(ctx, args)
        if found[0] in EMBEDDED:
            from broker.cli.context import check_embedded

            check_embedded(str(found[0]))
        interrupts.raise_on_interrupt()
        if not {"-h", "--help"} & set(found[2]):
            words = found[2][:1] if found[0] in GROUPS else ()
            ctx.meta[COMMAND] = " ".join([str(found[0]), *words])
        return found

    def make_context(self, *args: Any, **attributes: Any) -> Any:
        try:
            return super().make_context(*args, **attributes)
        except BrokenPipeError:  # help that nothing reads
            sys.exit(BROKEN_PIPE)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # which Typer would turn into exit code 1
            sys.exit(BROKEN_PIPE)
        except KeyboardInterrupt:
            sys.stderr.write(interrupts.NOTE)
            raise typer.Exit(interrupts.CODE) from None
        except TyperException as error:
            _explain_flag(error)
            raise
        finally:
            if ctx.meta.get(COMMAND) in PRICED:
                _keep_prices_fresh()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section per panel, with the help texts of all sections aligned."""
        for panel, names in PANELS.items():
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(NAME_WIDTH), COMMANDS[name][1]) for name in names])


def _check_numbers(command: Any) -> None:
    """Let all numeric options of a command and its subcommands refuse `nan`, which is within every range, and `inf`."""
    for parameter in command.params:
        if parameter.type.name in ("float", "float range") and parameter.callback is None:
            parameter.callback = _require_finite
    for each in getattr(command, "commands", {}).values():
        _check_numbers(each)


def _require_finite(ctx: Any, param: Any, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        what = "nan is not a number" if math.isnan(value) else f"{value} is not a finite number"
        raise typer.BadParameter(what, ctx=ctx, param=param)
    return value


def _explain_flag(error: Any) -> None:
    """Replace the near misses of an unknown flag by its counterpart, if it is a flag of SkyPilot.

    A missing or additional argument gets a hint if SkyPilot's command has other arguments.
    """
    from broker.cli.other_words import ARGUMENTS_OF, FLAGS, FLAGS_OF

    name, context = getattr(error, "option_name", None) or "", getattr(error, "ctx", None)
    command = context.command_path.partition(" ")[2] if context else ""
    parameters = context.command.params if context else ()
    known = {flag for each in parameters for flag in (*each.opts, *each.secondary_opts)}
    general = FLAGS.get(name, "")
    named = set(re.findall(r"`(--?[a-z][a-z-]*)", general))  # the counterpart, which this command may lack
    if hint := FLAGS_OF.get(command, {}).get(name) or (general if named <= known else ""):
        error.message, error.possibilities = f"{error.message}: {hint}", None
    elif not name and command in ARGUMENTS_OF and type(error).__name__ in ("MissingParameter", "UsageError"):
        error.message = f"{error.format_message().rstrip('.')}: {ARGUMENTS_OF[command]}"


def _keep_prices_fresh() -> None:
    from broker.app.freshness import start_update_if_due
    from broker.clock import SystemClock

    start_update_if_due(SystemClock())


# Typer serves `--install-completion` and `--show-completion`; `broker.cli.completion` answers the common completions.
app = typer.Typer(
    cls=LazyGroup,
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},  # inherited by all commands
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from broker import __version__
        from broker.cli.render import print_line

        print_line(__version__)
        raise typer.Exit


@app.callback()
def root(
    debug: bool = typer.Option(False, "--debug", help="Show the stack trace of an error."),
    # Eager: answered during parsing, before a missing command is an error.
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Run training jobs to completion at the lowest cost, on any cloud."""


def _check_encoding(arguments: Sequence[str]) -> None:
    """Raise UsageError for bytes that are not UTF-8: they arrive as lone surrogates, which the store cannot hold."""
    for number, text in enumerate(arguments, start=1):
        if not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text):
            from broker.errors import UsageError

            raise UsageError(f"argument {number} is not UTF-8 text: {text[:40]!a}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _check_encoding(given)
        app(args=given, prog_name="broker")
    except KeyboardInterrupt:
        sys.stderr.write(interrupts.NOTE)
        sys.exit(interrupts.CODE)
    except BrokenPipeError:
        sys.exit(BROKEN_PIPE)
    except Exception as error:
        if "--debug" in given:
            raise
        from broker.cli.render import print_error

        sys.exit(print_error(error))

"""`broker jobs import`: convert a Slurm batch script to a task file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from broker.cli.render import print_line, print_note
from broker.errors import UsageError

TAB = "\ue000"  # PyYAML writes no block with tabs, although YAML admits them there


def import_script(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Slurm batch script.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write to a new file instead of stdout.", show_default=False
        ),
    ] = None,
) -> None:
    """Convert a Slurm batch script to a task file.

    Options without a counterpart are listed as comments at the top.
    """
    from broker.task.sbatch import import_sbatch

    try:
        imported = import_sbatch(decode_script(script.read_bytes()), *([str(output)] if output else ()))
    except OSError as error:
        raise UsageError(f"cannot read `{script}`: {(error.strerror or 'unknown').lower()}") from None
    except ValueError as error:
        raise UsageError(
            f"cannot convert `{script}`: {error}", hints=["correct the script, or write a task file"]
        ) from None
    text = write_task_file(script.name, imported.task, imported.notes)
    if output is None:
        print_line(text.rstrip("\n"))
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"`{output}` already exists", hints=["choose another file, or delete it"]) from None
    except OSError as error:
        raise UsageError(f"cannot write `{output}`: {(error.strerror or 'unknown').lower()}") from None
    print_note(f"try it: `broker plan {output}`")


def decode_script(content: bytes) -> str:
    """Return the text of a script, without a byte order mark: in UTF-8, or in Latin-1 if it is not valid UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def write_task_file(source: str, task: object, notes: tuple[str, ...]) -> str:
    """Return the YAML, with the notes as comments and the program as a literal block."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        if "\n" not in text:
            return dumper.represent_scalar("tag:yaml.org,2002:str", text)
        return dumper.represent_scalar("tag:yaml.org,2002:str", text.replace("\t", TAB), style="|")

    Dumper.add_representer(str, represent)
    comments = [f"# From {source}, by `broker jobs import`.", *(f"# - {note}" for note in notes)]
    text = yaml.dump(task, Dumper=Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return "\n".join(comments) + "\n" + text.replace(TAB, "\t")

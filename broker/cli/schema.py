"""`broker schema`: print the JSON Schema of task files, for completion and checks in editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from broker.cli.render import print_line, print_note


def schema(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead of stdout.", show_default=False),
    ] = None,
) -> None:
    """Print the JSON Schema of task files, for editors."""
    import json

    from broker.errors import UsageError
    from broker.task.schema import make_schema

    text = json.dumps(make_schema(), indent=2)
    if output is None:
        print_line(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write `{output}`: {(error.strerror or 'unknown').lower()}") from None
    print_note(f"to use it in an editor, begin task files with `# yaml-language-server: $schema={output}`")

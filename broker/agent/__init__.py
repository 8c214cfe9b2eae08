"""The program that broker ships to nodes: standard library only, imports nothing else of broker.

A node gets the files side by side, without this one, so they import each other by bare names.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
FILES = tuple(sorted(path.name for path in FOLDER.glob("agent*.py")))

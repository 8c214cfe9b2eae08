"""The program that broker installs on nodes: standard library only, no imports from the rest of broker.

A node gets all files but this one in one folder, so they import each other by bare names.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
FILES = tuple(sorted(path.name for path in FOLDER.glob("agent*.py")))

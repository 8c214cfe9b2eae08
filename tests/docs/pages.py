"""Markdown as the tests need it: links, anchors, code blocks, `broker` command lines and names of files."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHANGELOG = ROOT / "docs/CHANGELOG.md"
RUN_MARK = "<!-- run -->"  # before a code block: a test runs its commands

FENCE = re.compile(r"^( *)(```+|~~~+)(\w*)")
HEADING = re.compile(r"^(#{1,6}) +(.*?) *#*$")
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
IMAGE = re.compile(r"!\[[^\]]*\]\(([^()\s]+)\)")
INLINE = re.compile(r"`([^`\n]+)`")
SHELL_OPERATORS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "<<"}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A code block, fenced or indented by four spaces. `line` counts from 1."""

    page: Path
    line: int
    language: str
    text: str
    is_run: bool = False


@dataclass(frozen=True, kw_only=True)
class Command:
    """One `broker` invocation without the program's name."""

    page: Path
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: broker {shlex.join(self.words)}"


def list_pages() -> list[Path]:
    """List all Markdown that a reader may open: top level, docs and the templates of the repository."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")])


def list_blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    number, is_run = 0, False
    while number < len(lines):
        line = lines[number]
        if line.strip() == RUN_MARK:
            is_run = True
        elif line.strip():
            block, end = _read_block(page, lines, number, is_run=is_run)
            if block is not None:
                yield block
                number, is_run = end, False
                continue
            is_run = False
        number += 1


def _read_block(page: Path, lines: list[str], start: int, *, is_run: bool) -> tuple[Block | None, int]:
    if fence := FENCE.match(lines[start]):
        end = start + 1
        while end < len(lines) and not lines[end].strip().startswith(fence[2]):
            end += 1
        body = lines[start + 1 : end]
        after = end + 1
        language = fence[3]
    elif lines[start].startswith("    ") and (start == 0 or not lines[start - 1].strip()):
        end = start
        while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
            end += 1
        body, after, language = [line[4:] for line in lines[start:end]], end, ""
    else:
        return None, start
    return Block(page=page, line=start + 1, language=language, text="\n".join(body) + "\n", is_run=is_run), after


def list_prose(page: Path) -> Iterator[tuple[int, str]]:
    """List the lines outside code blocks, with their numbers."""
    blocked: set[int] = set()
    for block in list_blocks(page):
        blocked |= set(range(block.line, block.line + block.text.count("\n") + 2 * bool(block.language)))
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if number not in blocked:
            yield number, line


def list_links(page: Path) -> Iterator[tuple[int, str]]:
    for number, line in list_prose(page):
        text = INLINE.sub(lambda code: "`" + "x" * len(code[1]) + "`", line)
        for match in (*LINK.finditer(text), *IMAGE.finditer(text)):
            yield number, match[1]


def list_anchors(page: Path) -> set[str]:
    """List anchors as GitHub makes them: lower case, no punctuation, hyphens for spaces, `-1` after a repeated one."""
    found: set[str] = set()
    for _, line in list_prose(page):
        if heading := HEADING.match(line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[2]).replace("`", "").lower()
            kept = "".join(c for c in words if c in "-_ " or unicodedata.category(c)[0] in "LN")
            base = anchor = kept.replace(" ", "-")
            repeat = 0
            while anchor in found:
                repeat += 1
                anchor = f"{base}-{repeat}"
            found.add(anchor)
    return found


def list_commands(page: Path) -> Iterator[Command]:
    """List every `broker ...` of a code block, and every one in backticks within a sentence."""
    for block in list_blocks(page):
        if block.language in ("", "sh", "bash", "console"):
            yield from _read_script(block)
    for number, line in list_prose(page):
        for code in INLINE.findall(line):
            if code.startswith("broker ") and "..." not in code and "…" not in code:
                for words in expand(split_command(code)):
                    yield Command(page=page, line=number, words=words)


def list_block_commands(block: Block) -> Iterator[Command]:
    yield from _read_script(block)


def _read_script(block: Block) -> Iterator[Command]:
    joined = block.text.replace("\\\n", "  ")
    for offset, line in enumerate(joined.splitlines()):
        text = line.strip().removeprefix("$ ").removeprefix("#   ")
        text = re.sub(r"^(?:[A-Z_]+=\S* +)+", "", text).removeprefix(".venv/bin/")
        if text.startswith("broker "):
            yield Command(page=block.page, line=block.line + offset, words=split_command(text))


def split_command(text: str) -> tuple[str, ...]:
    """Return the words after `broker`, up to a comment or to what the shell takes for itself."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = list(lexer)[1:]
    if any("|" in word and word != "|" for word in words):
        return tuple(words)
    for place, word in enumerate(words):
        if word in SHELL_OPERATORS:
            return tuple(words[:place])
    return tuple(words)


def expand(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Expand `state info|backup` to two commands; the splitter keeps `|` as a word of its own."""
    choices: list[list[str]] = []
    is_joined = False
    for word in words:
        if word == "|":
            is_joined = True
        elif is_joined:
            choices[-1].append(word)
            is_joined = False
        else:
            choices.append([word])
    return [tuple(each) for each in product(*choices)]

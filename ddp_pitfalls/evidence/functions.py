"""The fragment that lists the checks for a job of one's own: every public function of checks.py, from its docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from ddp_pitfalls import patterns
from ddp_pitfalls.evidence.entries import Entry
from ddp_pitfalls.evidence.markup import code, code_block, join, paragraph, prose
from ddp_pitfalls.evidence.source import parsed

CHECKS = Path("ddp_pitfalls") / "checks.py"
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")


def functions(checks: str, entries: Sequence[Entry]) -> str:
    """For each function: its name, what it is for, the pages that use it, and its code where that stands alone."""
    blocks = []
    for node in public(checks):
        blocks += [f"## <code>{node.name}</code> {{ #{node.name} }}", paragraph(prose(_first_sentence(node)))]
        blocks += [_pages(node.name, entries), _code(node, checks)]
    return join(*blocks) if blocks else join("There is no check yet.")


def public(checks: str) -> list[ast.FunctionDef]:
    """The functions of checks.py that are for users."""
    return [node for node in parsed(checks, CHECKS).body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def names(entry: Entry, function: str) -> bool:
    """Whether the prose of a page names a function."""
    return re.search(rf"\b{function}\b", entry.page) is not None


def copies(checks: str) -> dict[str, str]:
    """Each function that stands alone, with its imports, by name: for the pages that show it."""
    return {name: patterns.pattern(checks, name) for name in patterns.names(checks)}


def _first_sentence(node: ast.FunctionDef) -> str:
    return SENTENCE.split((ast.get_docstring(node) or "").replace("``", "`"))[0]


def _pages(name: str, entries: Sequence[Entry]) -> str:
    """Links to the pages whose prose names the function."""
    used = [e for e in entries if names(e, name)]
    links = ", ".join(f'<a href="../pitfalls/{quote(e.id)}/#check-your-own-run">{prose(e.front.title)}</a>' for e in used)
    return paragraph(f"Used on: {links}") if links else ""


def _code(node: ast.FunctionDef, checks: str) -> str:
    """The function with its imports, to be copied; for one that needs others of the file, its parameters."""
    try:
        marked = patterns.pattern(checks, node.name)
    except patterns.BadPattern:
        return paragraph(f"{code(f'{node.name}({ast.unparse(node.args)})')}: copy {code(CHECKS.as_posix())} whole.")
    block = code_block(marked, f"{node.name}, from {CHECKS.as_posix()}")
    summary = f"<summary>Copy {code(node.name)}</summary>"
    return f'<details class="copy" data-search-exclude>{summary}\n{block}</details>'

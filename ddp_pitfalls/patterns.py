"""The copyable patterns of a script: what stands between two markers, with the imports that it uses. Imports nothing of the project."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator

START = re.compile(r"^\s*# --8<-- \[start:(?P<name>.+)\]\s*$")
ALLOWED = {"torch", "lightning", *sys.stdlib_module_names}


class BadPattern(Exception):
    """A pattern that nobody could copy; the message says why."""


def names(source: str) -> list[str]:
    """The names of the patterns in a script, in its order."""
    return [found["name"] for line in source.splitlines() if (found := START.match(line))]


def pattern(source: str, name: str) -> str:
    """The pattern ``name`` of a script as a module that stands alone, with a line break at its end.

    Of the script's imports at the top level it gets those that it uses. Raises BadPattern where there is no such pattern, or where
    it uses a name that would not be there: one that the script defines elsewhere, or imports from this project.
    """
    section = _section(source, name)
    try:
        used = _undefined(section)
        imports = _imports(source, used)
    except SyntaxError as error:
        raise BadPattern(f"pattern {name!r} is not Python: {error}") from error
    if unknown := used - {_bound(alias) for node in imports for alias in node.names}:
        raise BadPattern(f"pattern {name!r} uses {', '.join(sorted(unknown))}, defined elsewhere: what readers copy must stand alone")
    if others := [ast.unparse(node) for node in imports if not _packages(node) <= ALLOWED]:
        raise BadPattern(f"pattern {name!r} uses {'; '.join(others)}: what readers copy uses torch, lightning and the standard library")
    return _head(source, imports) + section


def _section(source: str, name: str) -> str:
    lines = source.splitlines()
    marks = [number for number, line in enumerate(lines) if (found := START.match(line)) and found["name"] == name]
    ends = [number for number, line in enumerate(lines) if line.strip() == f"# --8<-- [end:{name}]"]
    if len(marks) != 1 or len(ends) != 1 or ends < marks:
        raise BadPattern(f"pattern {name!r} needs one line '# --8<-- [start:{name}]' and, after it, one '# --8<-- [end:{name}]'")
    inside = [line for line in lines[marks[0] + 1 : ends[0]] if not START.match(line) and not line.strip().startswith("# --8<-- [end:")]
    return textwrap.dedent("\n".join(inside)).strip("\n") + "\n"


def _undefined(section: str) -> set[str]:
    """The global names that a module uses and does not define."""
    module = symtable.symtable(section, "pattern", "exec")
    defined = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported()}
    used = {s.get_name() for s in module.get_symbols() if s.is_referenced()}
    used |= {s.get_name() for table in _inner(module) for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    return used - defined - set(dir(builtins))


def _inner(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _inner(child)


def _imports(source: str, used: set[str]) -> list[ast.Import | ast.ImportFrom]:
    """The imports at the top level of a script, cut down to the names in ``used``."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in nodes:
        node.names = [alias for alias in node.names if _bound(alias) in used]
    return [node for node in nodes if node.names]


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _packages(node: ast.Import | ast.ImportFrom) -> set[str]:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else ["." * node.level + (node.module or "")]
    return {module.partition(".")[0] for module in modules}


def _head(source: str, imports: list[ast.Import | ast.ImportFrom]) -> str:
    """The imports, with the blank lines that part their groups in the script, and two after them."""
    lines = source.splitlines()
    head = ""
    for before, node in zip([None, *imports], imports):
        if before is not None and not all(line.strip() for line in lines[before.lineno : node.lineno]):
            head += "\n"
        head += ast.unparse(node) + "\n"
    return head + "\n\n" if head else ""

"""What a script declares, read from its text: nothing is imported."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_pitfalls.catalogue import Unknown

MARKER = re.compile(r"^\s*# --8<-- \[(start|end):.*\]\s*$")  # the ends of a copyable pattern


@dataclass(frozen=True)
class Declared:
    """A variant as a script declares it: see ``ddp_pitfalls.script.variant``. ``kind`` is a word."""

    name: str
    kind: str = "silent"
    needs: tuple[str, ...] = ()
    varies: str = ""
    protects: str = ""


def variants(source: str, path: Path) -> list[Declared]:
    """The variants of a script, in its order. Raises Unknown where it has none or is no Python."""
    tree = parsed(source, path)
    constants = {t.id: node.value for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    found = []
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            marks = [d for d in function.decorator_list if _name(d.func if isinstance(d, ast.Call) else d) == "variant"]
            found += [_declared(function.name, mark, constants) for mark in marks]
    if not found:
        raise Unknown(f"{path}: no function is marked @variant")
    return found


def parsed(source: str, path: Path) -> ast.Module:
    """The syntax tree of a script. Raises Unknown."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise Unknown(f"{path}: is not Python: {error}") from error


def _declared(name: str, mark: ast.expr, constants: Mapping[str, ast.expr]) -> Declared:
    if not isinstance(mark, ast.Call):
        return Declared(name)
    given = {k.arg: constants.get(k.value.id, k.value) if isinstance(k.value, ast.Name) else k.value for k in mark.keywords}
    kind = mark.args[0] if mark.args else given.get("kind")
    if isinstance(kind, ast.Name):
        kind = constants.get(kind.id)
    needs = _literal(given.get("needs"), ())
    word = _name(kind.func).lower() if isinstance(kind, ast.Call) else "silent"
    varies, protects = (str(_literal(given.get(key), "")) for key in ("varies", "protects"))
    return Declared(name, word, (needs,) if isinstance(needs, str) else tuple(needs), varies, protects)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _literal(node: ast.expr | None, default: str | tuple[str, ...]) -> str | tuple[str, ...]:
    try:
        value = ast.literal_eval(node) if node is not None else default
    except ValueError:
        return default
    return value if isinstance(value, str) else tuple(str(v) for v in value) if isinstance(value, (list, tuple)) else default


def plain_lines(source: str) -> list[tuple[int, str]]:
    """The lines of a script with their numbers, without the markers of patterns and the blank lines that they leave behind."""
    kept: list[tuple[int, str]] = []
    for number, line in enumerate(source.splitlines(), 1):
        if MARKER.match(line) or (not line.strip() and len(kept) >= 2 and not kept[-1][1].strip() and not kept[-2][1].strip()):
            continue
        kept.append((number, line))
    return kept


def fixed_code(repro: str, fix: str, path: Path) -> dict[str, str]:
    """What the fix does, by function: the body of each variant that is not as in the repro, and other such functions whole."""
    before, after = _functions(repro, path), _functions(fix, path)
    names = {v.name for v in variants(fix, path)}
    protected = {v.name for v in variants(fix, path) if v.protects}  # nothing in them is a fix
    changed = {name: text for name, text in after.items() if before.get(name) != text and name not in protected}
    chosen = changed or {name: after[name] for name in names}
    return {name: _body(text) if name in names else text for name, text in chosen.items()}


def _functions(source: str, path: Path) -> dict[str, str]:
    lines = source.splitlines()
    found = {}
    for node in parsed(source, path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            variant = any(_name(d.func if isinstance(d, ast.Call) else d) == "variant" for d in node.decorator_list)
            found[node.name] = "\n".join(lines[(node.lineno if variant else first) - 1 : node.end_lineno])
    return found


def _body(function: str) -> str:
    node = ast.parse(function).body[0]
    assert isinstance(node, ast.FunctionDef)
    lines = function.splitlines()
    first = node.body[0].lineno
    while first > node.lineno + 1 and lines[first - 2].strip().startswith("#"):
        first -= 1
    return textwrap.dedent("\n".join(lines[first - 1 :]))

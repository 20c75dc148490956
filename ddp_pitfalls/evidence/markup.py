"""Blocks of a fragment. Whatever was measured or read goes through ``text`` and cannot become markup, neither HTML nor Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from pygments import lex
from pygments.lexers import BashLexer, PythonLexer
from pygments.token import STANDARD_TYPES

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
SPECIAL = re.compile(r"""[&<>"'`*_{}\[\]()#+!|\\~^=:$@%]""")  # to HTML, to Markdown and its extensions, to templates
CELL = re.compile(r"(<t[hd]\b[^>]*)>")
PLAIN = {"", "n", "w"}  # Pygments classes that have no colour of their own: a third of all tokens
CODE_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def text(value: str) -> str:
    """Any string as one line of plain text, for HTML and for Markdown."""
    line = " ".join(ANSI.sub("", value).split())
    return SPECIAL.sub(lambda found: f"&#{ord(found[0])};", UNPRINTABLE.sub("\ufffd", line))


def code(value: str) -> str:
    """Any string as inline code."""
    return f"<code>{text(value) or '(empty)'}</code>"


def numbers(value: str) -> str:
    """Numbers as inline code, which is not broken within one."""
    return f'<code class="n">{text(value)}</code>'


def codes(values: Iterable[str]) -> str:
    """Strings as inline code, with commas."""
    return ", ".join(code(value) for value in values)


def prose(value: str) -> str:
    """A sentence of the front matter: plain text in which backticks mark code."""
    parts = CODE_SPAN.split(value)  # plain, code, plain, ...
    spaced = (f"<code>{text(part)}</code>" if i % 2 else _keep_ends(part) for i, part in enumerate(parts))
    return "".join(spaced).strip()


def _keep_ends(part: str) -> str:
    before, after = (" " if part[:1].isspace() else ""), (" " if part[-1:].isspace() else "")
    return f"{before}{text(part)}{after}" if part.strip() else before


def paragraph(inner: str) -> str:
    """A paragraph of markup that is safe already."""
    return f"<p>{inner}</p>"


def bullets(items: Iterable[str], cls: str = "") -> str:
    """A list of markup that is safe already."""
    return "\n".join([f'<ul class="{cls}">' if cls else "<ul>", *(f"<li>{item}</li>" for item in items), "</ul>"])


def join(*blocks: str) -> str:
    """Blocks as a fragment."""
    return "\n\n".join(block.strip("\n") for block in blocks if block) + "\n"


def table(head: Sequence[str], rows: Iterable[str], label: str, caption: str = "", cls: str = "", stacks: bool = False) -> str:
    """A table with a header row, in a box that scrolls where the screen is narrow; the label names the box for screen readers.

    Where ``stacks``, the cells of a row stand one below the other on a narrow screen, each under the name of its column. Cells, rows and
    caption are markup that is safe already. A table with a class is one over all pitfalls and is kept from the search.
    """
    apart = " data-search-exclude" if cls or stacks else ""
    classes = " ".join(filter(None, ["facts", cls, "stacks" if stacks else ""]))
    lines = [f'<div class="{classes}" role="region" tabindex="0" aria-label="{text(label)}"{apart}><table class="facts-t">']
    if caption:
        lines.append(f"<caption>{caption}</caption>")
    lines.append("<thead><tr>" + "".join(f'<th scope="col">{cell}</th>' for cell in head) + "</tr></thead>")
    body = [_labelled(row, head) for row in rows] if stacks else rows
    return "\n".join([*lines, "<tbody>", *body, "</tbody></table></div>"])


def _labelled(row: str, head: Sequence[str]) -> str:
    """A row whose cells know the name of their column, which the style sheet shows on a narrow screen."""
    names = iter(head)
    return CELL.sub(lambda found: f'{found[1]} data-label="{next(names)}">', row)


def row(head: str, cells: Iterable[str], span: int = 1) -> str:
    """A table row that begins with its header; each cell goes over ``span`` columns."""
    wide = f' colspan="{span}"' if span > 1 else ""
    return f'<tr><th scope="row">{head}</th>' + "".join(f"<td{wide}>{cell}</td>" for cell in cells) + "</tr>"


def code_block(source: str, title: str = "", language: str = "python") -> str:
    """Source with a copy button, which copies exactly ``source`` without its last newline."""
    lines = "\n".join(highlighted(source.rstrip("\n").split("\n"), language))
    name = f'<span class="filename">{text(title)}</span>' if title else ""
    return f'<div class="highlight">{name}<pre><span></span><code>{lines}\n</code></pre></div>'


def highlighted(lines: Sequence[str], language: str = "python") -> list[str]:
    """Lines of source as HTML, each with the Pygments classes that the theme colours."""
    return _highlighted("\n".join(lines), language)[: len(lines)]


@lru_cache(maxsize=1000)  # while the pages are served, most scripts are the same from one edit to the next
def _highlighted(source: str, language: str) -> list[str]:
    lexer = (BashLexer if language == "bash" else PythonLexer)(stripnl=False)
    done, current = [], ""
    for kind, value in lex(source + "\n", lexer):
        cls = next(STANDARD_TYPES[k] for k in reversed(kind.split()) if k in STANDARD_TYPES)
        for i, part in enumerate(value.split("\n")):
            if i:
                done.append(current)
                current = ""
            current += _token(part, cls)
    return done


def _token(part: str, cls: str) -> str:
    escaped = html.escape(part, quote=False)
    return f'<span class="{cls}">{escaped}</span>' if cls not in PLAIN and part.strip() else escaped

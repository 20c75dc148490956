"""The difference of two scripts as an HTML table: Python colours, line numbers, and signs that are text for screen readers.

Numbers and signs come from the style sheet, so that selecting and copying takes code only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

from ddp_pitfalls.evidence.markup import highlighted, text

OPENING = re.compile(r"""(<span class="[op]">[^<]*[.(\[{,]</span>)""")  # a long line may be broken after these
CONTEXT = 3  # unchanged lines around a change; a gap of no more lines is shown in full

Line = tuple[int, str]  # its number in the file, and the line


def unified(before: Sequence[Line], after: Sequence[Line], label: str) -> str:
    """The table; ``label`` names it for screen readers."""
    old, new = highlighted([line for _, line in before]), highlighted([line for _, line in after])
    rows = []
    for sign, i, j in _rows([line for _, line in before], [line for _, line in after]):
        if sign == "-":
            rows.append(_row("pd-del", "−", before[i][0], "", old[i], "removed"))  # noqa: RUF001 a minus sign is as wide as a plus
        elif sign == "+":
            rows.append(_row("pd-add", "+", "", after[j][0], new[j], "added"))
        elif sign == " ":
            rows.append(_row("pd-eq", "", before[i][0], after[j][0], old[i], ""))
        else:
            rows.append(f'<tr class="pd-gap"><td colspan="4">{i} unchanged lines</td></tr>')
    opening = f'<div class="pd highlight" data-search-exclude role="region" tabindex="0" aria-label="{text(label)}">'
    return "\n".join([opening + '<table class="pd-t"><tbody>', *rows, "</tbody></table></div>"])


def _rows(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """A sign and two indices for each row; for "@" the first of them is how many lines are left out."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    opcodes = matcher.get_opcodes()
    for n, (tag, i1, i2, j1, j2) in enumerate(opcodes):
        if tag != "equal":
            yield from (("-", i, j1) for i in range(i1, i2))
            yield from (("+", i2, j) for j in range(j1, j2))
            continue
        lead = CONTEXT if n > 0 else 0  # context after the change before this stretch
        trail = CONTEXT if n < len(opcodes) - 1 else 0  # and before the next change
        hidden = i2 - i1 - lead - trail
        if hidden <= CONTEXT:
            lead, hidden = i2 - i1, 0
        yield from ((" ", i1 + k, j1 + k) for k in range(lead))
        if hidden:
            yield ("@", hidden, 0)
            yield from ((" ", i2 - k, j2 - k) for k in range(trail, 0, -1))


def _row(cls: str, sign: str, old: int | str, new: int | str, line: str, word: str) -> str:
    spoken = f'<span class="pd-sr">{word}: </span>' if word else ""
    indent = len(line) - len(line.lstrip(" "))
    style = f' style="--indent: {indent}"' if indent else ""  # what does not fit goes on below, further to the right
    breakable = OPENING.sub(r"\1<wbr>", line) or "<br>"
    cells = [
        f'<td class="pd-n" data-n="{old}"></td><td class="pd-n" data-n="{new}"></td>',
        f'<td class="pd-s" data-s="{sign}"></td><td class="pd-c">{spoken}<code{style}>{breakable}</code></td>',
    ]
    return f'<tr class="{cls}">{"".join(cells)}</tr>'

"""The generated parts of the pages: what they say, that nothing measured becomes markup, and that a broken page ends the build."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
import yaml

from ddp_pitfalls import findings, results
from ddp_pitfalls.catalogue import ROOT, Unknown, find
from ddp_pitfalls.checks import FINDINGS
from ddp_pitfalls.evidence import chart, diff, functions, markup, overview, programs, source, write
from ddp_pitfalls.evidence import findings as evidence_findings
from ddp_pitfalls.evidence.entries import check_page, entries, skeleton
from ddp_pitfalls.evidence.sections import fragments
from ddp_pitfalls.findings import Watched
from ddp_pitfalls.measure import Dies, Hangs, Raises
from ddp_pitfalls.results import Curve, Environment, Failure, Measured, OnRank, PairResult, Results, Told, VariantResult
from ddp_pitfalls.script import load

HOSTILE = (
    '</td></tr></table></div><script>alert("1")</script> **b** _i_ `c` ``d`` | {{ 7 * 7 }} {% x %} [a](http://e) ![i](x) <!-- &lt; &amp; '
    '--8<-- "pyproject.toml" :smile: { .cls #id } \\ ~~~ $x$ @y == # ## 1. - + <b onclick=x>\''
)
LINES = '\n\n# heading\n\n--8<-- "pyproject.toml"\n\n```\n</code></pre></div>\n    indented\n\x02wzxhzdk:0\x03 \x1b[31mred\x1b[0m\n---\n'
CPU = Environment("2.13.0", "2.6.6", "cpu", "gloo", 2, "3.11.7", "x86_64, 2 CPU cores")
OLD = Environment("2.9.1", "2.5.0", "cpu", "gloo", 2, "3.11.7", "x86_64, 2 CPU cores")
FOUR = Environment("2.13.0", "2.6.6", "cpu", "gloo", 4, "3.11.7", "x86_64, 2 CPU cores")
GPU = Environment("2.4.0", "2.4.0", "cuda", "nccl", 2, "3.11.7", "x86_64, a GPU")

SCRIPT = '''"""A title."""

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement


@variant{kind}
def shown(fabric):
    gathered = fabric.rank{change}
    return Measurement("sum", gathered, 1, 0)


if __name__ == "__main__":
    main()
'''
BUG, FIX = "  # BUG: it is not gathered", " + 1  # FIX: it is"


def pair(repro: VariantResult, fix: VariantResult, name: str = "shown", date: str = "2026-01-02") -> PairResult:
    return PairResult(date, {name: repro}, {name: fix})


def measured(verdict: str, values: Sequence[object], *, kind: str = "silent", curve: bool = False) -> VariantResult:
    curves = [Curve("step", "loss", [0.5, 0.25 * (r + 1)]) if curve else None for r in range(len(values))]
    return VariantResult(
        verdict, kind, ranks=[OnRank(r, Measured("sum", v, 1, 0), curve=c) for r, (v, c) in enumerate(zip(values, curves))]
    )


SILENT = pair(measured("reproduced", [0, 0]), measured("fixed", [1, 1]))


def page(id: str, title: str = "A title", says: str = "It says so.", text: str = "What `people` see.") -> str:
    front = {
        "title": title,
        "tags": ["DistributedDataParallel"],
        "symptoms": [{"group": "hangs", "text": text}],
        "sources": [{"title": "A thread", "url": "https://example.org/a?b=1&c=2", "says": says}],
    }
    body = "\n\n".join(f"{part}\n\nProse.\n" if part.startswith("## ") else part for part in skeleton(id, title))
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n{body}\n"


def project(
    root: Path, ids: Sequence[str] = ("some-pitfall",), kind: str = "", recorded: Mapping[Environment, PairResult] | None = None
) -> Path:
    """A project with these pitfalls, each with the same records."""
    for folder in ("repros", "fixes", "docs/pitfalls", "results"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for id in ids:
        stem = id.replace("-", "_")
        (root / "repros" / f"{stem}.py").write_text(SCRIPT.format(kind=kind, change=BUG))
        (root / "fixes" / f"{stem}.py").write_text(SCRIPT.format(kind="", change=FIX))
        (root / "docs" / "pitfalls" / f"{id}.md").write_text(page(id))
    for environment, result in (recorded or {}).items():
        results.write(root / "results", Results(results.FORMAT, environment, dict.fromkeys(ids, result)))
    return root


def site(root: Path) -> Path:
    """What mkdocs needs besides the pages."""
    for name in ("mkdocs.yml", "hooks.py"):
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / "docs" / "assets", root / "docs" / "assets")
    for path in (ROOT / "docs").glob("*.md"):
        text = re.sub(r"\]\(pitfalls/[\w-]+\.md", "](pitfalls.md", path.read_text())  # those that prose names are not here
        (root / "docs" / path.name).write_text(text)
    (root / "ddp_pitfalls").mkdir()
    shutil.copy(ROOT / "ddp_pitfalls" / "checks.py", root / "ddp_pitfalls" / "checks.py")
    return root


def mkdocs(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, env=with_us())


def with_us() -> dict[str, str]:
    """The environment of a process that imports this project, wherever it runs."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "NO_MKDOCS_2_WARNING": "1"}


def made(root: Path) -> dict[str, str]:
    """The fragments of the only pitfall of a project, by name."""
    [entry], _ = entries(root)
    return fragments(entry)


class Reader(HTMLParser):
    """The elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.parts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.parts).split())


def text_of(fragment: str) -> str:
    return Reader(fragment).text


# What the fragments say


def test_a_silent_pitfall(tmp_path: Path) -> None:
    parts = made(project(tmp_path, recorded={CPU: SILENT}))
    top, end = text_of(parts["top.md"]), text_of(parts["end.md"])
    assert "How it shows: silently: it runs on with a wrong result, and nothing says so." in top
    assert "On the CPU: verified: shown. Recorded 2026-01-02 with torch 2.13.0, lightning 2.6.6, 2 ranks on the CPU (gloo)." in top
    assert "On a GPU: not measured yet." in top
    assert "Nobody: no warning, no error." in end
    assert "A thread: It says so." in end
    evidence = parts["evidence.md"]
    assert re.findall("^## (.*)", evidence, re.M) == ["Run it", "What changes", "Copy this", "Measured", "Versions"]
    assert "nox -s repro-some-pitfall" in text_of(evidence)
    assert "python fixes/some_pitfall.py" in text_of(evidence)
    rows = re.findall("<tr>.*?</tr>", evidence.partition("## Measured")[2])
    assert [text_of(cell) for row in rows for cell in re.findall("<t[hd].*?</t[hd]>", row)][:15] == [
        *("Run", "Rank 0", "Rank 1"),
        *("Repro: reproduced", "0", "0"),
        *("Fix: fixed", "1", "1"),
        *("Healthy", "1", "1"),
        *("Broken", "0", "0"),
    ]


def test_nothing_measured(tmp_path: Path) -> None:
    parts = made(project(tmp_path, kind='(needs="gpu")'))
    assert "On the CPU" not in text_of(parts["top.md"])  # its only variant needs a GPU
    assert "On a GPU: not measured yet. These variants need one: shown." in text_of(parts["top.md"])
    assert "Not measured yet." in text_of(parts["evidence.md"])
    assert "Not measured yet." in text_of(parts["end.md"])


def test_a_hang_says_where_each_rank_stands(tmp_path: Path) -> None:
    hang = VariantResult("reproduced", "hangs", ranks=[OnRank(0, line="fabric.save(path)"), OnRank(1, Measured("sum", 5, 1, 0))])
    parts = made(project(tmp_path, kind='(Hangs({0: "fabric.save"}))', recorded={CPU: pair(hang, measured("fixed", [1, 1], kind="hangs"))}))
    evidence = text_of(parts["evidence.md"])
    assert "stands at fabric.save(path)" in evidence
    assert "finished: 5" in evidence
    assert "it hangs: it stands still, without an error" in text_of(parts["top.md"])
    assert "Nobody: the ranks stand still, with no warning and no error." in text_of(parts["end.md"])


@pytest.mark.parametrize(
    ("kind", "declared", "verb"),
    [("raises", '(Raises(RuntimeError, "x"))', "A rank raises"), ("dies", '(Dies("SIGABRT", "x"))', "A rank ends with")],
)
def test_an_error_or_a_death(tmp_path: Path, kind: str, declared: str, verb: str) -> None:
    told = [Told("UserWarning", "beware"), Told("error output", "boom")]
    end = VariantResult("reproduced", kind, failure=Failure("Name", "boom", "run()"), told=told)
    parts = made(project(tmp_path, kind=declared, recorded={CPU: pair(end, measured("fixed", [1, 1], kind=kind))}))
    assert "Name: boom, at run()" in text_of(parts["evidence.md"])
    assert f"{verb} Name: boom, at run(). The ranks are also told: UserWarning: beware." in text_of(parts["end.md"])


def test_a_silent_pitfall_that_warns(tmp_path: Path) -> None:
    warned = msgspec.structs.replace(measured("reproduced", [0, 0]), told=[Told("UserWarning", "beware")])
    parts = made(project(tmp_path, recorded={CPU: pair(warned, measured("fixed", [1, 1]))}))
    assert "UserWarning: beware." in text_of(parts["end.md"])
    assert "Nobody" not in parts["end.md"]


def test_a_layer_that_protects_its_user(tmp_path: Path) -> None:
    root = project(tmp_path)
    path = root / "fixes" / "some_pitfall.py"
    path.write_text(path.read_text() + '\n\n@variant(protects="the layer checks it")\ndef safe(fabric):\n    return shown(fabric)\n')
    safe = msgspec.structs.replace(measured("fixed", [1, 1]), protects="the layer checks it")
    both = PairResult("2026-01-02", SILENT.repro, {**SILENT.fix, "safe": safe})
    results.write(root / "results", Results(results.FORMAT, CPU, {"some-pitfall": both}))
    parts = made(root)
    assert "verified: shown; protected: safe (the layer checks it)." in text_of(parts["top.md"])
    assert "Protected: the layer checks it." in text_of(parts["evidence.md"])
    assert text_of(parts["end.md"]).count("Nobody") == 1


def test_what_is_not_as_documented_is_told(tmp_path: Path) -> None:
    wrong = pair(msgspec.structs.replace(measured("not reproduced", [1, 1]), why="every rank is healthy"), measured("fixed", [1, 1]))
    parts = made(project(tmp_path, recorded={CPU: wrong}))
    assert "not reproduced there: shown (every rank is healthy)" in text_of(parts["top.md"])
    assert "not reproduced there" in text_of(parts["evidence.md"])
    assert "Reproduced in no recorded environment." in text_of(parts["end.md"])


def test_numbers_that_vary_are_not_invented(tmp_path: Path) -> None:
    varies = pair(VariantResult("reproduced", "silent"), VariantResult("fixed", "silent"))
    parts = made(project(tmp_path, kind='(varies="a race")', recorded={CPU: varies}))
    assert "Repro: reproduced its numbers are not kept: a race" in re.sub("\n", " ", text_of(parts["evidence.md"].replace("<td>", " <td>")))


def test_the_environment_whose_numbers_are_shown(tmp_path: Path) -> None:
    def result(value: int) -> PairResult:
        return pair(measured("reproduced", [value, 0]), measured("fixed", [1, 1]))

    recorded = {OLD: result(-1), FOUR: result(-2), CPU: result(-3)}
    evidence = text_of(made(project(tmp_path, recorded=recorded))["evidence.md"])
    assert "-3" in evidence  # newest torch, two ranks
    assert "-1" not in evidence.replace("2026-01", "")
    parts = made(project(tmp_path, recorded={GPU: result(-4)}))
    assert "-4" in text_of(parts["evidence.md"])  # a GPU goes first
    assert "On a GPU: verified: shown. Recorded 2026-01-02 with torch 2.4.0, lightning 2.4.0, 2 ranks with a GPU each (nccl)." in text_of(
        parts["top.md"]
    )
    assert "Recorded in 4 environments" in text_of(parts["top.md"])
    assert parts["evidence.md"].partition("## Versions")[2].count("verified") == 4
    unmeasured = VariantResult("not measured", "silent", why="needs 2 gpus")
    parts = made(project(tmp_path, recorded={GPU: pair(unmeasured, unmeasured)}))
    assert "-3" in text_of(parts["evidence.md"])  # a GPU that measured nothing does not hide the CPU's numbers
    assert "not measured: shown (needs 2 gpus)" in text_of(parts["evidence.md"])


def test_variants_with_the_same_numbers_share_a_table(tmp_path: Path) -> None:
    root = project(tmp_path)
    for path in (root / "repros" / "some_pitfall.py", root / "fixes" / "some_pitfall.py"):
        path.write_text(path.read_text() + "\n\n@variant\ndef again(fabric):\n    return shown(fabric)\n")
    repro, fix = measured("reproduced", [0, 0]), measured("fixed", [1, 1])
    both = PairResult("2026-01-02", {"shown": repro, "again": repro}, {"shown": fix, "again": fix})
    results.write(root / "results", Results(results.FORMAT, CPU, {"some-pitfall": both}))
    evidence = made(root)["evidence.md"]
    assert evidence.count("<caption>") == 1
    assert "### <code>shown</code>, <code>again</code>" in evidence


def test_a_long_list_says_how_many_values_it_had(tmp_path: Path) -> None:
    cut = [0.5, 1.0, 2.0, 3.0, 4.0, 5.0, "... 165 values"]
    on_rank = [OnRank(r, Measured("weights", cut, cut, [*cut[:3], 9.0, 9.0, 9.0, "... 165 values"])) for r in range(2)]
    same = pair(VariantResult("reproduced", "silent", ranks=on_rank), VariantResult("fixed", "silent", ranks=on_rank))
    evidence = text_of(made(project(tmp_path, recorded={CPU: same}))["evidence.md"])
    assert "weights (165 values)" in evidence
    assert "0.5, 1, 2, ..." in evidence
    values = [1, f"... {HOSTILE}"]
    hostile = VariantResult("crashed", "silent", ranks=[OnRank(0, Measured("weights", values, values, values))])
    caption = made(project(tmp_path, recorded={CPU: pair(hostile, hostile)}))["evidence.md"]
    assert f"weights ({' '.join(HOSTILE.split())})" in text_of(caption)
    assert "<script" not in caption
    other = [OnRank(0, Measured("weights", [1], cut, 0))]
    shorter = pair(VariantResult("reproduced", "silent", ranks=other), VariantResult("fixed", "silent", ranks=other))
    assert "0.5, 1, 2, ... 165 values" in text_of(made(project(tmp_path, recorded={CPU: shorter}))["evidence.md"])


def test_what_is_copied_from_a_fix_without_a_pattern(tmp_path: Path) -> None:
    repro, fix = SCRIPT.format(kind="", change=BUG), SCRIPT.format(kind="", change=FIX)
    bodies = source.fixed_code(repro, fix, Path("fixes/x.py"))
    assert bodies == {"shown": f'gathered = fabric.rank{FIX}\nreturn Measurement("sum", gathered, 1, 0)'}
    helper = "def helper(x):\n    # why\n    return x{}\n\n\n@variant"
    bodies = source.fixed_code(repro.replace("@variant", helper.format("")), repro.replace("@variant", helper.format(" + 1")), Path("x"))
    assert bodies == {"helper": "def helper(x):\n    # why\n    return x + 1"}


def test_a_pattern_is_copied_with_its_imports(tmp_path: Path) -> None:
    root = project(tmp_path)
    path = root / "fixes" / "some_pitfall.py"
    section = "# --8<-- [start:gathered]\ndef gathered(x):\n    return Path(x)\n\n\n# --8<-- [end:gathered]\n\n\n@variant"
    path.write_text(path.read_text().replace("@variant", section).replace("from ddp", "from pathlib import Path\n\nfrom ddp", 1))
    evidence = made(root)["evidence.md"]
    copied = evidence.partition("## Copy this")[2].partition("## Measured")[0]
    assert "gathered, from fixes/some_pitfall.py" in text_of(copied)
    assert "from pathlib import Path def gathered(x): return Path(x)" in text_of(copied)
    assert "8&lt;" not in evidence  # nor does a marker stand in the diff
    path.write_text(path.read_text().replace("return Path(x)", "return shown(x)"))
    with pytest.raises(Unknown, match=r"fixes/some_pitfall\.py: pattern 'gathered' uses shown"):
        write(root)


# What was measured never becomes markup


@pytest.mark.parametrize("text", [HOSTILE, LINES, "", "\ud800\u202e\x00", "`", "a | b", "<", "&#60;script&#62;"])
def test_text_is_text(text: str) -> None:
    safe = markup.text(text)
    assert not set(safe) & set("<>\"'`*_|{}[]\\\n")
    assert re.sub(r"&#\d+;", "", safe).count("&") == 0
    clean = " ".join(markup.ANSI.sub("", text).split())
    assert html.unescape(safe) == markup.UNPRINTABLE.sub("\ufffd", clean)


def test_prose_keeps_code_and_nothing_else() -> None:
    assert text_of(markup.prose("a `b<c` *d* <i>")) == "a b<c *d* <i>"
    assert markup.prose("a `b` c") == "a <code>b</code> c"
    assert "<i>" not in markup.prose("`<i>`")


@pytest.mark.parametrize(
    "code", ["x = 1", 'a = """\n<b>\n"""\n\n\nb = `', f"# {HOSTILE}", '--8<-- "pyproject.toml"\n```\n', "\tif x:\n\t\ty", ""]
)
def test_a_code_block_copies_its_source(code: str) -> None:
    inner = re.search("<code>(.*)</code>", markup.code_block(code), re.S)
    assert inner is not None
    assert html.unescape(re.sub("<.*?>", "", inner[1])).rstrip("\n") == code.rstrip("\n")


def hostile_project(root: Path) -> Path:
    """A pitfall in which every string that can come from outside is hostile."""
    number = Measured(HOSTILE, [HOSTILE, LINES], HOSTILE, None, HOSTILE)
    bad = [OnRank(rank, number, curve=Curve(HOSTILE, HOSTILE, [1.0, None])) for rank in range(2)]
    records = {
        msgspec.structs.replace(CPU, python=HOSTILE, hardware=HOSTILE): pair(
            VariantResult("reproduced", "silent", why=HOSTILE, ranks=bad, told=[Told(HOSTILE, LINES)]),
            VariantResult("crashed", "silent", why=HOSTILE, ranks=[OnRank(0, line=HOSTILE)]),
        ),
        OLD: pair(VariantResult("reproduced", "silent", failure=Failure(HOSTILE, LINES, HOSTILE)), measured("fixed", [HOSTILE])),
    }
    project(root, kind=f"(varies={HOSTILE!r})", recorded=records)
    (root / "docs" / "pitfalls" / "some-pitfall.md").write_text(page("some-pitfall", says=HOSTILE, text=HOSTILE))
    printable = markup.UNPRINTABLE.sub(lambda found: found[0] if found[0] == "\n" else "", LINES)
    for path, change in ((root / "repros" / "some_pitfall.py", BUG), (root / "fixes" / "some_pitfall.py", FIX)):
        path.write_text(path.read_text().replace(change, f'{change}\n    text = """{printable}"""  # {HOSTILE}'))
    return root


TAGS = {
    *("article", "h1", "h2", "h3", "p", "a", "ul", "ol", "li", "dl", "dt", "dd", "strong", "small", "code", "pre", "div", "span", "nav"),
    *("br", "wbr", "button", "kbd"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "svg", "title", "desc", "text", "line", "polyline"),
}


def test_a_hostile_record_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    root = site(hostile_project(tmp_path))
    built = mkdocs(root)
    assert built.returncode == 0, built.stdout + built.stderr
    said, page = HOSTILE.replace("`c`", "c"), "pitfalls/some-pitfall/index.html"
    for name, headings, shown in (
        ("index.html", 3, said),
        (page, 11, HOSTILE),
        ("versions/index.html", 1, HOSTILE),
        ("hangs/index.html", 4, ""),
    ):
        article = "<article" + (root / "site" / name).read_text().partition("<article")[2].partition("</article>")[0]
        reader = Reader(article)
        assert " ".join(shown.split()) in reader.text
        assert "build-backend" not in reader.text  # of pyproject.toml
        assert {tag for tag, _ in reader.elements} <= TAGS
        assert not [a for _, attributes in reader.elements for a in attributes if a.startswith("on")]
        hrefs = [a["href"] for tag, a in reader.elements if tag == "a" and a.get("href")]
        ours = (
            "#",
            "..",
            "pitfalls/",
            "checks/",
            "hangs/",
            "versions/",
            "catalogue.json",
            "llms.txt",
            "https://github.com/",
            "https://docs.pytorch.org/",
        )
        assert all(h and (h.startswith(ours) or h == "https://example.org/a?b=1&c=2") for h in hrefs)
        assert [tag for tag, _ in reader.elements].count("h2") == headings


# The tables over all pitfalls


def rows_of(fragment: str) -> list[list[str]]:
    return [[text_of(cell) for cell in re.findall("<t[hd].*?</t[hd]>", row)] for row in re.findall("<tr>.*?</tr>", fragment)]


def test_versions_tell_verified_not_reproduced_and_not_measured_apart(tmp_path: Path) -> None:
    wrong = pair(msgspec.structs.replace(measured("not reproduced", [1, 1]), why="every rank is healthy"), measured("fixed", [1, 1]))
    unmeasured = VariantResult("not measured", "silent", why="needs a GPU")
    found, _ = entries(project(tmp_path, recorded={CPU: SILENT, FOUR: wrong, OLD: pair(unmeasured, unmeasured)}))
    table, _, reasons = overview.versions(found).partition("## Reasons")
    assert rows_of(table) == [
        [
            "Pitfall",
            *(
                f"torch {t}lightning {n}CPU, {r} ranks"
                for t, n, r in (("2.13.0", "2.6.6", 2), ("2.13.0", "2.6.6", 4), ("2.9.1", "2.5.0", 2))
            ),
        ],
        ["A title", "verified2026-01-02", "not reproduced2026-01-02", "not measured"],
    ]
    assert [row[:2] for row in rows_of(reasons)[1:]] == [["not reproduced", "every rank is healthy"], ["not measured", "needs a GPU"]]
    assert "No run on a GPU was recorded yet." in text_of(table)


def test_what_an_environment_has_not_recorded_is_not_measured_there(tmp_path: Path) -> None:
    root = project(tmp_path, ids=("one-pitfall", "two-pitfalls"), recorded={CPU: SILENT})
    results.write(root / "results", Results(results.FORMAT, GPU, {"two-pitfalls": SILENT}))
    found, _ = entries(root)
    assert [row[1:] for row in rows_of(overview.versions(found))[1:]] == [
        ["not measured", "verified2026-01-02"],
        ["verified2026-01-02"] * 2,
    ]
    assert [row[1:] for row in rows_of(overview.pitfalls(found))[1:]] == [
        ["silent", "DistributedDataParallel", "nobody", "CPU: 1 environment, 2026-01-02GPU: not measured"],
        ["silent", "DistributedDataParallel", "nobody", "CPU: 1 environment, 2026-01-02GPU: 1 environment, 2026-01-02"],
    ]


def test_a_hang_is_found_by_where_the_ranks_stand(tmp_path: Path) -> None:
    hang = VariantResult(
        "reproduced", "hangs", ranks=[OnRank(0, line="fabric.save(path)  # BUG: alone"), OnRank(1, Measured("sum", 5, 1, 0))]
    )
    found, _ = entries(project(tmp_path, kind='(Hangs({0: "fabric.save"}))', recorded={CPU: pair(hang, measured("fixed", [1, 1]))}))
    assert rows_of(overview.hangs(found))[1:] == [["fabric.save(path)", "has finished", "A title"]]
    stands = fragments(found[0])["evidence.md"].partition("<figure")[2].partition("</figure>")[0]
    assert "Rank 0 stands at fabric.save(path) Rank 1 has finished" in " ".join(text_of(stands.replace("</li>", " ")).split())


def test_checks_are_listed_from_their_docstrings(tmp_path: Path) -> None:
    root = project(tmp_path)
    page_path = root / "docs" / "pitfalls" / "some-pitfall.md"
    page_path.write_text(page_path.read_text().replace("Prose.", "Call `look`.", 1))
    found, _ = entries(root)
    marked = '# --8<-- [start:look]\ndef look(x):\n    """Look at ``x``. Then more."""\n    return x\n\n\n# --8<-- [end:look]'
    code = f'{marked}\n\n\ndef other(x):\n    """Look."""\n'
    listed = functions.functions(code, found)
    assert "Look at x. Used on: A title Copy look" in text_of(listed)
    assert "Then more" not in text_of(listed.partition("<details")[0])
    assert "other(x): copy ddp_pitfalls/checks.py whole." in text_of(listed)


def test_findings_are_counted_and_other_environments_named(tmp_path: Path) -> None:
    def kept(environment: Environment, *kinds: str) -> Watched:
        sides = {"repros": {"one": ["gradients", "hooks"], "two": list(kinds)}, "fixes": {"one": [], "two": ["idle"]}}
        return Watched(1, environment, {"some-id": sides, "no-page": sides})

    found, _ = entries(project(tmp_path, ["some-id"]))
    shown = text_of(evidence_findings.found_by_watch("", found, [kept(FOUR, "hooks"), kept(CPU, "hooks"), kept(OLD)]))
    assert "hooks lost: 2 of 2" in shown
    assert "gradients differ: 1 of 2" in shown
    assert "no gradient: two" in shown
    assert (
        "Recorded with torch 2.13.0, lightning 2.6.6, cpu, 2 ranks. The same was found with torch 2.13.0, lightning 2.6.6, cpu, 4 ranks."
        in shown
    )
    assert "Something else was found with torch 2.9.1" in shown
    assert "no-page" not in shown
    [entry] = found
    assert "Watch, left on, finds hooks lost (2 of 2 silent variants); gradients differ (1 of 2" in text_of(
        evidence_findings.found_on_page(entry, [kept(CPU, "hooks")])
    )
    assert evidence_findings.found_on_page(entry, []) == ""


def test_every_kind_of_finding_has_words() -> None:
    assert list(evidence_findings.KINDS) == list(FINDINGS)


def test_damaged_findings_are_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "results" / "checks" / f"{CPU.name}.json"
    path.parent.mkdir(parents=True)
    for content in (b"", b"{}", b'{"format": 1}', b"\xff"):
        path.write_bytes(content)
        with pytest.raises(results.BadResults, match=r"is damaged .*: restore it with git, or run nox -s watch"):
            findings.read_all(tmp_path)


def test_programs_get_the_same_data(tmp_path: Path) -> None:
    found, _ = entries(hostile_project(tmp_path))
    told = msgspec.json.decode(programs.catalogue(found))
    [entry] = told["pitfalls"]
    assert entry["symptoms"] == [{"group": "hangs", "text": HOSTILE}]
    assert entry["page"] == "pitfalls/some-pitfall/"
    assert entry["outcomes"][CPU.name]["variants"]["shown"]["outcome"] == "crashed there"
    assert set(told["environments"]) == {CPU.name, OLD.name}
    listed = programs.llms(found).splitlines()
    assert "- [A title](pitfalls/some-pitfall/): silent" in listed
    assert f"    - {' '.join(HOSTILE.split())}" in listed


# The diff


def sides(table: str) -> tuple[list[str], list[str]]:
    """The lines of both files that a diff shows."""
    rows = re.findall(r'<tr class="pd-(\w+)">.*?<code[^>]*>(.*?)</code>', table)
    lines = [(kind, html.unescape(re.sub("<.*?>", "", line))) for kind, line in rows]
    return [line for kind, line in lines if kind != "add"], [line for kind, line in lines if kind != "del"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(("a\nb\nc", "a\nB\nc"), ("a", "b"), ("", "x\ny"), ("same", "same")),
        *(('"""\n<i>\n"""', '"""\n<b>\n"""'), ("f(a.b[c])", "    f({a: 1,})")),
    ],
)
def test_a_diff_shows_both_sides(before: str, after: str) -> None:
    table = diff.unified(list(enumerate(before.splitlines(), 1)), list(enumerate(after.splitlines(), 1)), "label")
    assert list(sides(table)) == [before.splitlines(), after.splitlines()]


def test_a_diff_leaves_out_what_is_far_from_a_change() -> None:
    before = [(n, f"line {n}") for n in range(1, 41)]
    after = [(n, "new" if n == 20 else line) for n, line in before]
    table = diff.unified(before, after, HOSTILE)
    assert re.findall(r"(\d+) unchanged", table) == ["16", "17"]
    assert re.findall(r'data-n="(\d*)"></td><td class="pd-n" data-n="(\d*)"', table) == [
        *((str(n), str(n)) for n in range(17, 20)), ("20", ""), ("", "20"), *((str(n), str(n)) for n in range(21, 24)),
    ]  # fmt: skip
    assert "removed: " in table
    assert "added: " in table
    assert "<script" not in table


def test_diffs_of_this_project_show_every_change_and_no_marker() -> None:
    for pitfall in find(ROOT).values():
        if not pitfall.repro.is_file() or not pitfall.fix.is_file():
            continue
        before, after = source.plain_lines(pitfall.repro.read_text()), source.plain_lines(pitfall.fix.read_text())
        shown = sides(diff.unified(before, after, "label"))
        assert [line for line in shown[0] if "# BUG" in line] == [line for _, line in before if "# BUG" in line]
        assert [line for line in shown[1] if "# FIX" in line] == [line for _, line in after if "# FIX" in line]
        assert not [line for line in shown[0] + shown[1] if "--8<--" in line]


# The chart


def test_panels_share_their_axes_and_stay_inside() -> None:
    panels: Mapping[str, chart.Lines] = {"Repro": {"rank 0": [0.0, 5.0, None, 7.0], "rank 1": [-3.0]}, "Fix": {"every rank": [0.0, 1e-9]}}
    drawn = chart.figure("loss", "step", panels, "uid")
    numbers = [re.findall('class="c-l"[^>]*>(-?[0-9.e-]+)<', svg) for svg in re.findall("<svg.*?</svg>", drawn)]
    assert len(numbers) == 2
    assert numbers[0] == numbers[1]
    points = [tuple(map(float, p.split(","))) for line in re.findall('points="(.*?)"', drawn) for p in line.split()]
    assert all(chart.LEFT <= x <= chart.WIDTH and chart.TOP <= y <= chart.HEIGHT - chart.BOTTOM for x, y in points)
    ids = re.findall('id="(.*?)"', drawn)
    assert len(ids) == len(set(ids)) == 4
    assert re.findall('aria-labelledby="(.*?)"', drawn) == ["uid-0-t uid-0-d", "uid-1-t uid-1-d"]
    assert "rank 0&#58; starts at 0, ends at 7, between 0 and 7, with points that are not finite" in drawn


@pytest.mark.parametrize("points", [[0.0], [None], [0.0, 0.0], [1e30, -1e30], [1e-30, 2e-30], [5.0] * 3])
def test_any_curve_can_be_drawn(points: list[float | None]) -> None:
    drawn = chart.figure("y", "x", {"Repro": {"rank 0": points}}, "uid")
    assert "nan" not in drawn
    assert "inf" not in drawn


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 48), (-3, 7), (0, 1.4385), (0.001, 0.0012), (0, 1e6)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    found = list(chart.ticks(low, high))
    assert 2 <= len(found) <= 6
    assert all(low - 1e-9 <= t <= high + 1e-9 and len(f"{t:.3g}") <= 8 for t in found)


def test_one_process_is_drawn_as_a_reference(tmp_path: Path) -> None:
    curve = Curve("step", "loss", [0.5, 0.4], reference=[0.5, 0.1])
    result = VariantResult("reproduced", "silent", ranks=[OnRank(r, Measured("sum", 0, 1, 0), curve=curve) for r in range(2)])
    evidence = made(project(tmp_path, recorded={CPU: pair(result, measured("fixed", [1, 1]))}))["evidence.md"]
    assert evidence.count('<polyline class="c-s c-ref"') == 1
    assert "one process" in text_of(evidence)


def test_ranks_with_different_curves_are_told_apart(tmp_path: Path) -> None:
    curves = pair(measured("reproduced", [0, 0], curve=True), measured("fixed", [1, 1], curve=True))
    evidence = made(project(tmp_path, recorded={CPU: curves}))["evidence.md"]
    assert evidence.count("<svg") == 2
    assert "c-s c-0" in evidence
    assert "c-s c-1" in evidence
    assert "rank 1" in text_of(evidence)


# The writer


def test_it_writes_what_changed_and_removes_what_is_stale(tmp_path: Path) -> None:
    root = project(tmp_path, ids=("one-pitfall", "two-pitfalls"), recorded={CPU: SILENT})
    assert write(root) == "evidence of 2 pitfalls: 16 files written, 0 removed"
    folder = root / "build" / "evidence"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.md")}
    assert write(root) == "evidence of 2 pitfalls: 0 files written, 0 removed"
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.md")}
    (root / "docs" / "pitfalls" / "two-pitfalls.md").unlink()
    (folder / "other").mkdir()
    (folder / "other" / "left.md").write_text("left")
    assert write(root) == "evidence of 1 pitfall: 6 files written, 4 removed; without a page: two-pitfalls"
    over_all = ["checks.md", "hangs.md", "pitfalls.md", "recorded.md", "symptoms.md", "versions.md", "findings.md"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(["one-pitfall", *over_all])


def test_it_needs_neither_torch_nor_lightning(tmp_path: Path) -> None:
    project(tmp_path, recorded={CPU: SILENT})
    blocked = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] in ('torch', 'lightning', 'lightning_fabric', 'pytorch_lightning', 'numpy'):\n"
        "            raise AssertionError(f'{name} was imported')\n"
        "sys.meta_path.insert(0, Block())\n"
        f"sys.argv = ['ddp_pitfalls', 'evidence', '--root', {str(tmp_path)!r}]\n"
        "import runpy; runpy.run_module('ddp_pitfalls', run_name='__main__')\n"
    )
    run = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, timeout=60, env=with_us())
    assert (run.returncode, run.stdout) == (0, "evidence of 1 pitfall: 13 files written, 0 removed\n"), run.stderr


def test_what_scripts_declare_is_read_as_it_is_run() -> None:
    for pitfall in find(ROOT).values():
        if pitfall.repro.is_file():
            run = load(pitfall.repro).variants.values()
            expected = [source.Declared(v.name, results.kind_name(v.kind), tuple(v.needs), v.varies, v.protects) for v in run]
            assert source.variants(pitfall.repro.read_text(), pitfall.repro) == expected


def test_ways_to_declare_a_variant() -> None:
    code = (
        'WHY = "a race"\nHANG = Hangs({0: "x"})\n'
        "@variant\ndef a(f): ...\n"
        '@variant()\ndef b(f): ...\n'
        '@launch.variant(measure.Raises(RuntimeError, "x"), needs=("gpu", "lightning>=2.3"))\ndef c(f): ...\n'
        '@variant(HANG, varies=WHY)\ndef d(f): ...\n'
        '@variant(kind=Dies("SIGABRT", "x"), needs="spawn")\ndef e(f): ...\n'
        '@variant(protects="the layer" " checks")\ndef g(f): ...\n'
        "def helper(): ...\n"
    )  # fmt: skip
    assert source.variants(code, Path("x.py")) == [
        source.Declared("a", "silent", (), ""),
        source.Declared("b", "silent", (), ""),
        source.Declared("c", "raises", ("gpu", "lightning>=2.3"), ""),
        source.Declared("d", "hangs", (), "a race"),
        source.Declared("e", "dies", ("spawn",), ""),
        source.Declared("g", protects="the layer checks"),
    ]
    assert {results.kind_name(kind) for kind in (Raises("x", ""), Hangs({}), Dies("", ""))} == {"raises", "hangs", "dies"}


@pytest.mark.parametrize("code", ["def f(:", "x = 1", "\0"])
def test_a_script_that_cannot_be_read_is_named(tmp_path: Path, code: str) -> None:
    root = project(tmp_path)
    (root / "repros" / "some_pitfall.py").write_text(code)
    with pytest.raises(Unknown, match=r"repros/some_pitfall\.py"):
        write(root)


# Broken pages


def _without(line: str) -> str:
    return page("some-pitfall").replace(line, "")


BROKEN = {
    "missing section": (_without("## Why it happens\n\nProse.\n"), "line 24: here stands"),
    "missing last section": (page("some-pitfall").partition("## When it is fine")[0], "ends without '## When it is fine'"),
    "missing include": (_without('--8<-- "build/evidence/some-pitfall/evidence.md"'), "evidence.md"),
    "include of another page": (page("some-pitfall").replace("some-pitfall/top", "other/top"), "some-pitfall/top.md"),
    "order": (
        page("some-pitfall").replace("What you see", "-").replace("Why it happens", "What you see").replace("## -", "## Why it happens"),
        "'## What you see' at this place",
    ),
    "extra section": (page("some-pitfall") + "\n## More\n\nProse.\n", "'## More' is one section more"),
    "another title": (page("some-pitfall").replace("# A title", "# Another"), "'# A title' at this place"),
    "empty section": (re.sub("(## When it is fine\n\n)Prose.\n", r"\1", page("some-pitfall")), "nothing stands under '## When it is fine'"),
    "unknown field": (page("some-pitfall").replace("tags:", "tagz: []\ntags:"), "unknown field `tagz`"),
    "unknown group": (page("some-pitfall").replace("group: hangs", "group: sings"), "sings"),
    "no symptoms": (re.sub(r"symptoms:\n.*\n.*\n", "symptoms: []\n", page("some-pitfall")), "symptoms"),
    "no title": (page("some-pitfall").replace("title: A title\n", "", 1), "title"),
    "not a link": (page("some-pitfall").replace("https://", "javascript:"), "url"),
    "no front matter": (page("some-pitfall").partition("---\n")[2].partition("---\n")[2], "no front matter"),
    "front matter that is not YAML": (page("some-pitfall").replace("title: A title", "title: [", 1), "front matter"),
    "empty": ("", "no front matter"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_page_is_named_in_one_line(tmp_path: Path, case: str) -> None:
    text, says = BROKEN[case]
    root = project(tmp_path)
    (root / "docs" / "pitfalls" / "some-pitfall.md").write_text(text)
    with pytest.raises(Unknown) as error:
        write(root)
    assert says in str(error.value)
    assert "docs/pitfalls/some-pitfall.md" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_page_without_scripts_is_named(tmp_path: Path) -> None:
    root = project(tmp_path)
    (root / "fixes" / "some_pitfall.py").unlink()
    with pytest.raises(Unknown, match=r"there is no fixes/some_pitfall\.py"):
        write(root)


def test_code_in_a_page_is_no_heading() -> None:
    text = page("x").replace("Prose.", "~~~\n## no heading\n```\n~~~\n\n```python\n# a comment\n# --8<-- no include\n```", 1)
    check_page(text, "x", "A title", Path("x.md"))


# The site


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of two pitfalls, one of them not measured, built as it is in CI."""
    root = site(project(tmp_path_factory.mktemp("site"), ids=("a-pitfall", "b-pitfall"), recorded={CPU: SILENT}))
    both = results.read(root / "results" / f"{CPU.name}.json")
    only = msgspec.structs.replace(both, pitfalls={"a-pitfall": both.pitfalls["a-pitfall"]})
    results.write(root / "results", only)
    run = mkdocs(root)
    assert run.returncode == 0, run.stdout + run.stderr
    return root / "site"


def test_the_hook_writes_the_fragments(built: Path) -> None:
    assert "verified" in (built / "pitfalls" / "a-pitfall" / "index.html").read_text()
    unmeasured = Reader((built / "pitfalls" / "b-pitfall" / "index.html").read_text())
    assert "On the CPU: not measured yet." in unmeasured.text


def test_no_request_leaves_the_site(built: Path) -> None:
    for file in built.rglob("*.html"):
        for tag, attributes in Reader(file.read_text()).elements:
            loads = attributes.get("src") or (attributes.get("href") if tag == "link" else None) or ""
            assert not loads.startswith(("http:", "https:", "//")), f"{file}: {tag} {loads}"
    assert "http" not in re.sub(r"/\*.*?\*/", "", (built / "assets" / "css" / "extra.css").read_text(), flags=re.S)
    assert {p.name for p in (built / "assets" / "fonts").glob("*.woff2")} == set(
        re.findall(r"fonts/([\w.-]+\.woff2)", (built / "assets" / "css" / "extra.css").read_text())
    )


def test_the_home_page_leads_from_a_symptom_to_its_page(built: Path) -> None:
    reader = Reader((built / "index.html").read_text())
    assert "What people see." in reader.text
    assert ("a", {"href": "pitfalls/a-pitfall/"}) in reader.elements


@pytest.mark.parametrize("case", ["missing section", "unknown field", "missing include"])
def test_a_broken_page_ends_the_build(tmp_path: Path, case: str) -> None:
    text, says = BROKEN[case]
    root = site(project(tmp_path))
    (root / "docs" / "pitfalls" / "some-pitfall.md").write_text(text)
    run = mkdocs(root)
    output = run.stdout + run.stderr
    assert run.returncode == 1
    assert "Traceback" not in output
    assert [line for line in output.splitlines() if says in line]


def test_damaged_results_end_the_build(tmp_path: Path) -> None:
    root = site(project(tmp_path, recorded={CPU: SILENT}))
    (root / "results" / f"{CPU.name}.json").write_text("{")
    run = mkdocs(root)
    assert run.returncode == 1
    assert f"{CPU.name}.json: is damaged" in run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr

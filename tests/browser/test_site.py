"""What readers do on the site: search, copy, read on a phone, by keyboard, in the dark; and that nothing is broken or out of reach."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import axe_playwright_python
import pytest
from built import ROOT, SITE
from playwright.sync_api import Page, expect

from ddp_pitfalls import patterns

CATALOGUE = json.loads((SITE / "catalogue.json").read_text(encoding="utf-8"))["pitfalls"]
PAGES = sorted("/" + p.parent.relative_to(SITE).as_posix().removeprefix(".") for p in SITE.rglob("index.html"))
PAGES = [page if page == "/" else f"{page}/" for page in PAGES]
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
MODEL = "/pitfalls/ddp-cpu-move/"

PHRASES = {  # what people type, by the page that they need
    "no-distributed-sampler": ["epoch takes as long on 4 gpus as on 1", "all gpus see the same data no speed up"],
    "sampler-without-set-epoch": ["set_epoch", "same order of batches each epoch ddp"],
    "eval-padding-duplicates": ["test accuracy changes with number of gpus", "deduplicate predictions"],
    "iterable-dataset-duplicated": ["webdataset streaming each gpu gets the same data", "num_workers data repeated"],
    "split-differs-per-rank": ["random_split different on each rank", "validation leak train multi gpu"],
    "mean-of-local-losses": ["gradient accumulation num_items_in_batch", "imbalance of valid tokens"],
    "averaged-nonlinear-metric": ["f1 score sync_dist wrong", "AUROC multi gpu differs from single gpu"],
    "identical-seed-per-rank": ["same dropout mask on all gpus", "seed_everything same augmentation every rank"],
    "rank-zero-save": ["hangs when saving checkpoint on rank 0", "fabric.save stuck"],
    "master-port-clash": ["address already in use", "errno: 98", "run two trainings on one machine"],
    "torch-load-map-location": ["GPU 0 memory unbalanced", "4 processes on GPU 0", "out of memory on gpu 0 when resuming"],
    "ddp-cpu-move": ["moved model to cpu and back gradients not synchronized", "offload model to free gpu memory faiss"],
    "all-gather-no-grad": ["contrastive loss all_gather not learning", "RuntimeError: element 0 of tensors does not require grad"],
    "local-splice-scales-gradients": ["gather_with_grad"],
    "bypass-wrapper-forward": ["'DistributedDataParallel' object has no attribute 'generate'", "mark_forward_method"],
    "find-unused-hides-dead-branch": ["find_unused_parameters=True"],
    "unfreeze-after-wrap": ["BackboneFinetuning", "unfreeze layers during training"],
    "uneven-inputs": ["uneven number of batches hangs"],
    "rank-local-early-stop": ["early stopping one rank hangs"],
    "rank-zero-only-eval": ["validation on rank 0 only hangs"],
    "reentrant-checkpoint-ready-twice": ["Expected to mark a variable ready only once"],
    "hangs": ["Watchdog caught collective operation timeout", "Connection closed by peer", "stuck gpu 100%", "deadlock", "NCCL timeout"],
}


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_no_page_scrolls_sideways(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    wide = {}
    for path in PAGES:
        page.goto(path)
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        cut = page.evaluate(
            """() => [...document.querySelectorAll('main *')].filter(e => {
                const box = e.getBoundingClientRect()
                if (!box.width || box.right <= innerWidth + 1) return false
                for (let p = e; p && p !== document.body; p = p.parentElement)
                    if (['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(p).overflowX)) return false
                return true
            }).map(e => e.outerHTML.slice(0, 100))"""
        )
        if over > 0 or cut:
            wide[path] = (over, cut[:3])
    assert not wide


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_accessibility_violation(page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    found = []
    for path in PAGES:
        page.goto(path)
        page.wait_for_function("document.querySelectorAll('.md-tabs__item').length > 0")
        page.wait_for_timeout(400)  # tabs fade in
        page.evaluate(AXE)
        result = page.evaluate(f"axe.run(document, {{runOnly: {RULES}, resultTypes: ['violations']}})")
        found += [f"{path} {v['id']}: {n['html'][:150]} {n['failureSummary'][:200]}" for v in result["violations"] for n in v["nodes"]]
    assert not found, "\n".join(found)


def test_every_copy_button_copies_its_block(page: Page) -> None:
    """Each block of the page, and of those whose source is known, exactly that."""
    wrong = []
    for path in PAGES:
        page.goto(path)
        page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
        for block in page.locator(".highlight:has(> pre), .highlight:has(> .filename)").all():
            button = block.locator("button.md-clipboard, button.md-code__button").first
            if not button.count():
                wrong.append(f"{path}: no button: {block.inner_text()[:80]}")
                continue
            button.dispatch_event("click")
            copied = page.evaluate("navigator.clipboard.readText()").rstrip("\n")
            title = block.locator(".filename")
            wanted = _source(title.inner_text()) if title.count() else None
            shown = block.locator("code").first.evaluate("e => e.textContent").rstrip("\n")
            if copied != (shown if wanted is None else wanted.rstrip("\n")):
                wrong.append(f"{path}: {copied[:200]!r}")
    assert not wrong, "\n".join(wrong)


def _source(title: str) -> str | None:
    """The marked pattern that a block is titled after, or None for the body of a function."""
    name, _, file = title.partition(", from ")
    text = (ROOT / file).read_text(encoding="utf-8")
    return patterns.pattern(text, name) if name in patterns.names(text) else None


def test_what_people_type_finds_the_page_that_they_need(page: Page) -> None:
    """The right page first for seventy per cent of the phrases, and among the first three for ninety."""
    page.goto("/")
    page.locator("button.find").click()
    box = page.locator("[data-md-component=search-query]")
    expect(box).to_be_focused()
    ranks, told = [], []
    for wanted, phrases in PHRASES.items():
        for phrase in phrases if wanted in {entry["id"] for entry in CATALOGUE} | {"hangs"} else ():
            found = search(page, phrase)
            ranks.append(found.index(wanted) if wanted in found else len(PAGES))
            told += [f"{phrase}: {found[:3]}, and not {wanted}"] if ranks[-1] else []
    assert ranks
    assert sum(r == 0 for r in ranks) >= 0.7 * len(ranks), "\n".join(told)
    assert sum(r < 3 for r in ranks) >= 0.9 * len(ranks), "\n".join(told)


def search(page: Page, phrase: str) -> list[str]:
    """The pages that the open search shows for a phrase, best first."""
    box, results = page.locator("[data-md-component=search-query]"), page.locator(".md-search-result__item")
    box.fill("")
    box.dispatch_event("keyup")
    expect(results).to_have_count(0, timeout=20_000)
    box.fill(phrase)
    box.dispatch_event("keyup")
    expect(results).not_to_have_count(0, timeout=20_000)
    links = page.evaluate("[...document.querySelectorAll('.md-search-result__item')].map(e => e.querySelector('a').href)")
    return [urlsplit(link).path.strip("/").rpartition("/")[2] for link in links]


def test_the_dark_scheme_recolours_charts_and_stays(page: Page) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(MODEL)
    line = page.locator(".chart polyline").first

    def stroke() -> str:
        return str(line.evaluate("e => getComputedStyle(e).stroke"))

    body, before = page.locator("body"), stroke()
    expect(body).to_have_attribute("data-md-color-scheme", "default")
    page.locator("label[title='Switch to dark mode']").click()
    expect(body).to_have_attribute("data-md-color-scheme", "slate")
    assert stroke() != before
    page.reload()
    expect(body).to_have_attribute("data-md-color-scheme", "slate")


def test_the_keyboard_reaches_search_tabs_and_copy(page: Page) -> None:
    page.goto(MODEL)
    reached: set[str] = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached |= set(
            page.evaluate(
                """() => Object.entries({search: '[data-md-component=search-query]', tabs: '.md-tabs__link', jumps: 'nav.jumps a',
                diff: '.pd', table: '.facts', copy: 'button.md-clipboard, button.md-code__button'})
                .filter(([_, s]) => document.activeElement.matches(s)).map(([name]) => name)"""
            )
        )
        if "search" in reached and page.locator("#__search").is_checked():
            page.keyboard.press("Escape")
        if reached >= {"search", "tabs", "jumps", "diff", "table", "copy"}:
            break
    assert reached >= {"search", "tabs", "jumps", "diff", "copy"}
    page.keyboard.press("/")
    expect(page.locator("[data-md-component=search-query]")).to_be_focused()


class Links(HTMLParser):
    """The links and the ids of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.ids |= {known["id"] or ""} if "id" in known else set()
        self.links += [known[name] or "" for name in ("href", "src") if known.get(name)]


def test_every_internal_link_and_anchor_leads_somewhere() -> None:
    pages = {path: Links((SITE / path.lstrip("/") / "index.html").read_text(encoding="utf-8")) for path in PAGES}
    broken = []
    for path, read in pages.items():
        for link in read.links:
            target = urlsplit(urljoin(f"http://site{path}", link))
            if target.netloc != "site":
                continue
            file = SITE / unquote(target.path).lstrip("/")
            if not (file.is_file() or (file / "index.html").is_file()):
                broken.append(f"{path}: {link}")
            elif target.fragment and target.path in pages and unquote(target.fragment) not in pages[target.path].ids:
                broken.append(f"{path}: {link}: no such anchor")
    assert not broken, "\n".join(broken)


def test_the_files_for_programs(page: Page) -> None:
    for entry in CATALOGUE:
        assert (SITE / entry["page"] / "index.html").is_file()
    text = (SITE / "llms.txt").read_text(encoding="utf-8")
    assert all(f"({entry['page']})" in text for entry in CATALOGUE)

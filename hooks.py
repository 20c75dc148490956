"""Writes the generated parts of the pages before each build, so that ``mkdocs build`` and ``mkdocs serve`` are never stale."""

import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from ddp_pitfalls.catalogue import Unknown
from ddp_pitfalls.evidence import write
from ddp_pitfalls.results import BadResults

INCLUDED = re.compile(r'^-+8<-+ "([^":]+)', re.MULTILINE)
RENDERED = ("content", "toc", "_title_from_render", "present_anchor_ids", "links_to_anchors")  # what Page.render sets


def on_pre_build(config):
    try:
        write(Path(config.config_file_path).parent)
    except (Unknown, BadResults) as error:
        raise PluginError(str(error)) from error


def on_startup(command, dirty):
    if command == "serve":
        remember_pages()


def remember_pages():
    """Convert again only the pages of pitfalls whose text or included files have changed, so that an edit is soon to be seen."""
    convert, known = Page.render, {}

    def render(self, config, files):
        root = Path(config.config_file_path).parent
        texts = [self.markdown, *((root / path).read_text(encoding="utf-8") for path in INCLUDED.findall(self.markdown))]
        before, kept = known.get(self.file.src_uri, (None, {}))
        if before == texts:
            vars(self).update(kept)
            return
        convert(self, config, files)
        if self.file.src_uri.startswith("pitfalls/"):
            known[self.file.src_uri] = texts, {name: getattr(self, name) for name in RENDERED}

    Page.render = render

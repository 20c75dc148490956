"""The generated parts of the pages: Markdown fragments made from results, scripts and front matter. Needs no torch."""

from ddp_pitfalls.evidence.writer import render, write

__all__ = ["render", "write"]

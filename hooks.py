"""Writes the generated parts of the pages before each build, so that ``mkdocs build`` and ``mkdocs serve`` are never stale."""

from pathlib import Path

from mkdocs.exceptions import PluginError

from ddp_pitfalls.catalogue import Unknown
from ddp_pitfalls.evidence import write
from ddp_pitfalls.results import BadResults


def on_pre_build(config):
    try:
        write(Path(config.config_file_path).parent)
    except (Unknown, BadResults) as error:
        raise PluginError(str(error)) from error

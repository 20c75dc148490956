"""Every test leaves the machine as it found it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest
import support
import torch

from ddp_pitfalls.catalogue import ROOT
from ddp_pitfalls.runner import WARM


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for whoever edits while the tests run."""
    says = "somebody else writes into the repository or the shared memory meanwhile: look for no new files there"
    parser.addoption("--shared-tree", action="store_true", help=says)


def pytest_configure(config: pytest.Config) -> None:
    """Apply the option."""
    if config.getoption("--shared-tree"):
        support.shared_folders.clear()


@pytest.fixture(scope="session", autouse=True)
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give this session a folder of its own for temporary files, and start the processes that multiprocessing keeps."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("temporary"))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
        torch.set_num_threads(1)  # a torch operation in a test starts no thread, so that ranks can be forked afterwards
        support.adopt_orphans()
        multiprocessing.set_forkserver_preload(list(WARM))
        resource_tracker.ensure_running()
        first = multiprocessing.get_context("forkserver").Process(target=int)
        first.start()
        first.join()  # the forkserver has imported torch by now
        first.close()
        yield


@pytest.fixture(autouse=True)
def nothing_left(workplace: None) -> Iterator[None]:
    """Fail a test that leaves a process, thread, environment variable, listening port or file."""
    with support.nothing_left():
        yield

"""Ranks that never end, each with a child process of its own, for the tests that end the supervisor."""

import os
import subprocess
import time
from pathlib import Path

from ddp_pitfalls.launch import main, variant


@variant
def for_ever(fabric):
    child = subprocess.Popen(["sleep", "1000"])
    note = Path(os.environ["NOTES"], f"rank{fabric.global_rank}")
    note.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
    note.with_suffix(".part").rename(note)
    time.sleep(1000)


@variant(needs="spawn")
def for_ever_spawned(fabric):
    for_ever(fabric)


if __name__ == "__main__":
    main()

"""Run scripts as Python would, each in a fork of this process, which has imported torch and Lightning: they cost no import.

Reads paths of scripts, one a line, and writes the exit code of each as a line. A script runs in its own folder, where
its output goes to ``out`` and ``err``, and where temporary files go.
"""

import atexit
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

import lightning.pytorch  # noqa: F401
import torch  # noqa: F401

for line in sys.stdin:
    script = line.rstrip("\n")
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

folder = str(Path(script).parent)
os.chdir(folder)
for number, name in ((0, os.devnull), (1, "out"), (2, "err")):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
os.environ["TMPDIR"] = tempfile.tempdir = folder
sys.path[0], sys.argv = folder, [script]
code = 0
try:
    runpy.run_path(script, run_name="__main__")
except Exception:
    traceback.print_exc()
    code = 1
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(code)  # taking down an interpreter with torch in it takes a second

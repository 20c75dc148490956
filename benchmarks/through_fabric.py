"""A variant of ddp-cpu-move on two ranks started by Fabric's own launcher, without supervisor: for comparison in ``start.py``."""

import logging
import sys
from pathlib import Path

import torch.distributed as dist
from lightning.fabric import Fabric

from ddp_pitfalls.script import load

REPRO = Path(__file__).resolve().parent.parent / "repros" / "ddp_cpu_move.py"

if __name__ == "__main__":
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    measurement = load(REPRO).variants[sys.argv[1]].function(fabric)
    fabric.barrier()
    dist.destroy_process_group()  # left to the interpreter's exit, gloo's threads now and then end it with SIGABRT
    sys.exit(0 if measurement.state() == "broken" else 1)

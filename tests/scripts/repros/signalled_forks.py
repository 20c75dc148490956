"""A script that gets SIGINT whenever it forks, on the side of the fork that a variable names."""

import os
import signal

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


os.register_at_fork(**{os.environ["SIGNALLED"]: interrupt})


@variant
def one(fabric):
    return Measurement("state", "broken", healthy="healthy", broken="broken")


if __name__ == "__main__":
    main()

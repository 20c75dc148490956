"""One variant for each thing that a script can say, for the tests of the command line."""

import faulthandler
import os

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import AnyOther, Dies, Measurement


@variant
def as_documented(fabric):
    return Measurement("loss", 2.0, healthy=1.0, broken=2.0)


@variant
def not_any_more(fabric):
    print("printed by a rank")
    return Measurement("loss", 1.0, healthy=1.0, broken=AnyOther("of a race"))


@variant
def crashes(fabric):
    raise OSError("no such file")


@variant(Dies("SIGABRT", "the last words"))
def dies(fabric):
    os.write(2, b"the last words")
    os.abort()


@variant(needs="gpu")
def on_gpu(fabric):
    raise AssertionError("there is no GPU here")


@variant(needs="lightning>=99")
def in_a_later_release(fabric):
    raise AssertionError("there is no such release")


if __name__ == "__main__":
    faulthandler.enable(os.dup(2))  # as test runners do; what a rank writes when it dies must not end up on the screen all the same
    main()

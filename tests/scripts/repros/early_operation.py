"""A torch operation at the top level starts threads, which a fork would wait for."""

import torch

from ddp_pitfalls.launch import main, variant

torch.set_num_threads(4)  # however many cores there are
PRODUCT = torch.ones(999, 999) @ torch.ones(999, 999)


@variant
def one(fabric):
    raise AssertionError("never run")


if __name__ == "__main__":
    main()

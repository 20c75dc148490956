"""A variant that needs what nobody knows."""

from ddp_pitfalls.launch import main, variant


@variant(needs="three gpus")
def one(fabric):
    raise AssertionError("never run")


if __name__ == "__main__":
    main()

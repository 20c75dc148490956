"""Ranks that make different numbers of steps: they do not meet at the next comparison."""

from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.checks import Watch
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import FINISHED, Hangs, Measurement
from ddp_pitfalls.toys import batch, toy


@variant(Hangs({0: FINISHED}, others="loss.backward()"))
def one_batch_less_on_rank_0(fabric):
    """The others wait in DDP, as they would without a watch."""
    module, optimizer = toy()
    model = DistributedDataParallel(module)
    Watch(model, every=1)
    for step in range(2 if fabric.global_rank == 0 else 3):
        optimizer.zero_grad()
        loss = model(batch(fabric.global_rank, step)[0]).square().mean()
        loss.backward()
        optimizer.step()
    return Measurement("state", "broken", healthy="healthy", broken="broken")


@variant(Hangs({0: "loss.backward()"}, others="optimizer.step()"))
def one_step_less_on_rank_0(fabric):
    """The others compare after a step that rank 0 has left out, and it trains on. Without a watch nothing hangs."""
    module, optimizer = toy()
    model = DistributedDataParallel(module)
    Watch(model, every=2)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(batch(fabric.global_rank, step)[0]).square().mean()
        loss.backward()
        if step != 1 or fabric.global_rank != 0:
            optimizer.step()
    return Measurement("state", "broken", healthy="healthy", broken="broken")


if __name__ == "__main__":
    main()

"""A rank that never comes to the next comparison: the others wait in DDP, as they would without a watch."""

from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.checks import Watch
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import FINISHED, Hangs, Measurement
from ddp_pitfalls.toys import batch, toy


@variant(Hangs({0: FINISHED}, others="loss.backward()"))
def one_batch_less_on_rank_0(fabric):
    module, optimizer = toy()
    model = DistributedDataParallel(module)
    Watch(model, every=1)
    for step in range(2 if fabric.global_rank == 0 else 3):
        optimizer.zero_grad()
        loss = model(batch(fabric.global_rank, step)[0]).square().mean()
        loss.backward()
        optimizer.step()
    return Measurement("state", "broken", healthy="healthy", broken="broken")


if __name__ == "__main__":
    main()

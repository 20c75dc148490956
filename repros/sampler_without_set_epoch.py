"""A DistributedSampler shuffles by the number of the epoch. When nobody tells it, every epoch has the order of the first."""

from torch.utils.data import DataLoader, DistributedSampler

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.samples import Listed, given, orders
from ddp_pitfalls.trainers import trainer


@variant
def with_ddp(fabric):
    samples = range(4 * fabric.world_size)
    sampler = DistributedSampler(samples, shuffle=True)
    loader = DataLoader(samples, batch_size=2, sampler=sampler)
    seen = {}
    for epoch in range(3):
        seen[epoch] = given(loader)  # BUG: the sampler is never told the epoch, and shuffles as in epoch 0
    return orders(fabric, seen.values(), broken=[0, 0, 0])


@variant
def too_late(fabric):
    samples = range(4 * fabric.world_size)
    sampler = DistributedSampler(samples, shuffle=True)
    loader = DataLoader(samples, batch_size=2, sampler=sampler, num_workers=1, multiprocessing_context="fork")
    seen = {}
    for epoch in range(3):
        batches = iter(loader)
        sampler.set_epoch(epoch)  # BUG: with workers, iter() has asked the sampler already: this order comes an epoch late
        seen[epoch] = given(batches)
    return orders(fabric, seen.values(), broken=[0, 0, 1])


@variant
def with_fabric(fabric):
    samples = range(4 * fabric.world_size)
    loader = DataLoader(samples, batch_size=2, sampler=DistributedSampler(samples, shuffle=True))  # BUG: unknown to Fabric
    return orders(fabric, [given(loader) for _ in range(3)], broken=[0, 0, 0])


class Pairs:
    """A batch sampler of one's own, as people write for buckets of equal length."""

    def __init__(self, order):
        self.order = order  # BUG: Lightning looks at .sampler of a loader and of its batch sampler, and nowhere else

    def __iter__(self):
        order = list(self.order)
        return (list(batch) for batch in zip(order[::2], order[1::2]))

    def __len__(self):
        return len(self.order) // 2


@variant
def own_batch_sampler(fabric):
    samples, module = range(4 * fabric.world_size), Listed()
    order = DistributedSampler(samples, fabric.world_size, fabric.global_rank, shuffle=True)
    loader = DataLoader(samples, batch_sampler=Pairs(order))
    trainer(fabric, max_epochs=3, use_distributed_sampler=False).fit(module, loader)
    return orders(fabric, module.epochs, broken=[0, 0, 0])


if __name__ == "__main__":
    main()

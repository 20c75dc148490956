"""F1, AUC and their like are no means: the mean of the ranks' scores is not the score of all samples."""

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torchmetrics.classification import BinaryF1Score

from ddp_pitfalls.checks import on_all_ranks
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement
from ddp_pitfalls.trainers import trainer


def samples(rank):
    """What a rank has of (score, label): 8 samples with one positive on even ranks, 12 with seven positives on odd ranks."""
    if rank % 2:
        return [(0.9, 1)] * 6 + [(0.3, 1)] + [(0.2, 0)] * 5
    return [(0.6, 1)] + [(0.8, 0)] * 3 + [(0.1, 0)] * 4


def batches(rank):
    return [samples(rank)[start : start + 4] for start in range(0, len(samples(rank)), 4)]


def tensors(fabric, pairs):
    scores, labels = (torch.tensor(part, device=fabric.device) for part in zip(*pairs))
    return scores, labels


def f1_by_hand(pairs):
    both = sum(score > 0.5 and label == 1 for score, label in pairs)
    either = sum(score > 0.5 for score, _ in pairs) + sum(label for _, label in pairs)
    return 2 * both / either if either else 0.0


def auc_by_hand(pairs):
    positive, negative = ([score for score, label in pairs if label == kind] for kind in (1, 0))
    return sum((p > n) + 0.5 * (p == n) for p in positive for n in negative) / (len(positive) * len(negative))


def accuracy_by_hand(pairs):
    return sum((score > 0.5) == (label == 1) for score, label in pairs) / len(pairs)


def measured(fabric, name, value, metric):
    shards = [samples(rank) for rank in range(fabric.world_size)]
    everything = [pair for shard in shards for pair in shard]
    return Measurement(name, value, healthy=metric(everything), broken=sum(map(metric, shards)) / len(shards))


# --8<-- [start:f1_of_all_ranks]
def f1_of_all_ranks(predicted, true):
    """The F1 score over the samples of all ranks, from this rank's predictions and labels: zeros and ones, (samples,) each."""
    both, either = (predicted * true).sum(), predicted.sum() + true.sum()
    counts = torch.stack([both, either])
    dist.all_reduce(counts)  # FIX: the counts are summed, and the ratio comes last
    both, either = counts.tolist()
    return 2 * both / max(either, 1)


# --8<-- [end:f1_of_all_ranks]


@variant
def with_ddp(fabric):
    scores, labels = tensors(fabric, samples(fabric.global_rank))
    return measured(fabric, "F1", f1_of_all_ranks((scores > 0.5).long(), labels), f1_by_hand)


@variant
def with_fabric(fabric):
    scores, labels = tensors(fabric, samples(fabric.global_rank))
    predicted = (scores > 0.5).long()
    counts = torch.stack([2 * (predicted * labels).sum(), predicted.sum() + labels.sum()]).float()
    counts = fabric.all_reduce(counts, reduce_op="sum")  # FIX: the counts of all ranks first
    f1 = counts[0] / counts[1]
    return measured(fabric, "F1", f1, f1_by_hand)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.f1 = BinaryF1Score()

    def validation_step(self, part, _):
        scores, labels = part
        self.f1(scores, labels)
        self.log("f1", self.f1)  # FIX: the metric itself, which sums its counts over batches and ranks before it divides


@variant
def with_trainer(fabric):
    module, ranks = Module(), range(fabric.world_size)
    one = trainer(fabric)
    one.validate(module, iter([tensors(fabric, pairs) for pairs in batches(fabric.global_rank)]), verbose=False)
    every = [pairs for rank in ranks for pairs in batches(rank)]
    healthy = f1_by_hand([pair for pairs in every for pair in pairs])
    broken = sum(f1_by_hand(pairs) for pairs in every) / len(every)
    return Measurement("F1", one.callback_metrics["f1"], healthy, broken)


@variant
def ranking(fabric):
    scores, labels = tensors(fabric, samples(fabric.global_rank))

    def auc(scores, labels):
        ahead = scores[labels == 1][:, None] - scores[labels == 0]
        return ahead.sign().add(1).div(2).mean()

    value = on_all_ranks(auc, scores, labels)  # FIX: there are no counts to sum, so the samples are gathered
    return measured(fabric, "area under the ROC curve", value, auc_by_hand)


@variant
def accuracy(fabric):  # a mean, but of unequally many samples
    scores, labels = tensors(fabric, samples(fabric.global_rank))
    right = ((scores > 0.5) == labels).float()
    total = fabric.all_reduce(torch.stack([right.sum(), torch.ones_like(right).sum()]), reduce_op="sum")
    value = total[0] / total[1]  # FIX: sums of both first
    return measured(fabric, "accuracy", value, accuracy_by_hand)


@variant(protects="self.log weighs each batch by its batch_size, over the ranks too, so means of samples are right")
def logged_accuracy(fabric):  # nothing to fix
    class Accuracy(LightningModule):
        def validation_step(self, part, _):
            scores, labels = part
            right = ((scores > 0.5) == labels).float()
            self.log("accuracy", right.mean(), sync_dist=True, batch_size=len(labels))

    one = trainer(fabric)
    one.validate(Accuracy(), iter([tensors(fabric, samples(fabric.global_rank))]), verbose=False)
    return measured(fabric, "accuracy", one.callback_metrics["accuracy"], accuracy_by_hand)


if __name__ == "__main__":
    main()

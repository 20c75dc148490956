"""``main``: run the variants of one script, by hand or under torchrun, and say what they prove."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    sys.exit("process groups work differently on Windows: run this under WSL")

import argparse
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy

from ddp_pitfalls import hardware
from ddp_pitfalls.measure import AS_DOCUMENTED, NOT_MEASURED, REPRO, Ended, Hangs, Kind, Notice, Verdict, judge, shown
from ddp_pitfalls.rank import Job, perform
from ddp_pitfalls.script import BadScript, Script, Variant, load, variant
from ddp_pitfalls.supervise import PATIENCE, supervise

__all__ = ["main", "variant"]

AS_EXPECTED, NOT_AS_EXPECTED, NO_SUCH_THING, NOTHING_MEASURED = 0, 1, 2, 77  # exit codes


def _threads() -> int:
    """The threads of this process, those of libraries included."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


THREADS_AT_IMPORT = _threads()


def main() -> NoReturn:
    """Run the script that calls this, print the verdicts, and exit.

    Exit codes: 0 as documented, 1 not, 2 asked for what is not here, 77 nothing could be measured here.
    """
    arguments = _arguments()
    try:
        code = _run(Path(sys.argv[0]), arguments)
    except (hardware.Absent, BadScript) as error:
        print(error, file=sys.stderr)
        code = NO_SUCH_THING
    except KeyboardInterrupt:
        print("interrupted; every rank has been ended", file=sys.stderr)
        code = 128 + signal.SIGINT
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(code)  # taking down an interpreter with torch in it takes longer than all the variants


def _run(path: Path, arguments: argparse.Namespace) -> int:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _under_torchrun(load(path), arguments)
    refuse_threads()
    signal.signal(signal.SIGTERM, _terminate)
    return _supervised(load(path), arguments)


def refuse_threads() -> None:
    """Raise Absent where a torch operation has started threads here: a fork has none of them, and waits for them for ever."""
    if hardware.FORKS and _threads() > THREADS_AT_IMPORT:
        raise hardware.Absent("a torch operation ran before main(), and forked ranks would block for ever: move it into a variant")


def _terminate(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run this pitfall or fix on several ranks and judge the outcome.")
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="number of ranks (default 2; torchrun brings its own)")
    add("--accelerator", choices=["auto", *hardware.TIERS], default="auto", help="hardware tier (default: the best one here)")
    add("--variant", action="append", default=[], metavar="NAME", help="run only this variant; may be given several times")
    add("--patience", type=float, default=PATIENCE, metavar="SECONDS", help="for a variant that is not documented to hang")
    arguments = parser.parse_args()
    if arguments.ranks < 2:
        parser.error(f"--ranks {arguments.ranks}: a pitfall between ranks needs two or more")
    return arguments


def wanted_variants(script: Script, names: Sequence[str]) -> list[Variant]:
    """The variants to run: those named, or all. Raises Absent for a name that the script does not have."""
    for name in names:
        if name not in script.variants:
            raise hardware.Absent(f"{script.path.name} has no variant {name!r}: it has {', '.join(script.variants)}")
    return [v for v in script.variants.values() if not names or v.name in names]


def verdict_on(script: Script, wanted: Variant, tier: hardware.Tier, ranks: int, method: str, patience: float = PATIENCE) -> Verdict:
    """Run one variant under the supervisor and judge it."""
    if reason := hardware.missing(wanted.needs, tier):
        return Verdict(NOT_MEASURED, reason)
    if "spawn" in wanted.needs:
        method = "spawn"
    job = Job(script.path, wanted.name, ranks, tier)
    return judge(script.side, wanted.kind, supervise(job, wanted.kind, method, patience))


def _supervised(script: Script, arguments: argparse.Namespace) -> int:
    wanted = wanted_variants(script, arguments.variant)
    tier = hardware.choose(arguments.accelerator, arguments.ranks, hardware.count_gpus())
    print(heading(script, tier, arguments.ranks), flush=True)
    verdicts = {}
    for one in wanted:
        method = "fork" if hardware.FORKS else "spawn"
        verdicts[one.name] = verdict_on(script, one, tier, arguments.ranks, method, arguments.patience)
        print(report(one, verdicts[one.name]), flush=True)
    print(conclusion(script, list(verdicts.values())))
    return exit_code(list(verdicts.values()))


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """The exit code of a script whose variants got these verdicts."""
    measured = [v for v in verdicts if v.word != NOT_MEASURED]
    if not measured:
        return NOTHING_MEASURED
    return AS_EXPECTED if all(v.as_documented for v in measured) else NOT_AS_EXPECTED


def heading(script: Script, tier: hardware.Tier, ranks: int) -> str:
    """The pitfall, and what the verdicts below it depend on."""
    what = "the pitfall" if script.side == REPRO else "the fix"
    here = ", ".join(f"{package} {release}" for package, release in hardware.versions().items())
    return f"{script.pitfall}: {what}\n{script.title}\n{ranks} ranks, tier {tier.name} ({tier.backend}), {here}\n"


def report(wanted: Variant, verdict: Verdict) -> str:
    """One variant on the screen: the verdict, the reason where there is one, and each rank's numbers."""
    lines = [f"{wanted.name}: {verdict.word}"]
    if verdict.why:
        lines.append(f"  {verdict.why}")
    measured = [(end.rank, end.measurement) for end in verdict.ranks if end.measurement is not None]
    for quantity in dict.fromkeys(m.quantity for _, m in measured):
        lines.append(f"  {quantity}")
        for rank, m in measured:
            if m.quantity == quantity:
                lines.append(f"    rank {rank}: {shown(m.value)}")
                lines.append(f"      healthy {shown(m.healthy)}")
                lines.append(f"      broken  {shown(m.broken)}")
    lines += [f"  {end.sentence()}" for end in verdict.ranks if end.how != "measured" and end.sentence() not in verdict.why]
    for end in verdict.ranks:
        lines += [f"  rank {end.rank} was told: {notice.category}: {notice.text.strip()}" for notice in end.notices]
    if verdict.word not in AS_DOCUMENTED:
        for end in verdict.ranks:
            lines += _quoted(f"rank {end.rank}, stack", end.stack)
            lines += _quoted(f"rank {end.rank}, error output", end.output)
            lines += _quoted(f"rank {end.rank}, output", end.printed)
    return "\n".join(lines) + "\n"


def _quoted(title: str, text: str, most: int = 30) -> list[str]:
    lines = text.strip().splitlines()
    if not lines:
        return []
    cut = [f"    | ({len(lines) - most} lines before these)"] if len(lines) > most else []
    return [f"  {title}:", *cut, *(f"    | {line}" for line in lines[-most:])]


def conclusion(script: Script, verdicts: Sequence[Verdict]) -> str:
    """The last line: whether the page is still right."""
    counts = {word: sum(v.word == word for v in verdicts) for word in dict.fromkeys(v.word for v in verdicts)}
    told = ", ".join(f"{n} {word}" for word, n in counts.items())
    names = {0: "as documented", 1: "NOT as documented", NOTHING_MEASURED: "nothing could be measured here"}
    return f"{script.side}/{script.path.name}: {names[exit_code(verdicts)]} ({told})"


TORCHRUN_TIMEOUT = 10.0  # seconds a collective may wait under torchrun, where nobody but the process group finds a hang


def _under_torchrun(script: Script, arguments: argparse.Namespace) -> int:
    """Use the ranks that torchrun started. A variant that fails leaves the process group unusable, so the rest is not measured."""
    store, rank, ranks = next(dist.rendezvous("env://"))
    nodes, devices = hardware.nodes_and_devices(ranks)
    if arguments.accelerator == hardware.CUDA_SHARED.name:
        raise hardware.Absent("tier cuda-shared is for ranks that this script starts itself: leave torchrun away")
    tier = hardware.choose(arguments.accelerator, devices, hardware.count_gpus())
    tier = hardware.CPU if tier is hardware.CUDA_SHARED else tier
    dist.init_process_group(
        tier.backend, store=dist.PrefixStore("group", store), rank=rank, world_size=ranks, timeout=timedelta(seconds=TORCHRUN_TIMEOUT)
    )

    def start() -> Fabric:
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend=tier.backend)
        launched = Fabric(accelerator=tier.accelerator, devices=devices, num_nodes=nodes, strategy=strategy)
        launched.launch()
        return launched

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    say(heading(script, tier, ranks))
    verdicts: dict[str, Verdict] = {}
    spoilt = ""
    for one in wanted_variants(script, arguments.variant):
        if reason := spoilt or hardware.missing(one.needs, tier):
            verdicts[one.name] = Verdict(NOT_MEASURED, reason)
        else:
            ended = _performed(Job(script.path, one.name, ranks, tier), rank, start, one.kind)
            verdicts[one.name] = judge(script.side, one.kind, _shared(store, one.name, ended, ranks))
            if any(end.how != "measured" for end in verdicts[one.name].ranks):
                spoilt = f"needs a process group that {one.name} has not spoilt: run it alone with --variant {one.name}"
        say(report(one, verdicts[one.name]))
    say(conclusion(script, list(verdicts.values())))
    _shared(store, "leaving", Ended(rank, "unfinished"), ranks)
    return exit_code(list(verdicts.values()))


def _performed(job: Job, rank: int, start: Callable[[], Fabric], kind: Kind) -> Ended:
    """Run the variant in this process. An error that comes when the process group's patience is over tells where the rank hung."""
    notices: list[Notice] = []
    entered: list[float] = []
    ended = perform(job, rank, start, lambda: entered.append(time.monotonic()), notices.append)
    if ended.how == "raised" and isinstance(kind, Hangs) and entered and time.monotonic() >= entered[0] + TORCHRUN_TIMEOUT:
        ended = replace(ended, how="stuck")
    return replace(ended, notices=tuple(notices))


def _shared(store: Any, key: str, mine: Ended, ranks: int) -> list[Ended]:
    """What every rank says under this key, through the launcher's store: it works when the process group does not."""
    store.set(f"{key}/{mine.rank}", pickle.dumps(mine))
    ends = []
    for rank in range(ranks):
        try:
            store.wait([f"{key}/{rank}"], timedelta(seconds=3 * TORCHRUN_TIMEOUT))
            ends.append(pickle.loads(store.get(f"{key}/{rank}")))
        except RuntimeError:
            ends.append(Ended(rank, "unfinished", message="has not said how it ended"))
    return ends

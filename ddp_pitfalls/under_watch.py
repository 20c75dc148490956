"""Inside a rank: put ``checks.Watch`` on every model of a variant, and pass on what it finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.checks import Watch, _watches
from ddp_pitfalls.measure import FOUND, Notice


def watch_every_model(notice: Callable[[Notice], None]) -> Callable[[], None]:
    """From now on, watch every model that is wrapped in DDP, at each step. Call what this returns when the variant has ended: a model that
    never made a step is looked at then, after its last backward.
    """
    watches: list[Watch] = []
    wrap = DistributedDataParallel.__init__

    class Noting(Watch):
        """Tells the kinds of its findings, each in a notice."""

        def _told(self, new: dict[tuple[str, str], str], step: int) -> str:
            for (kind, _), text in new.items():
                notice(Notice(FOUND, f"{kind}: {text}"))
            return super()._told(new, step)

    def wrap_and_watch(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        wrap(wrapper, *args, **kwargs)
        watches.append(Noting(wrapper, every=1, tell=lambda _: None))

    def look() -> None:
        for watch in watches:
            if watch.steps == 0 and watch in _watches:
                watch._look()

    DistributedDataParallel.__init__ = wrap_and_watch  # type: ignore[method-assign, assignment]
    return look

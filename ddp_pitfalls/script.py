"""A repro or fix script as data: its pitfall, its side of the pair, and its variants."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from lightning.fabric import Fabric

from ddp_pitfalls import hardware
from ddp_pitfalls.measure import FIX, REPRO, Kind, Measurement, Silent

Function = Callable[[Fabric], Measurement]
MARK = "__variant__"


class BadScript(Exception):
    """A script that cannot be run; the message names the file and what to mend."""


@dataclass(frozen=True)
class Variant:
    """One way to meet the pitfall: a function of a script, how the pitfall shows in it, and what it cannot do without."""

    name: str
    function: Function
    kind: Kind
    needs: Sequence[str]
    varies: str
    protects: str


@dataclass(frozen=True)
class Script:
    path: Path
    side: str
    pitfall: str
    title: str
    variants: dict[str, Variant]


@overload
def variant(kind: Function) -> Function: ...
@overload
def variant(
    kind: Kind | None = None, *, needs: str | Sequence[str] = (), varies: str = "", protects: str = ""
) -> Callable[[Function], Function]: ...
def variant(kind: Any = None, *, needs: str | Sequence[str] = (), varies: str = "", protects: str = "") -> Any:
    """Mark a function of a script as a variant: it takes the launched Fabric and returns a Measurement.

    ``kind`` says how the pitfall shows (nothing: silently), ``needs`` what the variant cannot do without:
    ``gpu``, ``2 gpus``, ``gloo``, ``nccl``, ``spawn``, or a release such as ``lightning>=2.3``. ``varies`` is the reason why
    its numbers differ from run to run: then only the verdict is recorded. ``protects`` says which layer saves its user from the
    mistake: such a variant stands in the fix alone.
    """
    if callable(kind):
        return variant()(kind)

    def mark(function: Function) -> Function:
        setattr(function, MARK, (kind or Silent(), (needs,) if isinstance(needs, str) else tuple(needs), varies, protects))
        return function

    return mark


def load(path: Path) -> Script:
    """Import the script at ``path``. Raises BadScript."""
    path = path.resolve()
    side, pitfall = path.parent.name, path.stem.replace("_", "-")
    if side not in (REPRO, FIX):
        raise BadScript(f"{path}: a script stands in {REPRO}/ or {FIX}/, which decides what is expected of it")
    name = f"{side}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BadScript(f"{path}: no such Python script")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadScript(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    variants = {
        key: Variant(key, value, *getattr(value, MARK)) for key, value in vars(module).items() if callable(value) and hasattr(value, MARK)
    }
    if not variants:
        raise BadScript(f"{path}: no function is marked @variant")
    for one in variants.values():
        try:
            hardware.missing(one.needs, hardware.CPU)
        except hardware.UnknownNeed as error:
            raise BadScript(f"{path}: {one.name}: {error}") from error
    return Script(path, side, pitfall, (module.__doc__ or "").strip().partition("\n")[0], variants)

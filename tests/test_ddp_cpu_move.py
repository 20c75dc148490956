"""What the page ddp-cpu-move says of DDP's hooks, and that ``watch_gradient_hooks`` finds each loss of them and nothing else.

All of it is tried in one child process, which alone has a process group: this file run as a script prints what it found.
"""

import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.checks import replicated_part, watch_gradient_hooks

ALL = ["module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"]
SWAPS = "set_swap_module_params_on_conversion"  # torch.__future__ has it from 2.3 on
INPUTS = torch.linspace(-1, 1, 40).view(4, 10)


def frozen() -> nn.Module:
    model = layers()
    model[0].requires_grad_(False)
    return model


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))


def weights(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype, copy=True) for name, value in model.state_dict().items()}


def other_dtype_through_data(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        p.data = p.data.double()
        p.data = p.data.float()


@torch.no_grad()
def other_memory_through_set(model: nn.Module) -> None:
    for p in model.parameters():
        p.set_(p.detach().clone())  # type: ignore[call-overload]


@torch.no_grad()
def other_values_through_copy(model: nn.Module) -> None:
    for p in model.parameters():
        p.copy_(torch.full_like(p, 0.5))


def other_memory_through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def over_meta(model: nn.Module) -> None:
    kept = weights(model)
    model.to("meta").to_empty(device="cpu").load_state_dict(kept)


def new_layer(model: DistributedDataParallel) -> None:
    model.module[2] = nn.Linear(10, 5)


Change = Callable[[DistributedDataParallel], Any]
LOST: dict[str, tuple[Change, list[str]]] = {
    "a dtype and back": (lambda m: m.double().float(), ALL),
    "a dtype, not back": (lambda m: m.double(), ALL),
    "a dtype and back in eval mode": (lambda m: m.eval().double().float().train(), ALL),
    "one layer": (lambda m: m.module[2].double().float(), ALL[2:]),
    "one parameter, through .data": (lambda m: other_dtype_through_data([m.module[0].bias]), ALL[1:2]),
    "all, through .data": (lambda m: other_dtype_through_data(m.parameters()), ALL),
    "set_": (other_memory_through_set, ALL),
    "meta and back": (over_meta, ALL),
    "a new layer": (new_layer, ALL[2:]),
    "load_state_dict(assign=True)": (lambda m: m.load_state_dict(weights(m), assign=True), ALL),
}
KEPT: dict[str, Change] = {
    "nothing": lambda m: None,
    "cpu() on a CPU": lambda m: m.cpu(),
    "to() where it is": lambda m: m.to("cpu", torch.float32),
    "other memory through .data": other_memory_through_data,
    "copy_": lambda m: other_values_through_copy(m),
    "load_state_dict": lambda m: m.load_state_dict(weights(m)),
    "load_state_dict of another dtype": lambda m: m.load_state_dict(weights(m, torch.float64)),
    "to_empty on the same device": lambda m: m.to_empty(device="cpu").module.load_state_dict(weights(layers())),
    "eval and train": lambda m: m.eval().train(),
    "frozen for a while": lambda m: m.requires_grad_(False).requires_grad_(True),
    "a deep copy moved": lambda m: copy.deepcopy(m.module).double(),
    "storage released and put back": lambda m: release_and_put_back(m.parameters()),
    "a step without DDP's averaging": lambda m: backward_without_averaging(m),
}


def release_and_put_back(parameters: Iterable[nn.Parameter]) -> None:
    for storage in [p.untyped_storage() for p in parameters]:
        kept = storage.clone()
        storage.resize_(0)
        storage.resize_(kept.nbytes())
        storage.copy_(kept)


def backward_without_averaging(model: DistributedDataParallel) -> None:
    with model.no_sync():
        model(INPUTS).sum().backward()


def tried() -> dict[str, Any]:
    """What happens to a wrapped model, by the name of the change."""
    found: dict[str, Any] = {}
    for name, change in {**{name: change for name, (change, _) in LOST.items()}, **KEPT}.items():
        with suppress(TypeError):  # 2.0 has no assign=
            found[name] = after(layers(), change)
    found["a frozen layer"] = after(frozen(), lambda m: m.module[0].double().float())
    found["unfrozen after wrapping"] = after(frozen(), lambda m: m.requires_grad_(True))
    found["asked without gradients"] = asked_without_gradients()
    found["dead parameters"] = dead_parameters()
    found["one layer moved"] = one_layer_moved()
    found["one layer moved, and unused parameters looked for"] = one_layer_moved(find_unused_parameters=True)
    found["the wrapper inside"] = replicated_part(nn.Sequential(inside := wrapped(layers()))) is inside
    if hasattr(torch.__future__, SWAPS):
        found["swapping"] = swapping()
    return found


def after(module: nn.Module, change: Change) -> dict[str, list[str]]:
    """What the check names before and after a change, and which gradients DDP then averages."""
    model = wrapped(module)
    detached = watch_gradient_hooks(model)
    before = detached()
    model(INPUTS).sum().backward()
    change(model)
    return {"before": before, "named": detached(), "averaged": averaged(model)}


def wrapped(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """A model whose gradients come doubled out of DDP's averaging."""
    model = DistributedDataParallel(module, **options)
    model.register_comm_hook(None, double)
    return model


def double(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().mul_(2))
    return future


def averaged(model: DistributedDataParallel) -> list[str]:
    """The parameters whose gradients go through DDP's averaging."""
    gradients = []
    for one in (model, copy.deepcopy(model.module)):
        one.zero_grad()
        one(INPUTS.to(next(model.parameters()).dtype)).sum().backward()
        gradients.append([p.grad for p in one.parameters()])
    names = [name for name, _ in model.named_parameters()]
    return [name for name, found, alone in zip(names, *gradients) if alone is not None and torch.equal(found, 2 * alone)]


def asked_without_gradients() -> list[list[str]]:
    model = wrapped(layers())
    with torch.inference_mode():
        detached = watch_gradient_hooks(model)
    with torch.no_grad():
        before = detached()
    model.double().float()
    with torch.inference_mode():
        return [before, detached()]


def dead_parameters() -> dict[str, bool]:
    """Whether an optimizer made before still holds the model's parameters."""
    held = {}
    for name in ("a dtype and back", "meta and back"):
        model = wrapped(layers())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        LOST[name][0](model)
        held[name] = {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
    return held


def one_layer_moved(**options: Any) -> tuple[list[str], str]:
    """Which gradients are averaged in the first step after that, and the error of the second forward."""
    model = wrapped(layers(), **options)
    model.module[2].double().float()
    return averaged(model), error_of(lambda: model(INPUTS))


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except RuntimeError as error:
        return f"{error} {error.__cause__ or ''}"
    return ""


def swapping() -> dict[str, str]:
    """The errors that the setting brings."""
    getattr(torch.__future__, SWAPS)(True)
    try:
        model = wrapped(layers())
        module = layers()
        again = wrapped(module)
        again(INPUTS).sum().backward()
        del again
        in_use = layers()
        output = in_use(INPUTS)
        return {
            "double": error_of(lambda: model.double()),
            "cpu() on a CPU": error_of(lambda: model.cpu()),
            "load_state_dict": error_of(lambda: model.load_state_dict(weights(model))),
            ".data": error_of(lambda: other_dtype_through_data(model.parameters())),
            "before wrapping": error_of(lambda: layers().double().load_state_dict(weights(layers()))),
            "after the wrapper is gone": error_of(lambda: module.double()),
            "between forward and backward": error_of(lambda: in_use.double() and output),
        }
    finally:
        getattr(torch.__future__, SWAPS)(False)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", LOST)
def test_a_lost_hook_is_named(found: dict[str, Any], name: str) -> None:
    if name == "load_state_dict(assign=True)" and name not in found:
        pytest.skip("this torch has no assign=")
    assert found[name] == {"before": [], "named": LOST[name][1], "averaged": []}  # one bucket holds them all, and it never fills


@pytest.mark.parametrize("name", KEPT)
def test_no_false_alarm(found: dict[str, Any], name: str) -> None:
    assert found[name] == {"before": [], "named": [], "averaged": ALL}


def test_parameters_without_a_hook(found: dict[str, Any]) -> None:
    assert found["a frozen layer"] == {"before": [], "named": [], "averaged": ALL[2:]}
    assert found["unfrozen after wrapping"] == {"before": [], "named": ALL[:2], "averaged": ALL[2:]}


def test_the_check_works_where_gradients_are_off(found: dict[str, Any]) -> None:
    assert found["asked without gradients"] == [[], ALL]


def test_over_meta_the_optimizer_keeps_dead_parameters(found: dict[str, Any]) -> None:
    assert found["dead parameters"] == {"a dtype and back": True, "meta and back": False}


def test_one_layer_is_told_in_the_next_forward_unless_unused_parameters_are_looked_for(found: dict[str, Any]) -> None:
    averaged, error = found["one layer moved"]
    assert averaged == []
    assert "Expected to have finished reduction in the prior iteration" in error
    assert "Parameter indices which did not receive grad for rank 0: 2 3" in error
    assert found["one layer moved, and unused parameters looked for"] == [ALL[:2], ""]


def test_swapping_makes_the_move_loud_and_more(found: dict[str, Any]) -> None:
    if "swapping" not in found:
        pytest.skip(f"this torch has no {SWAPS}")
    errors = found["swapping"]
    assert "_apply(): Couldn't swap Linear.weight" in errors["double"]
    assert "Expected use_count of t1 to be 1 or 2 with an AccumulateGrad node but got" in errors["double"]
    for refused in ("cpu() on a CPU", "load_state_dict", "between forward and backward"):
        assert "Expected use_count of t1" in errors[refused], refused
    for allowed in (".data", "before wrapping", "after the wrapper is gone"):
        assert errors[allowed] == "", allowed


def test_the_wrapper_is_found_inside(found: dict[str, Any]) -> None:
    assert found["the wrapper inside"]
    assert replicated_part(nn.Sequential(layers())) is None


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=(Path(folder) / "store").as_uri(), rank=0, world_size=1)
        print(json.dumps(tried()))
        dist.destroy_process_group()

"""What a round asks of the device: its random numbers, its arithmetic, and how it runs fast on a GPU.

The fast way is a wrapper around the same round: its passes are compiled, and all that it does on the device
is captured once as a CUDA graph and replayed, so that the host only hands over the round's batches and seed.
"""

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .fuse import fused_inductor

_WARM_UP = 3
_RECOMPILATIONS = 256  # torch's limit is for one run, and a process makes many


@contextlib.contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """What modules such as dropout draw from may be seeded inside; the caller's state comes back."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        mps = torch.mps.get_rng_state() if device.type == "mps" else None
        try:
            yield
        finally:
            if mps is not None:
                torch.mps.set_rng_state(mps)


def set_seed(device: torch.device, seed: int) -> None:
    """Seed what modules such as dropout draw from, on the CPU and on the device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


@contextlib.contextmanager
def arithmetic(device: torch.device, precision: str) -> Iterator[None]:
    """TF32 on or off on a GPU, and as it was before when done."""
    if device.type != "cuda":
        yield
        return
    exact = precision in ("float32", "float64")
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("highest" if exact else "high")
        torch.backends.cudnn.allow_tf32 = not exact
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled, once for a process: runs after the first find it ready."""
    fast = torch.compile(function, dynamic=False, backend=fused_inductor)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILATIONS):
            return fast(*args)

    return call


_Captured = tuple[torch.cuda.CUDAGraph, Tensor, Tensor]  # the graph, its input, its output


class Replay:
    """A round on the device as a CUDA graph: captured at its first call for each setting, then replayed.

    A setting (phase, learning rate) is baked into its graph; what changes from round to round is the batches,
    which are copied into the graph's own input, and the seed, which the graph reads when it is replayed.
    """

    def __init__(self, work: Callable[..., Tensor], state: Callable[[], dict[str, Tensor]]):
        """Set up without capturing anything yet.

        Args:
            work: (*setting, index) -> loss; all that a round does on the device, without waiting for it.
            state: every tensor that the work changes.
        """
        self._work, self._state = work, state
        self._graphs: dict[tuple[Any, ...], _Captured] = {}

    def __call__(self, *setting: Any, index: Tensor, seed: Callable[[], None]) -> Tensor:
        """One round; `index` may be in pinned memory, and `seed` is called right before it runs."""
        key = tuple(map(id, setting[:1])) + setting[1:]
        if key not in self._graphs:
            self._graphs[key] = self._capture(setting, index)
        graph, place, loss = self._graphs[key]
        place.copy_(index, non_blocking=True)
        seed()
        graph.replay()
        return loss.clone()

    def _capture(self, setting: tuple[Any, ...], index: Tensor) -> _Captured:
        """Run the work a few times to compile and to choose kernels, take the state back, and capture."""
        before = {name: tensor.clone() for name, tensor in self._state().items()}
        device = next(iter(before.values())).device
        place = index.to(device, copy=True)
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        generator = torch.cuda.default_generators[torch.cuda._get_device_index(device)]
        spare = generator.clone_state()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.backends.cudnn.flags(
                enabled=True, benchmark=True, deterministic=False, allow_tf32=torch.backends.cudnn.allow_tf32
            ):
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UP):
                        self._work(*setting, place)
                torch.cuda.current_stream(device).wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with _no_garbage_collection(), torch.cuda.graph(graph, pool=pool):
                    loss = self._work(*setting, place)
        except Exception:
            generator.graphsafe_set_state(spare)  # a capture that broke off leaves it waiting for the rest
            raise
        finally:
            with torch.no_grad():
                for name, tensor in self._state().items():
                    tensor.copy_(before[name])
        return graph, place, loss


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Nothing is collected in the middle: an old run's graph, destroyed then, would spoil the capture."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def without_speed(why: str) -> None:
    """Say once, in one line, that rounds run one operation after another."""
    warnings.warn(f"rounds run without compiled code or CUDA graphs: {why}", RuntimeWarning, stacklevel=3)

"""Everything that depends on the device: random numbers, arithmetic, and running fast on a GPU.

The fast way wraps the same round: its passes are compiled, and everything that it does on the device is
captured once as a CUDA graph and replayed. The host only passes the round's batches and seed.
"""

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._triton import has_triton

from ..data.datasets import Dataset
from .fuse import fused_inductor

Engine = Literal["auto", "eager", "compiled"]

_WARM_UP = 3
_RECOMPILATIONS = 256  # torch's limit is for one run, and a process makes many


@contextlib.contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Inside, the random state of modules such as dropout may be seeded; the caller's state is restored."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        mps = torch.mps.get_rng_state() if device.type == "mps" else None
        try:
            yield
        finally:
            if mps is not None:
                torch.mps.set_rng_state(mps)


def set_seed(device: torch.device, seed: int) -> None:
    """Seed the random state of modules such as dropout, on the CPU and on the device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


@contextlib.contextmanager
def arithmetic(device: torch.device, precision: str) -> Iterator[None]:
    """TF32 on or off on a GPU; the previous setting is restored."""
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
    """Compile the function, once for each process; later runs reuse it."""
    fast = torch.compile(function, dynamic=False, backend=fused_inductor)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILATIONS):
            return fast(*args)

    return call


class Machine:
    """How rounds run on a device: one operation after another, compiled, or replayed as CUDA graphs."""

    def __init__(self, device: torch.device, engine: Engine, precision: str, abreast: bool | None = None):
        """Choose; `auto` is compiled on a CUDA GPU and eager elsewhere.

        Args:
            device: where.
            engine: how.
            precision: of a recipe.
            abreast: whether FedAvg's clients go through one pass where they can; chosen by the rest if None.
        """
        if engine not in get_args(Engine):
            raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(get_args(Engine))}")
        self.device, self.precision = device, precision
        self.compiles = engine == "compiled" or (engine == "auto" and device.type == "cuda")
        self.replays = self.compiles and device.type == "cuda"
        self.half = precision == "bf16"
        self._abreast = abreast

    @property
    def engine(self) -> str:
        """How rounds run, as text."""
        return "CUDA graphs" if self.replays else "compiled" if self.compiles else "eager"

    @property
    def fuses(self) -> bool:
        """Whether FBN's one-pass kernels are available."""
        return self.replays and has_triton()

    @property
    def abreast(self) -> bool:
        """Whether clients with weights of their own go through one pass where possible."""
        if self._abreast is not None:
            return self._abreast
        if self.device.type == "cpu":
            return not self.compiles
        return self.fuses and self.precision in ("tf32", "bf16")

    @property
    def insists(self) -> bool:
        """Whether the caller has asked for one pass for all clients."""
        return self._abreast is True

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result; compiled where that is how rounds run."""
        return compiled(function)(*args) if self.compiles else function(*args)

    def inputs(self, data: Dataset, x: Tensor) -> Tensor:
        """What the model is fed for stored samples."""
        return self.call(model_inputs, data, x, self.compiles and x.dim() == 4)

    def upload(self, values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        """An array on the way to the device, in a type that it has, without waiting for it."""
        tensor = torch.from_numpy(values).to(dtype)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def go_eager(self, why: str | Exception) -> None:
        """Switch to eager mode from now on; a warning says why."""
        self.compiles = self.replays = False
        if isinstance(why, Exception):
            why = f"{type(why).__name__}: {str(why).strip().partition(chr(10))[0]}"
        warnings.warn(f"rounds run without compiled code or CUDA graphs: {why}", RuntimeWarning, stacklevel=3)


def weighted_loss(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor, half: bool) -> Tensor:
    """The sum of the samples' losses, each with its weight."""
    return F.cross_entropy(class_scores(model, x, weights.dtype, half), y, reduction="none") @ weights


def client_losses(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor, half: bool) -> Tensor:
    """Each client's loss, (clients,), where batches of one length lie one after another in x.

    `weights`, (batch,), are those of a client's samples.
    """
    losses = F.cross_entropy(class_scores(model, x, weights.dtype, half), y, reduction="none")
    return losses.view(-1, len(weights)) @ weights


def class_scores(model: nn.Module, x: Tensor, dtype: torch.dtype, half: bool) -> Tensor:
    """The model's output, (N, classes); `half` computes in bfloat16 where that does no harm."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        return model(x).to(dtype)


def model_inputs(data: Dataset, x: Tensor, channels_last: bool) -> Tensor:
    """What the model is fed for stored samples."""
    x = data.inputs(x)
    return x.to(memory_format=torch.channels_last) if channels_last else x


_Captured = tuple[torch.cuda.CUDAGraph, Tensor, Tensor]  # the graph, its input, its output


class Replay:
    """A round on the device as a CUDA graph: captured at its first call for each setting, then replayed.

    A setting (phase, learning rate) is fixed in its graph. From round to round only the batches change, which
    are copied into the graph's own input, and the seed, which the graph reads when it is replayed.
    """

    def __init__(self, work: Callable[..., Tensor], state: Callable[[], dict[str, Tensor]]):
        """Set up without capturing anything yet.

        Args:
            work: (*setting, index) -> loss; everything that a round does on the device, without waiting for
                it.
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
        try:
            graph, loss = capture(lambda: self._work(*setting, place), device, pool=pool)
        finally:
            with torch.no_grad():
                for name, tensor in self._state().items():
                    tensor.copy_(before[name])
        return graph, place, loss


def capture(
    work: Callable[[], Tensor],
    device: torch.device,
    *,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    warm_up: Callable[[], object] | None = None,
    times: int = _WARM_UP,
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Run the work a few times to compile and to choose kernels, then capture it; returns graph and output.

    Args:
        work: what is to be replayed, without waiting for the device.
        device: a CUDA device.
        pool: the memory of another graph that never runs at the same time.
        stream: where to capture.
        warm_up: what to run before; the work itself if not given.
        times: how often to run that.
    """
    generator = torch.cuda.default_generators[torch.cuda._get_device_index(device)]
    spare = generator.clone_state()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=True, deterministic=False, allow_tf32=torch.backends.cudnn.allow_tf32
        ):
            with torch.cuda.stream(side):
                for _ in range(times):
                    (warm_up or work)()
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with _no_garbage_collection(), torch.cuda.graph(graph, pool=pool, stream=stream):
                output = work()
    except Exception:
        generator.graphsafe_set_state(spare)  # a capture that broke off leaves it waiting for the rest
        raise
    return graph, output


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: destroying an old run's graph would spoil the capture."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()

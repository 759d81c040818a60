"""The models: the paper's network, the demo's, two residual networks, or any function of the user's.

A factory takes (input shape, number of classes) and returns a module whose output is one score for each
class; the softmax is in the loss. `MODELS` is the table.
"""

import importlib
import inspect
import math
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Factory = Callable[[tuple[int, ...], int], nn.Module]


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The paper's network (appendix, table 1): four convolutions, each convolution, ReLU, BatchNorm."""
    channels, height, width = _image(shape, "cnn")

    def block(inside: int, outside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(outside)]

    return nn.Sequential(
        *block(channels, 64),
        *block(64, 64),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        *block(64, 128),
        *block(128, 128),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(128 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def cnn16(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small network (HBN's): three blocks of convolution, BatchNorm, ReLU, pooling, with 16, 32, 64
    channels."""
    channels, height, width = _image(shape, "cnn16")
    layers: list[nn.Module] = []
    for outside in (16, 32, 64):
        convolution = nn.Conv2d(channels, outside, 3, padding=1)
        layers += [convolution, nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)]
        channels = outside
    features = 64 * (height // 8) * (width // 8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, classes))


def plain9(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Nine convolutions of 16 channels in a row, each convolution, BatchNorm, ReLU, without shortcuts."""
    channels, _, _ = _image(shape, "plain9")
    layers: list[nn.Module] = []
    for i in range(9):
        stride = 2 if i in (3, 6) else 1
        layers += [nn.Conv2d(channels, 16, 3, stride, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        channels = 16
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two hidden layers of 128, each linear, ReLU, BatchNorm: the demo's network."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), 128),
        nn.ReLU(),
        nn.BatchNorm1d(128),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.BatchNorm1d(128),
        nn.Linear(128, classes),
    )


class _Residual(nn.Module):
    """Two convolutions with BatchNorm, added to the input (He et al., 2016)."""

    def __init__(self, inside: int, outside: int, stride: int, project: bool):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.stride, self.widen = stride, outside - inside
        self.shortcut = None
        if project and (stride > 1 or self.widen):
            projection = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.shortcut is not None:
            return F.relu(y + self.shortcut(x))
        x = x[:, :, :: self.stride, :: self.stride]
        return F.relu(y + F.pad(x, (0, 0, 0, 0, 0, self.widen)))  # without parameters: new channels are 0


def _resnet(channels: int, classes: int, widths: list[int], blocks: int, project: bool) -> nn.Module:
    """A stem, `blocks` residual blocks of each width, each width at half the size, and an average."""
    stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(widths[0]), nn.ReLU()]
    inside = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(_Residual(inside, width, 2 if stage and not block else 1, project))
            inside = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet20(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-20 for small images: three widths of three blocks, shortcuts without parameters."""
    return _resnet(_image(shape, "resnet20")[0], classes, [16, 32, 64], 3, project=False)


def resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-18 for small images: four widths of two blocks, a 3 x 3 stem and no pooling after it."""
    return _resnet(_image(shape, "resnet18")[0], classes, [64, 128, 256, 512], 2, project=True)


MODELS: dict[str, Factory] = {
    "cnn": cnn,
    "cnn16": cnn16,
    "mlp": mlp,
    "resnet20": resnet20,
    "resnet18": resnet18,
    "plain9": plain9,
}


def build(name: str | Factory, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """A fresh model; the same seed gives the same weights, and no global random state is touched.

    Args:
        name: a name in `MODELS`; or a factory of the user's own, itself or as `package.module:function`,
            called with (shape, classes) if it takes two arguments, and with none if it needs none.
        shape: of one input.
        classes: how many.
        seed: of the weights.

    Example:
        >>> build("mlp", (1, 8, 8), 10, seed=0)[-1]
        Linear(in_features=128, out_features=10, bias=True)
    """
    factory = name if callable(name) else find(name)
    name = getattr(factory, "__name__", "?") if callable(name) else name
    required = [
        p
        for p in inspect.signature(factory).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if len(required) not in (0, 2):
        raise ValueError(
            f"model {name!r} needs {len(required)} arguments; "
            "it must take two (input shape, number of classes) or none"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            model = factory(shape, classes) if required else factory()  # pyrefly: ignore
        except (Exception, SystemExit) as error:
            if name in MODELS:
                raise
            raise ValueError(f"model {name!r} cannot be made: {_cause(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def find(name: str) -> Factory:
    """The factory of this name; an error names the choices."""
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        raise ValueError(
            f"model {name!r} is not known; choose from {', '.join(MODELS)}, "
            "or name a function of your own as package.module:function"
        )
    factory = imported("model", name)
    if not callable(factory):
        raise ValueError(f"model {name!r} is a {type(factory).__name__}, not a function")
    return factory


def imported(kind: str, name: str) -> Any:
    """Import `package.module:name`; an error names the kind of object that was asked for."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # of whatever the module does
        raise ValueError(f"{kind} {name!r} cannot be imported: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """The error raised by a user's own code, and where, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    last = [f for f in frames if not f.filename.startswith("<") and f.filename != importlib.__file__][-1]
    file, line = last.filename, last.lineno
    if isinstance(error, SyntaxError) and error.filename:
        file, line, error = error.filename, error.lineno, SyntaxError(error.msg)
    own = "" if file == __file__ else f" ({file}, line {line})"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{own}"


def _image(shape: tuple[int, ...], model: str) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise ValueError(
            f"model {model!r} needs images of at least 4 x 4, got samples of shape {shape}: use mlp"
        )
    return shape[0], shape[1], shape[2]

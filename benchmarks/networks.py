"""DenseNet-121 and MobileNetV2, layer for layer as their papers have them, without torchvision."""

import torch
from torch import nn
from torch.nn import functional as F


class Dense(nn.Module):
    """A layer of DenseNet: its 32 new channels go beside what came in."""

    def __init__(self, inside, growth=32, bottleneck=128):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inside), nn.Conv2d(inside, bottleneck, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck)
        self.conv2 = nn.Conv2d(bottleneck, growth, 3, padding=1, bias=False)

    def forward(self, x):
        new = self.conv1(F.relu(self.norm1(x), inplace=True))
        return torch.cat([x, self.conv2(F.relu(self.norm2(new), inplace=True))], 1)


def densenet121(classes=1000):
    """121 BatchNorm layers with 41,824 channels."""
    channels = 64
    layers = [nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)]
    layers += [nn.BatchNorm2d(channels), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    for length in (6, 12, 24, 16):
        for _ in range(length):
            layers.append(Dense(channels))
            channels += 32
        layers += [nn.BatchNorm2d(channels), nn.ReLU(True)]
        if length != 16:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Inverted(nn.Module):
    """A block of MobileNetV2: wider, a convolution for each channel, narrow again."""

    def __init__(self, inside, outside, stride, wider):
        super().__init__()
        hidden = inside * wider
        layers = [] if wider == 1 else convolution(inside, hidden, 1)
        layers += convolution(hidden, hidden, 3, stride, groups=hidden)
        layers += [nn.Conv2d(hidden, outside, 1, bias=False), nn.BatchNorm2d(outside)]
        self.body, self.around = nn.Sequential(*layers), stride == 1 and inside == outside

    def forward(self, x):
        return x + self.body(x) if self.around else self.body(x)


def convolution(inside, outside, size, stride=1, groups=1):
    conv = nn.Conv2d(inside, outside, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outside), nn.ReLU6(True)]


def mobilenet_v2(classes=1000):
    """52 BatchNorm layers with 17,056 channels."""
    table = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]
    layers, inside = convolution(3, 32, 3, 2), 32
    for wider, outside, length, stride in table:
        for i in range(length):
            layers.append(Inverted(inside, outside, stride if i == 0 else 1, wider))
            inside = outside
    layers += convolution(inside, 1280, 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes))

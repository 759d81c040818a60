"""Real models with BatchNorm, small, and what a client feeds them: one row of a table each."""

from collections.abc import Callable
from typing import NamedTuple

import monai.networks.nets as monai
import segmentation_models_pytorch as smp
import timm
import timm.layers
import torch
import torch_geometric.nn as pyg
import torchvision
import transformers


class Row(NamedTuple):
    """How a model is built, and what a call of client `i` in some round gets, from a generator."""

    build: Callable[[], torch.nn.Module]
    batch: Callable[[torch.Generator, int], tuple | dict]


def images(*shape, name=None):
    """3 + i samples, spread and shifted by client."""

    def batch(generator, client):
        x = torch.randn(3 + client, *shape, generator=generator) * (1 + client) + client
        return {name: x} if name else (x,)

    return batch


def pixels(*shape):
    return images(*shape, name="pixel_values")


def graph(generator, client):
    nodes = 20 + 10 * client
    edges = torch.randint(nodes, (2, 4 * nodes), generator=generator)
    return images(6)(generator, nodes - 3)[0] / nodes + client, edges


def series(generator, client):
    return {"past_values": torch.randn(4 + client, 32, 2, generator=generator).cumsum(1) * (1 + client)}


def speech(generator, client):
    return {"input_values": torch.randn(2 + client, 1600, generator=generator) * (1 + client)}


def from_timm(name, size=64, **settings):
    return Row(lambda: timm.create_model(name, num_classes=5, **settings), images(3, size, size))


def from_torchvision(name, size=64, **settings):
    settings = {"weights": None, "num_classes": 5} | settings
    return Row(lambda: torchvision.models.get_model(name, **settings), images(3, size, size))


def from_transformers(name, batch, **settings):
    """`name` is the model's class; its configuration is made small by `settings`."""

    def build():
        kind = getattr(transformers, name)
        return kind(kind.config_class(**settings))

    return Row(build, batch)


def synchronized():
    return timm.layers.convert_sync_batchnorm(timm.create_model("test_efficientnet", num_classes=5))


MODELS = {
    # BatchNorm, dropout and activation in one layer
    "timm EfficientNet": from_timm("efficientnet_b0", 32, drop_path_rate=0.2),
    "timm EfficientNet, SyncBatchNormAct": Row(synchronized, images(3, 64, 64)),
    "timm RegNet": from_timm("regnety_002"),
    "timm DenseNet": from_timm("densenet121", 32, growth_rate=8, block_config=(2, 4, 4, 2)),
    "timm CspNet": from_timm("cs3darknet_s", 32),
    "timm VovNet": from_timm("ese_vovnet19b_slim"),
    "timm MobileNetV3": from_timm("mobilenetv3_small_050"),
    "timm ByobNet": from_timm("test_byobnet"),
    "timm GhostNet": from_timm("ghostnet_050"),
    "timm MobileVit": from_timm("mobilevit_xxs"),
    # plain layers
    "timm ResNet": from_timm("resnet10t"),
    "torchvision ResNet": from_torchvision("resnet18"),
    "torchvision DenseNet": Row(
        lambda: torchvision.models.DenseNet(8, (2, 2, 2), 16, num_classes=5), images(3, 32, 32)
    ),
    "torchvision MobileNetV2": from_torchvision("mobilenet_v2"),
    "torchvision GoogLeNet, two outputs more": from_torchvision("googlenet", 48, init_weights=False),
    "torchvision DeepLabV3": from_torchvision("deeplabv3_mobilenet_v3_large", 32, weights_backbone=None),
    "torchvision ShuffleNetV2": from_torchvision("shufflenet_v2_x0_5"),
    "transformers ResNet": from_transformers(
        "ResNetForImageClassification",
        pixels(3, 32, 32),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
    ),
    "transformers MobileNetV2": from_transformers(
        "MobileNetV2ForImageClassification", pixels(3, 64, 64), depth_multiplier=0.35
    ),
    "transformers RegNet": from_transformers(
        "RegNetForImageClassification",
        pixels(3, 32, 32),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        groups_width=8,
    ),
    "transformers EfficientNet": from_transformers(
        "EfficientNetForImageClassification",
        pixels(3, 64, 64),
        width_coefficient=0.25,
        depth_coefficient=0.3,
        hidden_dim=320,
    ),
    "transformers Levit": from_transformers(
        "LevitForImageClassification",
        pixels(3, 64, 64),
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    "transformers Segformer": from_transformers(
        "SegformerForSemanticSegmentation",
        pixels(3, 64, 64),
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 16, 16],
        decoder_hidden_size=16,
    ),
    "transformers PatchTST": from_transformers(
        "PatchTSTForPrediction",
        series,
        num_input_channels=2,
        context_length=32,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        ffn_dim=16,
    ),
    "transformers Wav2Vec2Conformer": from_transformers(
        "Wav2Vec2ConformerModel",
        speech,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=[8] * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
    ),
    "MONAI UNet, 3d": Row(
        lambda: monai.UNet(3, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=2, norm="batch"),
        images(1, 16, 16, 16),
    ),
    "MONAI DenseNet, 3d": Row(
        lambda: monai.DenseNet(3, 1, 2, init_features=8, growth_rate=4, block_config=(2, 2, 2)),
        images(1, 16, 16, 16),
    ),
    "MONAI SegResNet, 3d": Row(
        lambda: monai.SegResNet(3, init_filters=8, norm="batch", blocks_down=(1, 1), blocks_up=(1,)),
        images(1, 16, 16, 16),
    ),
    "MONAI ResNet, 3d": Row(
        lambda: monai.resnet10(n_input_channels=1, num_classes=2, widen_factor=0.25), images(1, 16, 16, 16)
    ),
    "MONAI EfficientNet": Row(
        lambda: monai.EfficientNetBN("efficientnet-b0", pretrained=False, num_classes=5), images(3, 32, 32)
    ),
    "PyG GIN": Row(lambda: pyg.models.GIN(6, 16, 3, 4, norm="batch_norm"), graph),
    "PyG GCN": Row(lambda: pyg.models.GCN(6, 16, 3, 4, norm="batch_norm"), graph),
    "smp Unet": Row(lambda: smp.Unet("resnet18", encoder_weights=None), images(3, 64, 64)),
    "smp Unet, encoder of timm": Row(
        lambda: smp.Unet(
            "tu-test_efficientnet", encoder_weights=None, encoder_depth=4, decoder_channels=(32, 16, 8, 8)
        ),
        images(3, 64, 64),
    ),
    "smp DeepLabV3Plus": Row(
        lambda: smp.DeepLabV3Plus("tu-efficientnet_b0", encoder_weights=None), images(3, 32, 32)
    ),
}

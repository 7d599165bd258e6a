"""Training steps of small models of torchvision and timm, for the table of `bench_moved.py`; both must be installed."""

import os

import torch

from tests.benchmarks.moved_models import labels, train

DTYPE = getattr(torch, os.environ.get("MOVED_DTYPE", "float32"))

# torchvision's wheels load their own operators beside torch's CUDA wheel alone. These models need none of them, and
# their import needs two schemas.
OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for schema in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
):
    if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
        OPERATORS.define(schema)

import timm  # noqa: E402
from torchvision import models  # noqa: E402
from torchvision.models.convnext import CNBlockConfig  # noqa: E402
from torchvision.models.resnet import BasicBlock  # noqa: E402


def classified(model, size=32):
    """A step of a classifier of small images."""
    return train(model, torch.randn(4, 3, size, size), labels, "adam", DTYPE)


def tv_resnet():
    return classified(models.ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10))


def tv_densenet():
    return classified(models.DenseNet(8, (2, 2), 16, num_classes=10))


def tv_squeezenet():
    return classified(models.squeezenet1_1(num_classes=10))


def tv_mobilenet():
    return classified(models.mobilenet_v3_small(num_classes=10))


def tv_shufflenet():
    return classified(models.shufflenet_v2_x0_5(num_classes=10))


def tv_vit():
    return classified(models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10))


def tv_swin():
    return classified(models.SwinTransformer([2, 2], 32, [2, 2], [2, 4], [4, 4], num_classes=10))


def tv_convnext():
    return classified(models.ConvNeXt([CNBlockConfig(32, 64, 1), CNBlockConfig(64, None, 1)], num_classes=10))


def timm_resnet():
    return classified(timm.create_model("test_resnet", num_classes=10))


def timm_vit():
    return classified(timm.create_model("test_vit", num_classes=10, img_size=32))


def timm_efficientnet():
    return classified(timm.create_model("test_efficientnet", num_classes=10))


def timm_convnext():
    return classified(timm.create_model("test_convnext", num_classes=10))


def timm_nfnet():
    return classified(timm.create_model("test_nfnet", num_classes=10))


def timm_byobnet():
    return classified(timm.create_model("test_byobnet", num_classes=10))


def timm_mambaout():
    return classified(timm.create_model("test_mambaout", num_classes=10))


MODELS = (
    *(tv_resnet, tv_densenet, tv_squeezenet, tv_mobilenet, tv_shufflenet, tv_vit, tv_swin, tv_convnext),
    *(timm_resnet, timm_vit, timm_efficientnet, timm_convnext, timm_nfnet, timm_byobnet, timm_mambaout),
)

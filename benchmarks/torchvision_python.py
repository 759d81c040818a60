"""torchvision beside a torch that its binary was not built for: its Python code is enough to build models."""

import torch

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library = []  # operators go when their library does


def importable():
    """Make `import torchvision` work: without the binary two operators are declared, without code."""
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _library.append(torch.library.Library("torchvision", "DEF"))
        for operator in OPERATORS:
            _library[0].define(operator)
        import torchvision  # noqa: F401

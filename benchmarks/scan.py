"""How many models of timm and torchvision have BatchNorm, how many convert, what is refused and why.

    python benchmarks/scan.py [--json results/benchmarks/scan-models.json]

Every model that the packages list is built, on the meta device, so that nothing is computed, and converted.
"""

import argparse
import json
import time
import warnings
from collections import Counter
from importlib.metadata import version
from inspect import signature
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torchvision_python import importable

import fedbatchnorm as fbn
from fedbatchnorm.experiments.environment import commit

IN_PLACE = {"uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"}


class Unfilled(TorchFunctionMode):
    """Tensors on the meta device have no values, so setting them can be left out: that is most of the time.

    With `parameters`, only what parameters are made of is on the meta device, for models that look at numbers
    while they are built.
    """

    def __init__(self, parameters=False):
        super().__init__()
        self.parameters = parameters

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")  # torch.nn.init says it by name
        if func.__name__ in IN_PLACE and filled.is_meta:
            return filled
        if self.parameters and func is torch.empty and kwargs.get("device") is None:
            kwargs = kwargs | {"device": "meta"}
        return func(*args, **kwargs)


def build(make):
    """The model on the meta device, or why it cannot be built there."""
    try:
        with torch.device("meta"), Unfilled():
            return make(), None
    except Exception:  # whatever a model's own code raises
        try:
            with Unfilled(parameters=True):
                return make(), None
        except Exception as error:
            return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"


def look(model):
    """What converting makes of a model: BatchNorm layers by class, and what keeps it from being converted."""
    found = fbn.inspect(model)
    layers = [f for f in found if f.becomes or f.problem]
    row = {"layers": dict(Counter(f.type for f in layers)), "converts": False, "refused": {}, "others": {}}
    row["others"] = {f.type: f.note for f in found if not (f.becomes or f.problem)}
    if layers:
        try:
            after = [f for f in fbn.inspect(fbn.convert(model)) if f.becomes]
            row["converts"] = len(after) == len(layers) and all(f.becomes == f.type for f in after)
        except fbn.ConversionError:
            row["refused"] = {f.type: f.problem for f in layers if f.problem}
    return row


def models():
    """(package, name, how to build it) of everything that the packages list."""
    import timm
    import torchvision

    for name in timm.list_models():
        yield "timm", name, lambda name=name: timm.create_model(name, pretrained=False)
    for name in torchvision.models.list_models():
        maker = torchvision.models.get_model_builder(name)
        backbone = {"weights_backbone": None} if "weights_backbone" in signature(maker).parameters else {}
        yield "torchvision", name, lambda maker=maker, backbone=backbone: maker(weights=None, **backbone)


def scan(rows):
    """Package -> how many models, by what became of them, with names where something did not work."""
    packages = {}
    for package, name, make in rows:
        counts = packages.setdefault(
            package,
            {"version": version(package), "models": 0, "batch_norm": 0, "converted": 0}
            | {"layers": {}, "refused": [], "others": [], "not_built": []},
        )
        counts["models"] += 1
        model, problem = build(make)
        if model is None:
            counts["not_built"].append({"model": name, "why": problem})
            continue
        row = look(model)
        counts["batch_norm"] += bool(row["layers"])
        counts["converted"] += row["converts"]
        for kind, layers in row["layers"].items():
            of_kind = counts["layers"].setdefault(kind, {"models": 0, "layers": 0})
            of_kind["models"] += 1
            of_kind["layers"] += layers
        for kind in ("refused", "others"):
            counts[kind] += [{"model": name, "type": t, "why": why} for t, why in row[kind].items()]
    return packages


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # those of old models, and of what `others` has
    importable()
    start = time.perf_counter()
    packages = scan(models())
    result = {"commit": commit(), "torch": torch.__version__, "seconds": round(time.perf_counter() - start)}
    result["packages"] = packages
    for name, counts in packages.items():
        print(name, {key: value for key, value in counts.items() if key != "layers"})
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

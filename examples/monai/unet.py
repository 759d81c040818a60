"""Federated segmentation with MONAI: a small 3D U-Net with BatchNorm at sites whose scanners differ.

    python examples/monai/unet.py                                  # some minutes on a CPU
    python examples/monai/unet.py --json results/monai/unet.json   # and the results into a file

Every site has volumes of its own: tissue with bright blobs to be found. What a scanner makes of them differs
by site, in gain and offset, and nothing normalizes it. Plain BatchNorm, with averaged running statistics, is
compared with federated BatchNorm: the same volumes, weights, batches and learning rate. MONAI is in the
extra `zoo`.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from monai.losses import DiceCELoss
from monai.networks.nets import UNet

import fedbatchnorm as fbn
from fedbatchnorm.adapters.client import answer, load, measure
from fedbatchnorm.adapters.replies import Reply
from fedbatchnorm.adapters.session import Session

# What a site's scanner makes of an intensity x: gain * x + offset.
SCANNERS = {"A": (1.0, 0.0), "B": (0.5, 2.0), "C": (3.0, -1.0), "D": (2.0, 6.0)}
SIDE, TRAIN, TEST, BATCH = 16, 24, 16, 4


def new_model(seed):
    """MONAI's U-Net with BatchNorm, three levels; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return UNet(3, 1, 1, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, norm="batch")


def volumes(count, gain, offset, rng):
    """Volumes and masks: smooth tissue, noise, and one to three ellipsoids that are brighter."""
    at = torch.linspace(-1, 1, SIDE)
    grid = torch.stack(torch.meshgrid(at, at, at, indexing="ij"))
    masks = torch.zeros(count, 1, SIDE, SIDE, SIDE)
    for mask in masks:
        for _ in range(int(torch.randint(1, 4, (), generator=rng))):
            center = (torch.rand(3, 1, 1, 1, generator=rng) - 0.5) * 1.2
            radii = 0.2 + 0.25 * torch.rand(3, 1, 1, 1, generator=rng)
            mask[0][(((grid - center) / radii) ** 2).sum(0) <= 1] = 1
    tissue = F.interpolate(torch.randn(count, 1, 4, 4, 4, generator=rng), size=(SIDE,) * 3, mode="trilinear")
    x = 0.5 * tissue + masks + 0.3 * torch.randn(masks.shape, generator=rng)
    return gain * x + offset, masks


def sites(seed):
    """Site -> its training volumes and masks, and those for testing."""
    found = {}
    for number, (name, scanner) in enumerate(SCANNERS.items()):
        rng = torch.Generator().manual_seed(100 * seed + number)
        found[name] = volumes(TRAIN, *scanner, rng), volumes(TEST, *scanner, rng)
    return found


def train(model, data, lr, rng):
    """One epoch of SGD; returns the mean loss and the steps."""
    x, masks = data
    loss_of, losses = DiceCELoss(sigmoid=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model.train()
    for index in torch.randperm(len(x), generator=rng).split(BATCH):
        optimizer.zero_grad()
        loss = loss_of(model(x[index]), masks[index])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses), len(losses)


@torch.no_grad()
def dice(model, data):
    """The mean over volumes of 2 |A and B| / (|A| + |B|)."""
    x, masks = data
    model.eval()
    found = (model(x) > 0).float()
    both, sizes = (found * masks).flatten(1).sum(1), (found + masks).flatten(1).sum(1)
    return float((2 * both / sizes.clamp(min=1)).mean())


def naive(seed, data, rounds, lr):
    """Plain BatchNorm and FedAvg: everything is averaged, running statistics too."""
    model, rng = new_model(seed), torch.Generator().manual_seed(seed)
    state = model.state_dict()
    for _ in range(rounds):
        states = []
        for here, _ in data.values():
            model.load_state_dict(state)
            train(model, here, lr, rng)
            states.append({name: value.clone() for name, value in model.state_dict().items()})
        state = {name: sum(s[name].double() for s in states) / len(states) for name in state}
        state = {name: value.to(model.state_dict()[name].dtype) for name, value in state.items()}
    model.load_state_dict(state)
    return model


def federated(seed, data, rounds, lr):
    """Federated BatchNorm: parameters are averaged, statistics are merged."""
    rng = torch.Generator().manual_seed(seed)
    session = Session(model=fbn.convert(new_model(seed)))
    session.start(new_model(seed).state_dict(), rounds)
    if session.wants_calibration():
        request, replies = session.request(), []
        for name, (here, _) in data.items():
            seen = measure(fbn.convert(new_model(seed)), request, here[0].split(BATCH))
            replies.append(Reply(name, statistics=seen.statistics))
        session.calibrated(replies)
    for number in range(1, rounds + 1):
        request, replies = session.begin(number, asked=list(data)), []
        for name, (here, _) in data.items():
            model = fbn.convert(new_model(seed))
            load(model, request)
            loss, steps = train(model, here, lr, rng)
            ours = answer(model, steps=steps)
            metrics = {"num-examples": TRAIN, "loss": loss}
            replies.append(Reply(name, ours.parameters, metrics, ours.statistics))
        taken = session.take(number, replies)
        session.finish(number, session.average(taken) if taken.used else None)
    session.end(rounds)
    model = new_model(seed)
    model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in session.arrays.items()})
    return model


METHODS = {"plain BatchNorm, averaged": naive, "federated BatchNorm": federated}


def main():
    """Train each method with each seed, print and save what comes out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    start, found = time.monotonic(), {}
    for name, method in METHODS.items():
        found[name] = {site: [] for site in SCANNERS}
        for seed in args.seeds:
            data = sites(seed)
            model = method(seed, data, args.rounds, args.lr)
            for site, (_, test) in data.items():
                found[name][site].append(dice(model, test))
        row = "  ".join(f"{site} {statistics.mean(values):.3f}" for site, values in found[name].items())
        print(f"{name:26}  {row}", flush=True)
    if args.json:
        write(args, found, time.monotonic() - start)


def write(args, found, seconds):
    """The results, with machine and commit."""
    import monai

    from fedbatchnorm.experiments.environment import commit, describe_device

    versions = {"torch": torch.__version__, "monai": monai.__version__}
    facts = {"rounds": args.rounds, "lr": args.lr, "seeds": args.seeds, "scanners": SCANNERS}
    machine = {"name": describe_device(torch.device("cpu")), "threads": torch.get_num_threads()}
    content = {"commit": commit() or "unknown", "machine": machine, "versions": versions, "seconds": seconds}
    with open(args.json, "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(content | facts | {"dice": found}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()

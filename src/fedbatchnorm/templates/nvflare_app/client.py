"""A client: receive, load, train, send; and before the first round, calibrate."""

import argparse

import nvflare.client as flare
from model import model_for
from nvflare.app_common.abstract.fl_model import FLModel
from task import accuracy, batches_of, train_locally

import fedbatchnorm as fbn
from fedbatchnorm.adapters.nvflare_client import calibrate, load, reply, wants_calibration


def arguments():
    """What job.py gives to every client."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="plain BatchNorm, to compare")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--gamma", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    """Train for as long as the server sends models."""
    args = arguments()
    model = model_for(args.dataset)
    if not args.plain:
        fbn.convert(model)
    flare.init()
    me = int(flare.get_site_name().rpartition("-")[2]) - 1  # site-1 holds the first part
    while flare.is_running():
        received = flare.receive()
        number = received.current_round
        if wants_calibration(received):
            flare.send(calibrate(model, received, (x for x, _ in batches_of(args, me, 0, epochs=1))))
            continue
        if args.plain:
            model.load_state_dict(received.params)
        else:
            load(model, received)
        metrics = {"accuracy": accuracy(model, args.dataset)}  # of the model that came
        batches = batches_of(args, me, number, args.epochs)
        metrics["loss"], examples, steps = train_locally(model, batches, args)
        if args.plain:
            meta = {"NUM_STEPS_CURRENT_ROUND": steps}
            flare.send(FLModel(params=model.state_dict(), metrics=metrics, meta=meta))
        else:
            flare.send(reply(model, received, metrics, steps=steps, meta={"num-examples": examples}))


if __name__ == "__main__":
    main()

"""The job: python job.py runs it in NVFlare's simulator."""

import argparse
import os
import pathlib

import torch
from model import model_for
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import PocEnv, SimEnv
from task import accuracy, load_data

from fedbatchnorm.adapters.nvflare import FederatedBatchNormAggregator
from fedbatchnorm.adapters.nvflare_recipe import FederatedBatchNormRecipe


def arguments():
    """The settings; --export and --export-dir are NVFlare's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="NVFlare alone, to see what goes wrong")
    parser.add_argument("--env", choices=["sim", "poc"], default="sim", help="simulator, or own processes")
    parser.add_argument("--dataset", choices=["digits", "cifar10"], default="digits")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--min-clients", type=int, help="the job ends if fewer are left; all but one")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--gamma", type=float, default=0.0, help="how alike the clients are, 0 to 1")
    parser.add_argument("--epochs", type=int, default=1, help="of a client over its data, in a round")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round-timeout", type=int, default=0, help="seconds; 0 waits for every client")
    parser.add_argument("--workspace", default="workspace", help="where runs leave their files")
    return parser.parse_args()


def recipe_for(args):
    """FedAvg with federated BatchNorm, or FedAvg alone."""
    model = model_for(args.dataset, args.seed)
    script = f"--dataset {args.dataset} --clients {args.clients} --gamma {args.gamma} --epochs {args.epochs}"
    script += f" --lr {args.lr} --seed {args.seed}" + (" --plain" if args.plain else "")
    common = {
        "name": "plain" if args.plain else "fbn",
        "model": {"class_path": "model.Net", "args": {"inputs": model.inputs, "seed": model.seed}},
        "min_clients": args.min_clients or max(1, args.clients - 1),
        "num_rounds": args.rounds,
        "train_script": "client.py",
        "train_args": script,
    }
    if args.plain:
        recipe = FedAvgRecipe(**common | {"min_clients": args.clients})
    else:
        # Settings of federated BatchNorm go here. NVFlare's own weight is the number of steps.
        aggregator = FederatedBatchNormAggregator(weight="num-examples", quorum=2)
        recipe = FederatedBatchNormRecipe(aggregator=aggregator, round_timeout=args.round_timeout, **common)
    recipe.add_server_file("model.py")  # what client.py imports goes to the clients with it
    return recipe


def main():
    """Run the job, and say how good the model has become."""
    args = arguments()
    try:
        load_data(args.dataset)  # else it is every client that misses it, in the middle of a long log
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    recipe = recipe_for(args)
    workspace = pathlib.Path(args.workspace).resolve()
    if args.env == "sim":
        env = SimEnv(num_clients=args.clients, workspace_root=str(workspace))
    else:
        os.environ.setdefault("NVFLARE_POC_WORKSPACE", str(workspace / "poc"))
        env = PocEnv(num_clients=args.clients)
    run = recipe.execute(env)
    folder = run.get_result(clean_up=False)
    status = run.get_status()  # the simulator has none, and raises instead
    if folder is None or (status and "COMPLETED" not in status):
        raise SystemExit(f"the job did not complete: {status}; the server's log says why")
    [file] = pathlib.Path(folder).rglob("FL_global_model.pt")
    model = model_for(args.dataset)
    model.load_state_dict(torch.load(file, weights_only=True)["model"])
    print(f"test accuracy {accuracy(model, args.dataset):.1%}, model in {file}")


if __name__ == "__main__":
    main()

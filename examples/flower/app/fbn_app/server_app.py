"""The server: any strategy for the parameters, federated BatchNorm for the statistics."""

import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import save_file

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import FederatedBatchNormStrategy

from .task import accuracy, load_data, new_model

app = ServerApp()


def wait_for(grid, nodes, seconds):
    """Until so many nodes are connected; an error if they do not come. Data are split over all that do."""
    until = time.monotonic() + seconds
    while (found := len(list(grid.get_node_ids()))) < nodes:
        if time.monotonic() > until:
            raise RuntimeError(
                f"{found} nodes are connected, and min-nodes is {nodes}: with fewer it would be another "
                "experiment. In Flower's simulation, flwr run . --stream --federation-config "
                f"'num-supernodes={nodes}'; in a federation, start more SuperNodes, wait longer with wait=, "
                f"or --run-config 'min-nodes={max(found, 1)}'"
            )
        time.sleep(1)


@app.main()
def main(grid, context):
    """All rounds, and the result into files if the configuration names one."""
    config = context.run_config
    nodes = config["min-nodes"]
    wait_for(grid, nodes, config["wait"])
    strategy = FedAvg(
        fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes, min_evaluate_nodes=0
    )
    model = new_model(config)
    arrays = ArrayRecord(model.state_dict())
    if config["fbn"]:
        byzantine = config["byzantine"]
        pixels = load_data(config["dataset"]).train.x[0, 0].numel()
        examples = config["local-epochs"] * config["max-examples"]
        strategy = FederatedBatchNormStrategy(
            strategy,
            model=fbn.convert(model),
            aggregator=fbn.defense("nnm+median", byzantine) if byzantine else None,
            max_count=examples * pixels,  # no layer of this model sees more values per channel
            max_examples=examples,
            checkpoint=config["checkpoint"] or None,
        )
    curve = {}

    def evaluate(server_round, arrays):
        model.load_state_dict(arrays.to_torch_state_dict())
        if server_round % max(1, config["rounds"] // 30) == 0:
            curve[server_round] = accuracy(model, config)
            return MetricRecord({"accuracy": curve[server_round]})
        return None

    result = strategy.start(
        grid, arrays, num_rounds=config["rounds"], timeout=config["timeout"], evaluate_fn=evaluate
    )
    if config["output"]:
        out = Path(config["output"])
        out.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in result.arrays.to_torch_state_dict().items()}, out)
        out.with_suffix(".json").write_text(json.dumps(curve))

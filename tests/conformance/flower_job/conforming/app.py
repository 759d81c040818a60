"""The suite's clients and server on Flower, in one process and in many."""

import sys
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import FederatedBatchNormStrategy, load, reply

client = ClientApp()
server = ServerApp()


def of(context):
    """The case, and the module that knows what is to be done."""
    sys.path.insert(0, context.run_config["place"])
    import cases

    return cases, cases.read_case(context.run_config["case"])


@client.train()
def train(message, context):
    cases, case = of(context)
    return cases.turn(
        case,
        context.node_config["partition-id"],
        message.content["config"]["server-round"],
        lambda model: load(model, message),
        lambda model, metrics, steps: reply(model, message, metrics, steps=steps),
        cases.hang if context.run_config.get("processes") else None,
    )


@server.main()
def main(grid, context):
    cases, case = of(context)
    file = Path(case.folder) / "said.txt"

    def note(event):
        with file.open("a") as said:
            said.write(event.text + "\n")

    asked = case.cohort or case.clients
    strategy = FederatedBatchNormStrategy(
        FedAvg(
            fraction_train=asked / case.clients,
            min_train_nodes=asked,
            min_available_nodes=case.clients,
            fraction_evaluate=0.0,
        ),
        model=fbn.convert(cases.Net()),
        on_event=note,
        **case.options(),
    )
    arrays = ArrayRecord(cases.Net().state_dict())
    # A SuperLink answers for a node that is gone, at most a minute after its last heartbeat.
    strategy.start(grid, arrays, num_rounds=case.rounds, timeout=600)

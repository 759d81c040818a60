"""The server of a plain Flower app."""

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from .task import Net

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = FedAvg()
    context.result = strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=3)

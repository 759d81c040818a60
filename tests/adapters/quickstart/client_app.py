"""A client of a plain Flower app."""

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .task import Net, accuracy, load_data, train_locally

app = ClientApp()


def loaders(context):
    return load_data(context.node_config["partition-id"], context.node_config["num-partitions"])


@app.train()
def train(message, context):
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader, _ = loaders(context)
    loss = train_locally(net, loader, lr=0.05)
    metrics = {"num-examples": len(loader.dataset), "loss": loss}
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, loader = loaders(context)
    metrics = {"num-examples": len(loader.dataset), "accuracy": accuracy(net, loader)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

"""A client: load, train, reply."""

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import load, reply

from .task import accuracy, batch_of, new_model, train_step

app = ClientApp()


@app.train()
def train(message, context):
    """One step on a batch of the client's own data; its momentum stays with the client."""
    config = context.run_config
    step = message.content["config"]["server-round"] - 1
    model = new_model(config)
    if config["fbn"]:
        model = fbn.convert(model)
        load(model, message)
    else:
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    state = context.state.array_records
    velocity = state["velocity"].to_torch_state_dict() if "velocity" in state else {}
    client, clients = context.node_config["partition-id"], context.node_config["num-partitions"]
    x, y = batch_of(config, client, clients, step)
    loss = train_step(model, x, y, velocity, config, step)
    context.state["velocity"] = ArrayRecord(velocity)
    metrics = {"num-examples": len(y), "loss": loss}
    if config["fbn"]:
        return reply(model, message, metrics)
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    """The model as it is, on the test set."""
    config = context.run_config
    model = new_model(config)
    if config["fbn"]:
        load(fbn.convert(model), message)
    else:
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    metrics = MetricRecord({"num-examples": 1, "accuracy": accuracy(model, config)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)

"""A client: load, train, reply; and before the first round, calibrate."""

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import calibrate, load, reply

from .task import accuracy, batches_of, new_model, train_locally

app = ClientApp()


def data_of(message, context, epochs):
    """This client's batches of a round."""
    client, clients = context.node_config["partition-id"], context.node_config["num-partitions"]
    server_round = message.content["config"]["server-round"]
    return batches_of(context.run_config, client, clients, server_round, epochs)


@app.train()
def train(message, context):
    """Some epochs on the client's own data."""
    config = context.run_config
    model = new_model(config)
    if config["fbn"]:
        model = fbn.convert(model)
        load(model, message)
    else:
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    batches = data_of(message, context, config["local-epochs"])
    loss, examples, steps = train_locally(model, batches, config)
    metrics = {"num-examples": examples, "loss": loss}
    if config["fbn"]:
        return reply(model, message, metrics, steps=steps)
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)


@app.train("calibrate")
def measure(message, context):
    """Once, before the first round: what the layers see of the client's data; nothing is learned."""
    model = fbn.convert(new_model(context.run_config))
    return calibrate(model, message, (x for x, _ in data_of(message, context, epochs=1)))


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

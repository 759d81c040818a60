"""Ten clients in this process, without a SuperLink: python -m fbn_app rounds=20 fbn=false."""

import sys
import tomllib
from pathlib import Path

from flwr.app import Context, RecordDict

from fedbatchnorm.adapters.flower import DivergedError, NothingTrainedError
from fedbatchnorm.adapters.local import LocalGrid

from . import client_app, server_app

CLIENTS = 10
PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def settings(arguments):
    """Those of pyproject.toml, and NAME=VALUE from the command line over them."""
    config = tomllib.loads(PROJECT.read_text())["tool"]["flwr"]["app"]["config"]
    for argument in arguments:
        name, _, text = argument.partition("=")
        if name not in config:
            sys.exit(f"{argument}: write NAME=VALUE, where NAME is one of {', '.join(config)}")
        kind = type(config[name])
        try:
            config[name] = text if kind is str else kind(tomllib.loads(f"value = {text}")["value"])
        except (ValueError, TypeError):
            sys.exit(f"{argument}: {name} is of type {kind.__name__}, such as {config[name]}")
    return config | {"min-nodes": CLIENTS}


if __name__ == "__main__":
    config = settings(sys.argv[1:])
    here = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    try:
        server_app.app(LocalGrid(client_app.app, CLIENTS, config), here)
    except (DivergedError, NothingTrainedError) as error:
        sys.exit(str(error))

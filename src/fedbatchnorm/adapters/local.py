"""A Flower grid in the current process, to try an app in a debugger or a test without starting anything."""

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from .extras import needs

try:
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise needs("Flower", "flower", error) from error

_FAILED = 2  # Flower's code for a client app that raised


class LocalGrid(Grid):
    """Nodes in this process, which reply one after another.

    Example:
        grid = LocalGrid(client_app, nodes=10, run_config={"lr": 0.1})
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=3)
    """

    def __init__(
        self,
        app: Callable[[Message, Context], Message],
        nodes: int,
        run_config: Mapping[str, Any] | None = None,
    ):
        """Set up `nodes` nodes, with ids from 1 on, and their partition-id, from 0 on, and num-partitions.

        Args:
            app: a ClientApp, or anything that is called as one is.
            nodes: how many.
            run_config: what the client app finds in its context.
        """
        self._app, self._numbers = app, itertools.count(1)
        _be_somebody()
        self._contexts = {
            i + 1: Context(
                run_id=1,
                node_id=i + 1,
                node_config={"partition-id": i, "num-partitions": nodes},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i in range(nodes)
        }
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """There is one run only."""

    @property
    def run(self) -> Any:
        """The run, which has a number only."""
        return SimpleNamespace(run_id=1)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """The ids of all nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let every node reply at once; an app that raises an error replies with it."""
        ids = []
        for message in messages:
            number = str(next(self._numbers))
            received = copy.deepcopy(message)  # what a node does to it stays with the node
            try:
                self._replies[number] = self._app(received, self._contexts[message.metadata.dst_node_id])
            except Exception as error:
                self._replies[number] = Message(Error(_FAILED, repr(error)), reply_to=message)
            ids.append(number)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to these messages, each once."""
        return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send, and return the replies."""
        return self.pull_messages(self.push_messages(messages))


def _be_somebody() -> None:
    """Flower's messages name their sender. If this process was not started as a server, it is node 1; Flower
    has no public way to set this.
    """
    try:
        TaskIdentity.run_id  # noqa: B018
    except RuntimeError:
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1

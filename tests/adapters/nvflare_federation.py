"""NVFlare's own controller in this process: workflow, events and contexts; clients answer at once."""

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.wf_comm_spec import WFCommSpec
from nvflare.app_common.abstract.learnable_persistor import LearnablePersistor
from nvflare.app_common.abstract.model import ModelLearnableKey, make_model_learnable
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare_clients import NUMPY, as_arrays, over_the_wire

from fedbatchnorm.adapters.nvflare_recipe import FederatedBatchNormFedAvg

KILLED = object()  # what a client answers that does not


class Persistor(LearnablePersistor):
    """Keeps the model in memory: the first one, and all that are saved."""

    def __init__(self, params):
        super().__init__()
        self.params, self.saved = params, []

    def load(self, fl_ctx):
        return make_model_learnable(dict(self.params), {})

    def save(self, learnable, fl_ctx):
        weights = as_arrays(learnable[ModelLearnableKey.WEIGHTS])
        self.saved.append({name: np.array(value) for name, value in weights.items()})


class Engine:
    """What a controller needs of NVFlare's engine."""

    def __init__(self, names, handlers, persistor):
        self.clients = [Client(name, f"token of {name}") for name in names]
        self.handlers, self.persistor = handlers, persistor
        self.manager = FLContextManager(self, "server", "job")
        self.panics = []

    def get_clients(self):
        return self.clients

    def get_component(self, name):
        return self.persistor

    def new_context(self):
        return self.manager.new_context()

    def fire_event(self, event_type, fl_ctx):
        if event_type == EventType.FATAL_SYSTEM_ERROR:
            self.panics.append(fl_ctx.get_prop("__event_data__"))
        for handler in self.handlers:
            handler.handle_event(event_type, fl_ctx)


class Wire(WFCommSpec):
    """Hands a task to each client and its result back, through NVFlare's serialization."""

    def __init__(self, engine, clients, spoil):
        self.engine, self.clients, self.spoil = engine, clients, spoil

    def get_num_standing_tasks(self):
        return 0

    def cancel_all_tasks(self, *args, **kwargs):
        pass

    def broadcast(self, task, fl_ctx, targets=None, min_responses=0, wait_time_after_min_received=0):
        self.timeout = task.timeout
        for name in targets:
            number = self.clients.names.index(name)
            client_task, context = ClientTask(self.engine.clients[number], task), self.engine.new_context()
            peer = FLContext()
            peer.put("__identity_name__", name, private=False, sticky=False)
            context.set_peer_context(peer)
            task.before_task_sent_cb(client_task=client_task, fl_ctx=context)
            sent = over_the_wire(FLModelUtils.from_shareable(task.data))
            result = self.clients.answer(number, sent)
            result = self.spoil(sent.current_round, number, result) if self.spoil else result
            if result is not KILLED:
                is_failure = isinstance(result, Shareable)
                client_task.result = result if is_failure else FLModelUtils.to_shareable(result)
                task.result_received_cb(client_task=client_task, fl_ctx=context)


class Federation:
    """A job of NVFlare in this process.

    Example:
        federation = Federation(Clients(), aggregator_of(calibrate=True), rounds=3).run()
        federation.panics, federation.saved[-1]
    """

    def __init__(self, clients, aggregator, rounds, spoil=None, controller=None, **fedavg):
        """Set up the job; `spoil(round, client, answer)` changes what a client sends."""
        params = clients.make().state_dict()
        params = {k: v.numpy() for k, v in params.items()} if clients.form == NUMPY else params
        own = {"num_clients": 0, "ignore_result_error": True, "task_check_period": 0.01} | fedavg
        kind = controller or FederatedBatchNormFedAvg
        self.controller = kind(num_rounds=rounds, aggregator=aggregator, **own)
        self.persistor = Persistor(params)
        self.engine = Engine(clients.names, [aggregator] if aggregator else [], self.persistor)
        self.wire = Wire(self.engine, clients, spoil)
        self.controller.set_communicator(self.wire)

    @property
    def saved(self):
        """The models that the job has saved, in order."""
        return self.persistor.saved

    @property
    def panics(self):
        """Why the job has failed, if it has."""
        return self.engine.panics

    def run(self):
        context = self.engine.new_context()
        self.engine.fire_event(EventType.START_RUN, context)
        self.controller.start_controller(context)
        self.controller.control_flow(Signal(), context)
        return self


def failure():
    """A client's answer when its script has raised."""
    return make_reply(ReturnCode.EXECUTION_EXCEPTION)

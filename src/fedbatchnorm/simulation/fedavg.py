"""FedAvg: a cohort of clients trains for several steps each, and the server averages the results.

Clients run side by side, in one pass (`abreast`) if possible, otherwise in lanes (`lanes`). What clients are
sent and what they return are rows of matrices as large as the cohort. Only what clients keep between their
rounds takes memory for all of them.
"""

import contextlib
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..aggregation.cohort import between_clients
from ..aggregation.statistics import Rows as ServerRows
from ..norm.moments import Moments, accumulator_dtype, round_momentum, tracked_steps
from .abreast import Abreast, clients_in_a_pass, first_step_abreast
from .byzantine import robust_update_of, through_rule
from .device import Machine, set_seed
from .federation import Federation, Work, copy_state, refuse_other_buffers
from .lanes import Batches, Lane, Rows, kinds_of, new_rows, unrolled
from .optim import Local, server_buffers, server_step
from .packing import Packing
from .recipe import learning_rate, torch_seed
from .schemes import Phase, Survey
from .stacked import can_be_stacked, phase_can_be_stacked
from .survey import survey

# Clients side by side on a GPU, chosen by measuring on an H200: more do not help.
_LANES, _LANES_OF_LARGE, _LARGE = 10, 5, 2**23  # bytes of the largest activation of a batch
_PASS, _PASS_ON_CPU = 2**28, 2**22  # bytes of the largest activation of clients abreast, about


class FedAvg:
    """Rounds of federated averaging (McMahan et al., 2017), with FedProx, FedAvgM and FedAdam."""

    def __init__(self, federation: Federation, machine: Machine, chunk: int | None):
        """Set up what is kept between rounds.

        Args:
            federation: model, clients and recipe.
            machine: how rounds run.
            chunk: clients side by side. By default ten lanes on a GPU, or five if batches are large, and as
                many in a pass as fill it.
        """
        self.federation, self.machine, self.recipe = federation, machine, federation.recipe
        refuse_other_buffers(federation)
        recipe, scheme, device, dtype = self.recipe, federation.scheme, federation.device, federation.dtype
        self.packing = Packing(federation.model, federation.layers, machine.replays)
        d, c, n = self.packing.size, sum(self.packing.channels), len(federation.parts)
        self.how, self.cohort = Local.of(recipe), recipe.shares_of_cohort()[0]
        self.rate = torch.zeros((), device=device, dtype=dtype)
        self.weights = torch.zeros(d, device=device, dtype=dtype)
        self.statistics = torch.zeros(2, c, device=device, dtype=dtype)
        self.exact = accumulator_dtype(self.weights)
        self.packing.adopt(federation.model, self.weights, self.statistics)
        self.server = self.weights.new_zeros(server_buffers(recipe), d)
        kept = n if recipe.local_state == "keep" else 0
        self.client_state = self.weights.new_zeros(kept, self.how.buffers(), d)
        self.client_steps = self.weights.new_zeros(kept)
        self.places = self.packing.places(scheme.own).to(device)
        self.own_weights = self.weights[self.places].repeat(n if len(self.places) else 0, 1)
        own_statistics = n if "statistics" in scheme.own else 0
        self.own_statistics = self.statistics.repeat(own_statistics, 1, 1)
        large = recipe.batch * federation.largest >= _LARGE
        self._chunk, self._lanes = chunk or (_LANES_OF_LARGE if large else _LANES), list[Lane]()
        self._rows: Rows | None = None
        steps = federation.local_steps()  # of all clients, so that graphs serve every cohort
        self._most_steps, self._usual_steps = int(steps.max()), int(np.median(steps))
        fitting = (_PASS_ON_CPU if device.type == "cpu" else _PASS) // (recipe.batch * federation.largest)
        self._in_a_pass = clients_in_a_pass(self.cohort, chunk or fitting)
        self._abreast: Abreast | None = None
        self._stackable = can_be_stacked(federation, machine, self.packing)

    def state(self) -> dict[str, Tensor]:
        """Everything that the next round depends on: weights, statistics, the server's and the clients' own
        state.

        Vectors are in the order of the model's parameters, whatever the layout that this device works with.
        """
        state = {f"model.{k}": v for k, v in self.federation.model.state_dict().items()}
        vectors = {name: value[..., self.packing.order] for name, value in self._vectors().items()}
        return state | vectors | self._more() | self.federation.own_state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over a `state`, from this device or another."""
        vectors = self._vectors()
        copy_state(self.state(), state, skip=vectors)
        for name, value in vectors.items():
            value[..., self.packing.order] = state[name].to(value)

    def _vectors(self) -> dict[str, Tensor]:
        """What is kept, besides the model, in the layout of flat vectors."""
        found = {"server": self.server, "client_state": self.client_state}
        return {name: value for name, value in found.items() if value.numel()}

    def _more(self) -> dict[str, Tensor]:
        """What else is kept."""
        found = {
            "client_steps": self.client_steps,
            "own_weights": self.own_weights,
            "own_statistics": self.own_statistics,
        }
        return {name: value for name, value in found.items() if value.numel()}

    @contextlib.contextmanager
    def as_client(self, client: int) -> Iterator[None]:
        """The model of a client, with its local parts."""
        before = self.weights.clone(), self.statistics.clone()
        try:
            self._become(client)
            yield
        finally:
            self.weights.copy_(before[0])
            self.statistics.copy_(before[1])

    @contextlib.contextmanager
    def evaluating(self, step: int) -> Iterator[None]:
        """The model for the evaluation after `step` rounds; for it some schemes measure once more."""
        phase = self._phase(max(0, step - 1))
        if phase.survey is None or not phase.survey.again or not step or not self.federation.layers:
            yield
            return
        statistics = self.statistics.clone()
        seen = self._surveyed(step - 1, phase, phase.survey)
        try:
            self.statistics.copy_(torch.stack(self._merged(seen, 1.0, phase, None, step - 1)))
            yield
        finally:
            self.statistics.copy_(statistics)

    def _phase(self, step: int) -> Phase:
        return self.federation.scheme.phase(step, self.recipe.switch_step())

    def _surveyed(self, step: int, phase: Phase, how: Survey) -> Moments:
        """What the clients of a round measure in a separate pass, each with its local parts."""
        weights = self.weights.clone()
        try:
            return survey(self.federation, self.machine, step, phase, how, self._become)
        finally:
            self.weights.copy_(weights)

    def _become(self, client: int) -> None:
        """Put a client's local parts into the model."""
        if len(self.own_weights):
            self.weights[self.places] = self.own_weights[client]
        if len(self.own_statistics):
            self.statistics.copy_(self.own_statistics[client])

    def round(self, step: int) -> Tensor:
        """One round of a cohort; returns the clients' mean training loss, without waiting for the device."""
        federation, machine = self.federation, self.machine
        work, phase = federation.work(step), self._phase(step)
        if step == 0 and len(self.own_statistics):
            self.own_statistics.copy_(self.statistics)  # which may have been calibrated
        self.rate.fill_(learning_rate(self.recipe, step))
        surveyed = None
        if phase.survey is not None and federation.layers:
            surveyed = self._surveyed(step, phase, phase.survey)
        clients = machine.upload(work.clients)
        rows = self._trained_somehow(clients, work, phase, step)
        shares = machine.upload(federation.shares(work.clients), self.weights.dtype)
        self._receive(rows, clients, shares, step)
        self._share(rows, surveyed, clients, shares, work, phase, step)
        return shares @ rows.losses

    def _trained_somehow(self, clients: Tensor, work: Work, phase: Phase, step: int) -> Rows:
        """What the clients of a round return; if the fast way fails, by the next one."""
        try:
            return self._trained(clients, work, phase, step)
        except Exception as error:  # nothing has changed yet but the lanes and the rows
            if not self.machine.replays:
                raise
            self._lanes = []
            if self._abreast is None:
                self.machine.go_eager(error)
            else:
                self._abreast, self._stackable = None, False
                why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                warnings.warn(f"clients train in lanes, not abreast: {why}", RuntimeWarning, stacklevel=4)
        return self._trained_somehow(clients, work, phase, step)

    def _steps_abreast(self, work: Work, phase: Phase) -> int:
        """How many steps all clients of a round can take abreast: the first ones, with whole batches."""
        if not self._stackable or not phase_can_be_stacked(phase, self.federation.scheme):
            return 0
        return int((work.sizes == self.recipe.batch).all(0).cumprod().sum())

    def _abreast_for(self, phase: Phase, steps: int, unroll: int) -> Abreast:
        """The clients' common model with graphs of so many steps; made at the first round."""
        if self._abreast is None:
            rows = self._rows_of_round()
            if self._in_a_pass < self.cohort:
                rows = self._new_rows(self._in_a_pass)
            where = self.federation, self.machine, self.packing
            self._abreast = Abreast(*where, self.rate, self._most_steps, rows)
        self._abreast.capture(phase, steps, unroll)
        return self._abreast

    def _trained(self, clients: Tensor, work: Work, phase: Phase, step: int) -> Rows:
        """What the clients of a round return."""
        federation, machine, recipe = self.federation, self.machine, self.recipe
        short = bool(((work.sizes > 0) & (work.sizes < recipe.batch)).any())
        counts = machine.upload(work.sizes) if short and machine.replays else None
        batches = Batches(machine.upload(work.index), work.sizes, counts)
        first = int(phase.first is not None)
        unroll, ahead = unrolled(max(1, self._usual_steps - first)), self._steps_abreast(work, phase)
        abreast = None
        if ahead > first:
            abreast = self._abreast_for(phase, ahead - first, unroll)  # before the rows are filled
        rows = self._send(clients)
        seed = torch_seed(recipe.seed, "dropout", step)
        if first:
            set_seed(federation.device, seed)
            first_step_abreast(federation, machine, self.packing, rows, batches, phase, self.rate)
        if abreast is not None:
            abreast.train(rows, batches, phase, first, ahead, seed, unroll)
            first = ahead
        if (work.steps() == first).all():
            rows.losses.div_(first)
        else:
            self._train(rows, work, batches, phase, first, step, unroll)
        return rows

    def _send(self, clients: Tensor) -> Rows:
        """What each client of the round starts with: the server's model, and its local parts."""
        rows = self._rows_of_round()
        rows.weights.copy_(self.weights)
        rows.statistics.copy_(self.statistics)
        for zero in (rows.state, rows.taken, rows.counts, rows.losses):
            zero.zero_()
        if self.recipe.local_state == "keep":
            rows.state.copy_(self.client_state[clients])
            rows.taken.copy_(self.client_steps[clients])
        if len(self.own_weights):
            rows.weights[:, self.places] = self.own_weights[clients]
        if len(self.own_statistics):
            rows.statistics.copy_(self.own_statistics[clients])
        if self.how.prox:
            rows.sent.copy_(rows.weights)
        return rows

    def _rows_of_round(self) -> Rows:
        """A row for each client of a round; made once."""
        if self._rows is None:
            self._rows = self._new_rows(self.cohort)
        return self._rows

    def _new_rows(self, clients: int) -> Rows:
        first = self.federation.scheme.before.first is not None
        keeps = self.recipe.local_state == "keep" or first or self._stackable
        sizes = clients, self.packing.size, self.statistics.shape[1]
        return new_rows(*sizes, self.how, keeps, self.weights)

    def _train(
        self, rows: Rows, work: Work, batches: Batches, phase: Phase, first: int, step: int, unroll: int
    ) -> None:
        """Every client's local steps from `first` on, lane beside lane."""
        steps, machine = work.steps(), self.machine
        lanes = self._lanes_for(len(steps))
        seeds = [torch_seed(self.recipe.seed, "dropout", step, int(client)) for client in work.clients]
        if machine.replays:
            kinds = kinds_of(work.sizes, self.recipe.batch, first, unroll)
            for lane in lanes:
                lane.capture(phase, kinds)
            main = torch.cuda.current_stream(self.weights.device)
            for lane in lanes:
                lane.stream.wait_stream(main)
        for i in np.argsort(-steps, kind="stable"):  # the longest first, so that lanes end together
            lane = lanes[0]
            if machine.replays:
                lane = min(lanes, key=lambda lane: lane.queued)
            with torch.cuda.stream(lane.stream) if machine.replays else contextlib.nullcontext():
                lane.load(rows, int(i), not first, self.statistics)
                lane.train(phase, batches, int(i), first, seeds[i], unroll)
                lane.store(rows, int(i), int(steps[i]))
            lane.queued += int(steps[i])
        for lane in lanes:
            lane.queued = 0
            if machine.replays:
                torch.cuda.current_stream(self.weights.device).wait_stream(lane.stream)

    def _lanes_for(self, clients: int) -> list[Lane]:
        """The lanes; made at the first round."""
        if not self._lanes:
            count = min(clients, self._chunk) if self.machine.replays else 1
            self._lanes = [
                Lane(self.federation, self.machine, self.packing, self.rate, self._most_steps)
                for _ in range(count)
            ]
        return self._lanes

    def _receive(self, rows: Rows, clients: Tensor, shares: Tensor, step: int) -> None:
        """The server's step with the clients' weights; first what clients keep is stored."""
        if self.recipe.local_state == "keep":
            self.client_state[clients] = rows.state
            self.client_steps[clients] = rows.taken
        own = None
        if len(self.own_weights):
            kept = rows.weights[:, self.places]
            self.own_weights[clients] = kept
            own = shares @ kept
            rows.weights[:, self.places] = self.weights[self.places]  # these are never sent
        updates = rows.weights.sub_(self.weights)
        if "gradients" in self.recipe.targets_struck():
            update = robust_update_of(updates, self.recipe, step)
        else:
            update = shares @ updates
        server_step(self.weights, update, self.server, self.recipe)
        if own is not None:
            self.weights[self.places] = own  # for the model as a whole, the mean of what clients have

    def _share(
        self,
        rows: Rows,
        surveyed: Moments | None,
        clients: Tensor,
        shares: Tensor,
        work: Work,
        phase: Phase,
        step: int,
    ) -> None:
        """The statistics that the next round's clients are sent."""
        kept = Moments(rows.counts, *rows.statistics.unbind(1))
        if len(self.own_statistics):  # for the model as a whole, the mean of what clients have
            self.own_statistics[clients] = rows.statistics.to(self.own_statistics.dtype)
            self.statistics.copy_(
                torch.stack(phase.kept.merge(*self.statistics, kept, shares, 1.0, kept.count))
            )
        if phase.share is None or not self.statistics.numel():
            return
        seen = work.sizes.sum(1)
        steps = float(seen @ work.steps() / seen.sum())
        beta = round_momentum(self.recipe.beta, 0, steps)
        if surveyed is not None:
            assert phase.survey is not None
            kept, beta = surveyed, phase.survey.momentum
        mean, var = self._merged(kept, beta, phase, shares, step)
        before = [layer.running() for layer in self.federation.layers.values()]
        between: tuple[Tensor, ...] = ()
        if self.federation.follows and self.recipe.is_plain():
            apart = between_clients(kept, self.federation.population(phase))
            between = apart.split(self.packing.channels)
        self.federation.follow_drift(before, mean.split(self.packing.channels), beta, steps, between)
        self.statistics.copy_(torch.stack([mean, var]))
        seen_by_layer = torch.as_tensor(kept.count).sum(0).split(self.packing.channels)
        for layer, count in zip(self.federation.layers.values(), seen_by_layer, strict=True):
            layer.num_batches_tracked += tracked_steps(steps) * (count[0] > 0)  # pyrefly: ignore

    def _merged(
        self, kept: Moments, beta: float, phase: Phase, shares: Tensor | None, step: int
    ) -> tuple[Tensor, Tensor]:
        """The next mean and variance of all layers, (C,); through the server's rule if it has one."""
        mean, var = self.statistics.to(self.exact)
        total = torch.as_tensor(kept.count).sum(0)
        if self.recipe.is_plain():
            return phase.kept.merge(mean, var, kept, shares, beta, total, self.federation.population(phase))
        _, lying = self.recipe.shares_of_cohort()
        total = total * (1 + lying / self.cohort)  # Byzantine clients claim as many values as the others

        def form(seen: list[Moments]) -> ServerRows:
            rows = phase.kept.rows(mean, var, seen[0], beta, total)
            layers = self.federation.layers.values()
            floor = torch.cat([torch.full_like(layer.running().mean, layer.eps) for layer in layers])
            return ServerRows(*rows, torch.full_like(mean, beta), total.clamp(min=2), floor.to(self.exact))

        new_mean, new_var, fine = through_rule(phase, form, [kept], self.recipe, step)
        fine = fine & (total > 0)  # a layer may have seen nothing
        return torch.where(fine, new_mean, mean), torch.where(fine, new_var, var)

"""SoCFlow: groups that average often within and seldom with each other.

Xu and others, "SoCFlow: Efficient and Scalable DNN Training on SoC-Clustered Edge Servers", ASPLOS
2024, https://doi.org/10.1145/3617232.3624847, and its extension SoCFlow+ in IEEE Transactions on
Mobile Computing.
"""

from collections.abc import Iterable, Mapping, Sequence
from logging import INFO
from typing import Any

import numpy as np
from flower_adsp.strategies.base import CommitStrategy
from flower_adsp.strategies.batchtune import tuned_batch_sizes
from flower_adsp.strategies.coverage import apply_mean
from flower_adsp.strategies.group_number import next_number
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Work, Worker
from flwr.app import ArrayRecord
from flwr.common.logger import log

from flower_adsp.arrays import Weights, encode, weighted_mean
from flower_adsp.clock import MICROSECONDS
from flower_adsp.errors import require, unknown
from flower_adsp.messages import Commit
from flower_adsp.network.collectives import RING
from flower_adsp.network.groups import (
    MAPPINGS,
    PACKED,
    communication_groups,
    conflict_number,
    map_groups,
    ring_order,
    same_speed,
)
from flower_adsp.network.rings import ring_hops, ring_seconds
from flower_adsp.precision import fp32_share, npu_part, time_share
from flower_adsp.sparse.plan import LayerPlanner
from flower_adsp.tasks.validation import Validation

_START, _DOUBLES_EVERY, _MOST = 0.25, 10, 2.0  # epochs


def interval_at(epoch: int) -> float:
    """Return the epochs until groups are averaged next: min(2, 0.25 · 2^⌊e/10⌋) in epoch e.

    Source: SoCFlow+, section 3.1.
    """
    return float(min(_MOST, _START * 2.0 ** min(epoch // _DOUBLES_EVERY, 10)))


class Socflow(CommitStrategy):
    """Group-wise parallel training with delayed aggregation.

    Workers form N groups. In a group all take `local_steps` steps from the same model, and when all
    have committed the group's model moves by the mean of their updates. The groups' models are
    averaged each `interval` epochs; what is evaluated in between is the mean as it then is.

    Through Flower's server this is federated averaging on two levels with SoCFlow's schedule: the
    server holds a model a group, and each averaging costs each device an upload and a download.
    With ``network.collective`` = ``ring``, in virtual time, the members of a group exchange in a
    ring among themselves, and the groups in a ring of one member each, as in the paper. Its fans,
    and moving data between groups, are not here.

    In mixed precision a device with an NPU trains a part of each mini-batch in FP32 and the rest
    in INT8, and merges both models after each step (`flower_adsp.precision`). Before each epoch of
    a group the server measures α, how alike the logits of the group's model in FP32 and in INT8
    are on its own data; max(e^−α, 1 − β) is then the part in FP32. That device is modelled:
    INT8 is emulated, and only virtual time has its speed.

    Parameters
    ----------
    num_groups : int | None (default: 4)
        N; what the paper took for VGG-11, by hand. None tries 1, 2, 4 ... groups for an epoch
        each, from the initial model, until the accuracy on the server's data collapses
        (`flower_adsp.strategies.group_number`); then the run starts anew, from the initial model
        and in the number of groups before. The trials take time and mini-batches, and are not
        counted by `num_rounds`.
    local_steps : int (default: 1)
        Steps of each worker between its group's averagings; 1 in the paper.
    interval : float | None (default: None)
        Epochs of all data between averagings of all groups: 1.0 is SoCFlow's; None is the schedule
        of SoCFlow+, `interval_at`.
    mapping : str (default: "packed")
        How devices at sites become groups; see `flower_adsp.network.groups.map_groups`.
    takes_turns : bool (default: True)
        Whether groups in each other's way take turns at what they share, the one that began first
        going on first, so that one exchanges while another computes; else they share it. It is the
        paper's communication planning, in virtual time.
    rebalances : bool (default: False)
        Whether, in a group, mini-batches are in proportion to speed, and updates count as much:
        D_i = D·C_i/ΣC and W ← W − η Σ g_i·C_i/ΣC, SoCFlow+'s equations 9 and 10. As printed, 10
        divides by the number of members as well, which for gradients that are means would make
        the step that much smaller.
    same_speed : bool (default: False)
        Whether devices at a site change places, so that the groups are as fast as each other.
    mixed_precision : bool (default: False)
        Whether devices whose profile has an `npu_speedup` train in FP32 and INT8; others train in
        FP32 alone. Not with momentum, of which there would be two, nor with a layer plan.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    plan : LayerPlanner | None (default: None)
        Plans which worker trains which layers; in place of the options' `planner`. A part of the
        model that nobody in a group trains changes there when the groups are averaged.
    validation : Validation | None (default: None)
        The server's data, which mixed precision and trials of numbers of groups need.

    Raises
    ------
    ConfigError
        If an argument is not allowed, there are fewer devices than groups, or the task's model has
        a layer that cannot be trained in mixed precision.
    """

    has_groups = True
    stored: tuple[str, ...] = (
        "groups", "_models", "_arrived", "_open", "_rounds", "_synchronised", "_due",
        "_rounds_an_epoch", "_alphas", "_measured", "_initial", "_accuracies", "_late",
    )  # fmt: skip

    def __init__(
        self,
        num_groups: int | None = 4,
        local_steps: int = 1,
        interval: float | None = None,
        mapping: str = PACKED,
        takes_turns: bool = True,
        rebalances: bool = False,
        same_speed: bool = False,
        mixed_precision: bool = False,
        loop: LoopOptions | None = None,
        plan: LayerPlanner | None = None,
        validation: Validation | None = None,
    ) -> None:
        super().__init__(loop, plan)
        ok = num_groups is None or num_groups >= 1
        require(ok, "num_groups", num_groups, "null or at least 1")
        require(local_steps >= 1, "local_steps", local_steps, "at least 1")
        require(interval is None or interval > 0, "interval", interval, "null or above 0")
        if mapping not in MAPPINGS:
            raise unknown("mapping", mapping, MAPPINGS)
        self._check_measures(num_groups, mixed_precision, validation)
        self.num_groups = num_groups
        self.local_steps = local_steps
        self.interval = interval
        self.mapping = mapping
        self.takes_turns = takes_turns
        self.rebalances = rebalances
        self.same_speed = same_speed
        self.mixed_precision = mixed_precision
        self.validation = validation
        self.groups: list[list[int]] = []
        self._models: list[Weights] = []
        self._arrived: list[dict[int, Commit | None]] = []
        self._open: list[bool] = []
        self._rounds: list[int] = []
        self._synchronised = 0
        self._due = 0
        self._rounds_an_epoch = 1
        self._alphas: list[float] = []
        self._measured: list[int] = []  # the epoch in which α was
        self._initial: Weights | None = None  # while numbers of groups are tried
        self._accuracies: list[float] = []
        self._late: set[int] = set()  # who, away at the end of a trial, still has its assignment
        self._encoded: dict[int, ArrayRecord] = {}
        self._group_of: dict[int, int] = {}
        self._batch_sizes: dict[int, int] = {}

    def _check_measures(
        self, num_groups: int | None, mixed_precision: bool, validation: Validation | None
    ) -> None:
        """See that what is measured at the server can be."""
        for key, value, is_asked_for, instead in (
            ("mixed_precision", mixed_precision, mixed_precision, "false"),
            ("num_groups", num_groups, num_groups is None, "a number"),
        ):
            if is_asked_for:
                require(self.loop.planner is None, key, value, f"{instead} with a layer plan")
                allowed = f"{instead} without `validation`, the server's data to measure on"
                require(validation is not None, key, value, allowed)
        if validation is not None and mixed_precision:
            validation.check_int8()
        if validation is not None and num_groups is None:
            require(validation.chance < 1, "num_groups", None, "a number for data of one class")

    # ------------------------------------------------------------------------------------- groups

    def begin(self) -> None:
        """Make the groups, or those of the first trial."""
        if self.num_groups is not None:
            self._begin_groups(self.num_groups)
            return
        self._initial = {name: array.copy() for name, array in self.state.model.items()}
        self._begin_next_groups()

    def _begin_next_groups(self) -> None:
        """Begin, from the initial model, in the number of groups to try next or to keep."""
        assert self.validation is not None
        assert self._initial is not None
        number, is_kept = next_number(
            self._accuracies, self.validation.chance, len(self.state.workers)
        )
        self.state.model.update({name: array.copy() for name, array in self._initial.items()})
        if is_kept:
            log(INFO, "%d groups are kept", number)
            self._initial = None
        self._begin_groups(number)

    def _begin_groups(self, number: int) -> None:
        workers = list(self.state.workers.values())
        sites = [_site(worker) for worker in workers]
        groups = map_groups(sites, number, self.mapping)
        alpha = self._similarity(self.state.model)
        if self.same_speed:
            groups = same_speed(groups, sites, [self._speed(worker, alpha) for worker in workers])
        self.groups = [[workers[place].id for place in group] for group in groups]
        self._alphas, self._measured = [alpha] * number, [0] * number
        self._models = [
            {name: array.copy() for name, array in self.state.model.items()} for _ in range(number)
        ]
        self._arrived = [{} for _ in range(number)]
        self._late = {worker.id for worker in workers if worker.flight is not None}
        self._open = [not self._is_training(group) for group in range(number)]
        self._rounds = [0] * number
        self._synchronised = self._due = 0
        examples = sum(worker.num_examples or worker.batch_size for worker in workers)
        batches = sum(worker.batch_size for worker in workers)
        self._rounds_an_epoch = max(1, round(examples / (batches * self.local_steps)))
        self._due = self._next_due() if self._initial is None else self._rounds_an_epoch
        self._arrange()
        log(
            INFO,
            "%d groups %s: at most %d split ones meet at a site; %d communication groups",
            number,
            self.groups,
            conflict_number(groups, sites),
            1 + max(communication_groups(groups, sites)),
        )

    def _arrange(self) -> None:
        """Work out what follows from who is in which group."""
        workers = self.state.workers
        self._encoded = {}
        self._group_of = {id_: group for group, ids in enumerate(self.groups) for id_ in ids}
        self.state.turns = dict(self._group_of) if self.takes_turns else {}
        self._batch_sizes = {id_: workers[id_].batch_size for id_ in self._group_of}
        if self.rebalances:
            for ids, alpha in zip(self.groups, self._alphas, strict=True):
                mean = round(sum(workers[id_].batch_size for id_ in ids) / len(ids))
                speeds = [self._speed(workers[id_], alpha) for id_ in ids]
                sizes = tuned_batch_sizes(mean, speeds)
                self._batch_sizes.update(zip(ids, sizes, strict=True))
        self.state.hops = {}
        if self.loop.network.collective == RING:
            for ids in self.groups:
                self.state.hops.update(self._ring(ids))

    def _ring(self, ids: Sequence[int]) -> dict[int, Any]:
        profiles = {id_: self.state.workers[id_].profile for id_ in ids}
        sites = [_site(self.state.workers[id_]) for id_ in ids]
        ring = [ids[place] for place in ring_order(range(len(ids)), sites)]
        return dict(ring_hops(ring, profiles, self.loop.network))

    def joined(self, worker: Worker) -> None:
        """Take a worker into the smallest group, of its own site if there is one."""
        near = [
            group
            for group, ids in enumerate(self.groups)
            if any(_site(self.state.workers[id_]) == _site(worker) for id_ in ids)
        ]
        smallest = min(near or range(len(self.groups)), key=lambda group: len(self.groups[group]))
        self.groups[smallest].append(worker.id)
        self._arrange()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken; `begin` is not called."""
        super().load_state_dict(state)
        self._arrange()

    # ---------------------------------------------------------------------------- mixed precision

    def _similarity(self, model: Weights) -> float:
        """Return α of a model; 1 where nobody asks."""
        if not self.mixed_precision:
            return 1.0
        assert self.validation is not None
        return self.validation.similarity(model)

    def _measure(self, groups: Sequence[int]) -> None:
        """Measure α anew, of groups with the same model, if a new epoch of theirs begins."""
        epoch = self._rounds[groups[0]] // self._rounds_an_epoch
        if not self.mixed_precision or all(self._measured[group] == epoch for group in groups):
            return
        alpha = self._similarity(self._models[groups[0]])
        for group in groups:
            self._alphas[group], self._measured[group] = alpha, epoch
        if self.rebalances:
            self._arrange()

    def _share(self, worker: Worker, alpha: float) -> float | None:
        """Return the part of a worker's mini-batches in FP32; None without an NPU."""
        speedup = worker.profile.npu_speedup
        if not self.mixed_precision or speedup is None or worker.is_stock:
            return None
        return fp32_share(alpha, npu_part(speedup))

    def _speed(self, worker: Worker, alpha: float) -> float:
        """Return steps per second, with what a worker's NPU does."""
        share, speedup = self._share(worker, alpha), worker.profile.npu_speedup
        if share is None or speedup is None:
            return worker.speed
        return worker.speed / time_share(share, speedup)

    # -------------------------------------------------------------------------------- assignments

    def assign(self, worker: Worker) -> Work:
        """Take the local steps."""
        size = self._batch_sizes[worker.id] if self.rebalances else None
        share = self._share(worker, self._alphas[self._group_of[worker.id]])
        return Work(steps=self.local_steps, batch_size=size, fp32_share=share)

    def may_start(self, worker: Worker) -> bool:
        """Let workers go only once all of their group have arrived."""
        return self._open[self._group_of[worker.id]]

    def model_for(self, worker: Worker) -> ArrayRecord:
        """Return the model of the worker's group."""
        group = self._group_of[worker.id]
        if group not in self._encoded:
            own = {name: self.state.model[name] for name in self.state.statistics}
            self._encoded[group] = encode({**self._models[group], **own})
        return self._encoded[group]

    # ------------------------------------------------------------------------------------ commits

    def apply(self, worker: Worker, commit: Commit) -> bool:
        """Keep the commit until all of the group have arrived."""
        is_of_a_trial = worker.id in self._late
        return self._arrive(worker, None if is_of_a_trial else commit)

    def refuse(self, worker: Worker) -> bool:
        """Count the worker as arrived without a contribution."""
        return self._arrive(worker, None)

    def left(self, worker: Worker) -> bool:
        """Average the groups if they waited for this one only, which is now gone as a whole."""
        return self._average_groups_if_due()

    def _arrive(self, worker: Worker, commit: Commit | None) -> bool:
        group = self._group_of[worker.id]
        arrived = self._arrived[group]
        arrived[worker.id] = commit
        self._late.discard(worker.id)
        self._open[group] = False
        if self._is_training(group):
            return False
        commits = {id_: found for id_, found in sorted(arrived.items()) if found is not None}
        self._arrived[group] = {}
        self._rounds[group] += 1
        changed = self._average_members(group, commits)
        self._open[group] = self._rounds[group] < self._due
        if self._open[group]:
            self._measure([group])
        return self._average_groups_if_due() or changed

    def _is_training(self, group: int) -> bool:
        return any(self.state.workers[id_].flight is not None for id_ in self.groups[group])

    def _average_members(self, group: int, commits: Mapping[int, Commit]) -> bool:
        if not commits:
            return False
        equal = self.state.weighting == "equal"
        weights = [
            float(self._batch_sizes[id_])
            if self.rebalances
            else (1.0 if equal else float(commit.num_examples))
            for id_, commit in commits.items()
        ]
        changed = apply_mean(self._models[group], list(commits.values()), weights)
        self._encoded.pop(group, None)
        self._show_mean(changed, range(len(self.groups)))
        return True

    def _average_groups_if_due(self) -> bool:
        """Average the groups' models once all groups that are there have come so far."""
        here = [group for group in range(len(self.groups)) if not self._is_gone(group)]
        if not here or any(self._rounds[group] < self._due for group in here):
            return False
        # One that was taken away counts with what it had done by then, once.
        trained = [g for g, rounds in enumerate(self._rounds) if rounds > self._synchronised]
        own = self.state.model.keys() - self.state.statistics
        self._show_mean(own, trained)
        for model in self._models:
            model.update({name: self.state.model[name].copy() for name in own})
        seconds = self._exchange_seconds(here)
        self._encoded = {}
        self._rounds = [self._due] * len(self.groups)
        self._synchronised = self._due
        is_trial = self._initial is not None
        if is_trial:
            self._end_trial()
        else:
            self._due += self._next_due()
            self.state.index += 1
            self._measure(range(len(self.groups)))
        if seconds > 0:
            at = self.state.now + round(seconds * MICROSECONDS)
            self.state.alarms.append((at, 0))
            if is_trial:
                self._open = [False] * len(self.groups)
        elif not is_trial:
            self._open = [True] * len(self.groups)
        return True

    def _end_trial(self) -> None:
        """Note how well a number of groups did in an epoch, and go on to the next."""
        assert self.validation is not None
        accuracy = self.validation.accuracy(self.state.model)
        log(INFO, "%d groups: accuracy %.4f after an epoch", len(self.groups), accuracy)
        self._accuracies.append(accuracy)
        self._begin_next_groups()

    def alarm(self, subject: int) -> bool:
        """Let all go on, now that all have the mean."""
        self._open = [not self._is_training(group) for group in range(len(self.groups))]
        return False

    def _is_gone(self, group: int) -> bool:
        return not any(self.state.workers[id_].is_present for id_ in self.groups[group])

    def _show_mean(self, names: Iterable[str], groups: Sequence[int]) -> None:
        """Set arrays of the model to their mean over groups, by their members or examples."""
        equal = self.state.weighting == "equal"
        sizes = [
            sum(1 if equal else self.state.workers[id_].num_examples for id_ in self.groups[group])
            for group in groups
        ]
        models = [{name: self._models[group][name] for name in names} for group in groups]
        mean = weighted_mean(models, [size / sum(sizes) for size in sizes])
        self.state.model.update({name: np.array(array) for name, array in mean.items()})

    def _next_due(self) -> int:
        """Return the rounds of a group until groups are averaged next."""
        return max(1, round(self._interval(self._due) * self._rounds_an_epoch))

    def _interval(self, rounds: int) -> float:
        """Return the interval, in epochs, that begins after so many rounds."""
        if self.interval is not None:
            return self.interval
        return interval_at(rounds // self._rounds_an_epoch)

    def _exchange_seconds(self, here: Sequence[int]) -> float:
        """Return how long a ring of a member of each group, and from it to the others, takes."""
        network = self.loop.network
        if network.collective != RING:
            return 0.0
        heads = self._ring([self.groups[group][0] for group in here])
        between = ring_seconds([heads], network, self.state.num_bytes, reduce=True)
        rings = [self._ring(self.groups[group]) for group in here]
        return between + ring_seconds(rings, network, self.state.num_bytes, reduce=False)

    # ----------------------------------------------------------------------------------- for logs

    def status(self) -> dict[str, float | int | list[int]]:
        """Return the epochs done, the interval, and what was found out: N, and α and γ as means."""
        numbers: dict[str, float | int | list[int]] = {
            "epochs": self._synchronised / self._rounds_an_epoch,
            "interval": self._interval(self._synchronised),
        }
        if self.num_groups is None:
            numbers["num_groups"] = len(self.groups)
        if self.mixed_precision:
            workers = self.state.workers
            shares = [
                self._share(workers[id_], alpha) or 1.0
                for ids, alpha in zip(self.groups, self._alphas, strict=True)
                for id_ in ids
            ]
            numbers["alpha"] = sum(self._alphas) / len(self._alphas)
            numbers["fp32_share"] = sum(shares) / len(shares)
        return numbers

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        return {
            "num_groups": self.num_groups,
            "local_steps": self.local_steps,
            "interval": self.interval,
            "mapping": self.mapping,
            "takes_turns": self.takes_turns,
            "rebalances": self.rebalances,
            "same_speed": self.same_speed,
            "mixed_precision": self.mixed_precision,
        }


def _site(worker: Worker) -> str:
    """Return where a worker stands; one without a site has one of its own."""
    return worker.profile.site or f"worker {worker.id}"

"""Which device trains which units: the most useful cover that memory and time allow.

Maximise Σ_u v_u φ(c_u), c_u = Σ_{d trains u} n_d r_{d,u} / mean(n), φ(c) = 1 − 2^{−c}, such that
every unit is trained by someone and no device needs more than its memory. The first who trains a
unit counts most. Peng et al., "DSparse", JCST 40(3), 2025, https://doi.org/10.1007/s11390-025-4821-5
choose the most critical layers for each device's memory; how, could not be found, nor whether all
layers are covered. So the objective and the algorithm are ours: place the units that fewest devices
can hold first, with backtracking; then let each device in turn take its best response to the
others, by dynamic programming over its memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flower_adsp.errors import ConfigError, require
from flower_adsp.sparse.profile import Choice, ModelProfile

_CELLS = 1024  # resolution of memory in the dynamic programme; costs are rounded up
_TIME_CELLS = 48
_MOST_NODES = 20_000  # of the search for a cover
_SWEEPS = 10


@dataclass(frozen=True)
class Capacity:
    """What a device can take on.

    Parameters
    ----------
    memory : int
        Bytes that training may use at its peak.
    weight : float (default: 1.0)
        n_d, its examples over the mean.
    time_share : float | None (default: None)
        The most time a step may take, as a part of one that trains all; None for no limit.
    name : str (default: "")
        Its name in messages.
    """

    memory: int
    weight: float = 1.0
    time_share: float | None = None
    name: str = ""

    def fits(self, profile: ModelProfile, choice: Choice) -> bool:
        """Tell whether the device can train a choice."""
        if profile.peak_bytes(choice) > self.memory:
            return False
        return self.time_share is None or profile.time_share(choice) <= self.time_share


@dataclass(frozen=True)
class Cover:
    """Who trains what.

    Parameters
    ----------
    choices : tuple[dict[int, float], ...]
        For each device the ratios of the units it trains, by the unit's index.
    uncovered : tuple[int, ...]
        Units that nobody trains whole.
    value : float
        The objective.
    """

    choices: tuple[dict[int, float], ...]
    uncovered: tuple[int, ...] = ()
    value: float = field(default=0.0, compare=False)


def usefulness(amount: float) -> float:
    """Return φ(c) = 1 − 2^(−c)."""
    return float(1.0 - 2.0**-amount)


def objective(
    importance: Sequence[float], capacities: Sequence[Capacity], choices: Sequence[Choice]
) -> float:
    """Return Σ_u v_u φ(c_u)."""
    return sum(
        value * usefulness(_amount(capacities, choices, index))
        for index, value in enumerate(importance)
    )


def _amount(capacities: Sequence[Capacity], choices: Sequence[Choice], index: int) -> float:
    return sum(
        capacity.weight * choice.get(index, 0.0)
        for capacity, choice in zip(capacities, choices, strict=True)
    )


def check_capacities(profile: ModelProfile, capacities: Sequence[Capacity]) -> None:
    """Check that each device can at least train the last unit.

    Raises
    ------
    ConfigError
        If one cannot; it says how much is needed, and with what mini-batch it would fit.
    """
    head = {profile.num_units - 1: 1.0}
    needed = profile.peak_bytes(head)
    for index, capacity in enumerate(capacities):
        name = capacity.name or f"device {index}"
        if capacity.memory < needed:
            fixed = profile.model_bytes + profile.state_bytes(head) + profile.gradient_bytes(head)
            factor = (capacity.memory - fixed) / (needed - fixed)
            advice = (
                f"a mini-batch of at most {factor:.0%} of the present one would fit"
                if factor > 0
                else "no mini-batch would fit: use a smaller model"
            )
            raise ConfigError(
                f"the memory of {name}, {capacity.memory / 2**20:.1f} MiB for training, is too "
                "little; a forward pass and the training of the last unit need "
                f"{needed / 2**20:.1f} MiB; {advice}"
            )
        require(
            capacity.time_share is None or capacity.time_share >= profile.time_share(head),
            f"time_share of {name}",
            capacity.time_share,
            f"at least {profile.time_share(head):.3f}, what training the last unit takes",
        )


# ---------------------------------------------------------------------------------- best response


def best_response(
    profile: ModelProfile,
    capacity: Capacity,
    gain: Callable[[int, float], float],
    forced: Choice,
    ratios: Sequence[float],
) -> dict[int, float] | None:
    """Return the choice of one device with the largest sum of gains.

    For each unit as the lowest, what the units above keep while frozen is due in any case, and the
    rest is a knapsack. The peak is not a sum over units, but bounded by sums; so of the knapsacks
    of all sizes the best whose peak fits is taken, and then filled up.

    Parameters
    ----------
    profile : ModelProfile
        What units cost.
    capacity : Capacity
        The device.
    gain : Callable[[int, float], float]
        What training a unit at a ratio is worth, at least 0.
    forced : Mapping[int, float]
        Units that it must train, at least at these ratios.
    ratios : Sequence[float]
        Those it may choose from.

    Returns
    -------
    dict[int, float] | None
        None if even the forced units do not fit.
    """
    if not capacity.fits(profile, forced):
        return None
    best, value = dict(forced), _worth(gain, forced)
    for lowest in range(min(forced, default=profile.num_units - 1) + 1):
        options = [
            _options(profile, gain, index, lowest, forced, ratios)
            for index in range(lowest, profile.num_units)
        ]
        for with_gradients in (True, False):
            found = _knapsack(profile, capacity, options, lowest, with_gradients)
            if found is None:
                continue
            _fill(profile, capacity, gain, found, ratios)
            worth = _worth(gain, found)
            if worth > value + 1e-12:
                best, value = found, worth
    return best


@dataclass(frozen=True)
class _Option:
    ratio: float  # 0 for frozen
    gain: float
    kept: int
    gradients: int
    time: float


def _worth(gain: Callable[[int, float], float], choice: Choice) -> float:
    return sum(gain(index, ratio) for index, ratio in choice.items())


def _options(
    profile: ModelProfile,
    gain: Callable[[int, float], float],
    index: int,
    lowest: int,
    forced: Choice,
    ratios: Sequence[float],
) -> list[_Option]:
    unit = profile.units[index]
    total = sum(each.macs for each in profile.units)
    full = max(1, 3 * total - profile.units[0].macs)
    least = forced.get(index, 0.0)
    options = []
    if not least and index > lowest:
        options.append(_Option(0.0, 0.0, 0, 0, 0.0))
    for ratio in ratios:
        if ratio < least:
            continue
        choice = {index: ratio}
        kept = unit.saved[ratio] + profile.state_bytes(choice)
        if index > lowest:
            kept -= unit.saved[0.0]
        time = ratio * unit.macs / full
        options.append(
            _Option(ratio, gain(index, ratio), max(kept, 0), unit.parameters[ratio], time)
        )
    return options


def _knapsack(
    profile: ModelProfile,
    capacity: Capacity,
    options: list[list[_Option]],
    lowest: int,
    with_gradients: bool,
) -> dict[int, float] | None:
    """Choose one option for each unit; return the best that fits."""
    above = profile.units[lowest + 1 :]
    due = profile.model_bytes + profile.batch_bytes + sum(unit.saved[0.0] for unit in above)
    room = capacity.memory - due
    if room < 0:
        return None
    cell = max(1, -(-room // _CELLS))
    size = room // cell + 1
    times, time_cell, time_size = capacity.time_share is not None, 1.0, 1
    if times:
        assert capacity.time_share is not None
        all_macs = sum(unit.macs for unit in profile.units)
        base = (all_macs + sum(unit.macs for unit in above)) / max(
            1, 3 * all_macs - profile.units[0].macs
        )
        if base > capacity.time_share:
            return None
        time_cell = max((capacity.time_share - base) / _TIME_CELLS, 1e-12)
        time_size = _TIME_CELLS + 1
    worth = np.zeros((size, time_size))
    taken: list[np.ndarray] = []
    costs: list[list[tuple[int, int]]] = []
    for unit in options:
        result = np.full_like(worth, -np.inf)
        choice = np.zeros(worth.shape, np.int8)
        cost = []
        for number, option in enumerate(unit):
            memory = -(-(option.kept + with_gradients * option.gradients) // cell)
            time = int(np.ceil(option.time / time_cell - 1e-9)) if times else 0
            cost.append((memory, time))
            if memory >= size or time >= time_size:
                continue
            shifted = worth[: size - memory, : time_size - time] + option.gain
            view = result[memory:, time:]
            better = shifted > view
            view[better] = shifted[better]
            choice[memory:, time:][better] = number
        worth = result
        taken.append(choice)
        costs.append(cost)
    if not np.isfinite(worth[-1, -1]):
        return None

    def chosen(place: int) -> dict[int, float] | None:
        if not np.isfinite(worth[place, -1]):
            return None
        memory, time = place, time_size - 1
        found = {}
        for number in range(len(options) - 1, -1, -1):
            picked = int(taken[number][memory, time])
            if options[number][picked].ratio:
                found[lowest + number] = options[number][picked].ratio
            used, spent = costs[number][picked]
            memory, time = memory - used, time - spent
        return dict(sorted(found.items()))

    low, high, best = 0, size - 1, None
    while low <= high:
        middle = (low + high) // 2 if best is not None or high < size - 1 else high
        found = chosen(middle)
        if found is not None and capacity.fits(profile, found):
            best, low = found, middle + 1
        elif found is None:
            low = middle + 1
        else:
            high = middle - 1
    return best


def _fill(
    profile: ModelProfile,
    capacity: Capacity,
    gain: Callable[[int, float], float],
    choice: dict[int, float],
    ratios: Sequence[float],
) -> None:
    """Use what is left: raise or add, the most valuable first, while it fits."""
    while True:
        additions = [
            (gain(index, ratio) - (gain(index, choice[index]) if index in choice else 0.0),
             -index, ratio)
            for index in range(min(choice), profile.num_units)
            for ratio in ratios
            if ratio > choice.get(index, 0.0)
        ]  # fmt: skip
        for more, index, ratio in sorted(additions, reverse=True):
            larger = {**choice, -index: ratio}
            if more > 1e-12 and capacity.fits(profile, larger):
                choice.update(larger)
                break
        else:
            return


# ------------------------------------------------------------------------------------------ cover


def plan_cover(
    profile: ModelProfile,
    importance: Sequence[float],
    capacities: Sequence[Capacity],
    ratios: Sequence[float] = (1.0,),
    boost: Callable[[int, int], float] | None = None,
) -> Cover:
    """Plan who trains what, so that every unit is trained by someone where that is possible.

    Parameters
    ----------
    profile : ModelProfile
        What units cost.
    importance : Sequence[float]
        v_u, at least 0.
    capacities : Sequence[Capacity]
        The devices.
    ratios : Sequence[float] (default: (1.0,))
        At which units may be trained.
    boost : Callable[[int, int], float] | None (default: None)
        A factor on v_u for a device and a unit, such as for units it has not trained for long.

    Returns
    -------
    Cover
        The same for the same arguments.

    Raises
    ------
    ConfigError
        If a device cannot even train the last unit.
    """
    check_capacities(profile, capacities)
    require(
        len(importance) == profile.num_units and min(importance) >= 0,
        "importance",
        list(importance),
        f"{profile.num_units} numbers of at least 0",
    )
    head = profile.num_units - 1
    choices: list[dict[int, float]] = [{head: 1.0} for _ in capacities]
    uncovered = _cover(profile, capacities, choices)
    for _ in range(_SWEEPS):
        changed = False
        for device, capacity in enumerate(capacities):
            gain = _gain(importance, capacities, choices, device, boost)
            forced = _only_here(choices, device) | {head: 1.0}
            found = best_response(profile, capacity, gain, forced, ratios)
            if found is not None and _worth(gain, found) > _worth(gain, choices[device]) + 1e-12:
                choices[device] = found
                changed = True
        if not changed:
            break
    whole = {unit for choice in choices for unit, ratio in choice.items() if ratio >= 1.0}
    left = tuple(unit for unit in uncovered if unit not in whole)
    return Cover(tuple(choices), left, objective(importance, capacities, choices))


def _gain(
    importance: Sequence[float],
    capacities: Sequence[Capacity],
    choices: Sequence[Choice],
    device: int,
    boost: Callable[[int, int], float] | None,
) -> Callable[[int, float], float]:
    weight = capacities[device].weight
    others = [
        _amount(capacities, choices, unit) - weight * choices[device].get(unit, 0.0)
        for unit in range(len(importance))
    ]

    def gain(unit: int, ratio: float) -> float:
        more = usefulness(others[unit] + weight * ratio) - usefulness(others[unit])
        return importance[unit] * more * (1.0 if boost is None else boost(device, unit))

    return gain


def _only_here(choices: Sequence[Choice], device: int) -> dict[int, float]:
    """Return the units that only this device trains whole."""
    elsewhere = {
        unit
        for other, choice in enumerate(choices)
        for unit, ratio in choice.items()
        if other != device and ratio >= 1.0
    }
    return {u: r for u, r in choices[device].items() if r >= 1.0 and u not in elsewhere}


def _cover(
    profile: ModelProfile, capacities: Sequence[Capacity], choices: list[dict[int, float]]
) -> list[int]:
    """Place every unit on some device, in place; return those that found none."""
    head = {profile.num_units - 1: 1.0}
    able = {
        unit: [
            device
            for device, capacity in enumerate(capacities)
            if capacity.fits(profile, {**head, unit: 1.0})
        ]
        for unit in range(profile.num_units - 1)
    }
    order = sorted(
        (unit for unit in able if able[unit]),
        key=lambda unit: (len(able[unit]), -profile.peak_bytes({**head, unit: 1.0}), unit),
    )
    nodes = 0
    best: tuple[int, list[dict[int, float]]] = (-1, [])

    def place(position: int) -> bool:
        nonlocal nodes, best
        if position > best[0]:
            best = (position, [dict(choice) for choice in choices])
        if position == len(order):
            return True
        nodes += 1
        if nodes > _MOST_NODES:
            return False
        unit = order[position]
        costs = []
        for device in able[unit]:
            larger = {**choices[device], unit: 1.0}
            if capacities[device].fits(profile, larger):
                before = profile.peak_bytes(choices[device])
                more = (profile.peak_bytes(larger) - before) / capacities[device].memory
                costs.append((more + before / capacities[device].memory, device))
        for _, device in sorted(costs):
            choices[device][unit] = 1.0
            if place(position + 1):
                return True
            del choices[device][unit]
        return False

    uncovered = [unit for unit in able if not able[unit]]
    if not place(0):
        position, found = best
        for choice, kept in zip(choices, found, strict=True):
            choice.clear()
            choice.update(kept)
        for unit in order[position:]:  # what else fits, without backtracking
            for device in able[unit]:
                larger = {**choices[device], unit: 1.0}
                if capacities[device].fits(profile, larger):
                    choices[device] = larger
                    break
            else:
                uncovered.append(unit)
    return sorted(uncovered)


# --------------------------------------------------------------------------------------- controls


def plan_suffix(profile: ModelProfile, capacities: Sequence[Capacity]) -> Cover:
    """Let each device train as many of the last units as fit, all that stock layers allow."""
    check_capacities(profile, capacities)
    choices = []
    for capacity in capacities:
        lowest = profile.num_units - 1
        while lowest and capacity.fits(
            profile, dict.fromkeys(range(lowest - 1, profile.num_units), 1.0)
        ):
            lowest -= 1
        choices.append(dict.fromkeys(range(lowest, profile.num_units), 1.0))
    return _without_cover(profile, choices)


def plan_alone(
    profile: ModelProfile,
    importance: Sequence[float],
    capacities: Sequence[Capacity],
    ratios: Sequence[float] = (1.0,),
) -> Cover:
    """Let each device choose for itself, as if it were alone: nobody looks at coverage."""
    check_capacities(profile, capacities)
    head = {profile.num_units - 1: 1.0}
    choices = [
        best_response(profile, capacity, lambda u, r: importance[u] * r, head, ratios) or dict(head)
        for capacity in capacities
    ]
    return _without_cover(profile, choices)


def plan_head(profile: ModelProfile, capacities: Sequence[Capacity]) -> Cover:
    """Let each device train the last unit only."""
    check_capacities(profile, capacities)
    return _without_cover(profile, [{profile.num_units - 1: 1.0} for _ in capacities])


def plan_everything(profile: ModelProfile, capacities: Sequence[Capacity]) -> Cover:
    """Let each device train all, whether it fits or not."""
    return _without_cover(
        profile, [dict.fromkeys(range(profile.num_units), 1.0) for _ in capacities]
    )


def _without_cover(profile: ModelProfile, choices: Sequence[Mapping[int, float]]) -> Cover:
    whole = {unit for choice in choices for unit, ratio in choice.items() if ratio >= 1.0}
    left = tuple(unit for unit in range(profile.num_units) if unit not in whole)
    return Cover(tuple(dict(choice) for choice in choices), left)

"""How many groups SoCFlow trains in, from what a first epoch shows."""

from collections.abc import Sequence

_ABOVE_CHANCE, _OF_ONE_GROUP = 1.5, 0.25


def collapses(accuracy: float, of_one_group: float, chance: float) -> bool:
    """Tell whether a first epoch's accuracy is below max(1.5 · chance, 0.25 · that of one group).

    Notes
    -----
    SoCFlow (https://doi.org/10.1145/3617232.3624847, section 3.1.1) only says that the accuracy
    of a first epoch collapses, and shows that to be around 15 % for ten classes, where chance is
    10 %. The two thresholds are ours.
    """
    return accuracy < max(_ABOVE_CHANCE * chance, _OF_ONE_GROUP * of_one_group)


def next_number(accuracies: Sequence[float], chance: float, most: int) -> tuple[int, bool]:
    """Return a number of groups, and whether it is the one to keep or the next to try.

    Numbers are doubled until the accuracy after one epoch collapses, and the one before is kept.

    Parameters
    ----------
    accuracies : Sequence[float]
        After one epoch from the initial model in 1, 2, 4 ... groups, as far as has been tried.
    chance : float
        The accuracy of guessing.
    most : int
        The number of devices.

    Notes
    -----
    Source: SoCFlow, section 3.1.1. That a first epoch tells how well a number of groups will do
    in the end is an observation of its authors, on few models.
    """
    tried = 2 ** (len(accuracies) - 1) if accuracies else 0
    if accuracies and collapses(accuracies[-1], accuracies[0], chance):
        return max(tried // 2, 1), True
    number = max(2 * tried, 1)
    if number > most:
        return tried, True
    return number, most == 1

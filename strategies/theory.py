"""What the papers say in formulas about asynchrony and staleness.

The degree of heterogeneity H and the limit 1 − 1/H are in `flower_adsp.devices`.
"""

from collections.abc import Sequence
from math import sqrt

from flower_adsp.errors import require


def implicit_momentum(
    check_period: float, commits_due: Sequence[float], speeds: Sequence[float]
) -> float:
    """Return the momentum that asynchrony amounts to under ADSP.

    μ = 1 − 1/(1 + (1 − 1/m) Σ_i Γ/(ΔC_i v_i)), Theorem 1 of Hu, Wang and Wu, AAAI 2020,
    https://arxiv.org/abs/1911.06949, after Mitliagkas et al., 2016,
    https://arxiv.org/abs/1605.09774. The more commits are due, the smaller it is. What v_i
    measures decides the size of the result: with Γ/v_i = 0.05 for all i it has the values that
    the authors plotted. Take it as a trend.

    Parameters
    ----------
    check_period : float
        Γ.
    commits_due : Sequence[float]
        ΔC_i of each worker.
    speeds : Sequence[float]
        v_i of each worker.
    """
    num_workers = len(speeds)
    require(
        num_workers == len(commits_due) > 0, "speeds", list(speeds), "one for each of commits_due"
    )
    require(min(speeds) > 0, "speeds", list(speeds), "above 0")
    require(min(commits_due) > 0, "commits_due", list(commits_due), "above 0")
    total = sum(check_period / (due * v) for due, v in zip(commits_due, speeds, strict=True))
    return 1 - 1 / (1 + (1 - 1 / num_workers) * total)


def ssp_regret_bound(
    distance: float, lipschitz: float, staleness: int, num_workers: int, steps: int
) -> float:
    """Return the bound 4FL√(2(s + 1)MT) on the regret of stale synchronous parallel SGD.

    Theorem 1 of Ho et al., NeurIPS 2013, "More Effective Distributed ML via a Stale Synchronous
    Parallel Parameter Server", for convex losses and step sizes σ/√t with
    σ = F/(L√(2(s + 1)M)).

    Parameters
    ----------
    distance : float
        F, where ½‖w − w'‖² ≤ F² for all w and w'.
    lipschitz : float
        L, the bound on the norm of gradients.
    staleness : int
        s, the steps by which workers may differ.
    num_workers : int
        M.
    steps : int
        T, the steps of all workers together.
    """
    require(staleness >= 0, "staleness", staleness, "at least 0")
    return 4 * distance * lipschitz * sqrt(2 * (staleness + 1) * num_workers * steps)

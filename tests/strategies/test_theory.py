import pytest
from flower_adsp.strategies.theory import implicit_momentum, ssp_regret_bound

from flower_adsp.errors import ConfigError


@pytest.mark.parametrize(
    ("due", "expected"),
    [
        (1, 0.459),
        (2, 0.298),
        (3, 0.221),
        (4, 0.175),
        (5, 0.145),
        (6, 0.124),
        (8, 0.096),
        (10, 0.078),
    ],
)
def test_implicit_momentum_has_the_values_that_the_authors_plotted(
    due: int, expected: float
) -> None:
    # Γ/v_i = 0.05 for all of 18 workers.
    assert implicit_momentum(0.05, [due] * 18, [1.0] * 18) == pytest.approx(expected, abs=5e-4)


def test_momentum_falls_with_the_rate_and_grows_with_the_workers() -> None:
    few = implicit_momentum(60, [4] * 2, [1.0] * 2)
    assert implicit_momentum(60, [8] * 2, [1.0] * 2) < few < implicit_momentum(60, [4] * 9, [1] * 9)
    assert implicit_momentum(60, [4], [1.0]) == 0  # nobody is asynchronous alone


def test_the_regret_bound_follows_the_staleness() -> None:
    assert ssp_regret_bound(1, 1, 0, 1, 2) == pytest.approx(8)
    assert ssp_regret_bound(1, 2, 3, 4, 100) == pytest.approx(4 * 2 * (2 * 4 * 4 * 100) ** 0.5)
    per_step = [ssp_regret_bound(1, 1, 3, 18, steps) / steps for steps in (100, 10_000)]
    assert per_step[1] == pytest.approx(per_step[0] / 10)


@pytest.mark.parametrize("speeds", [[], [1.0], [1.0, 0.0]])
def test_wrong_speeds_are_named(speeds: list[float]) -> None:
    with pytest.raises(ConfigError, match="speeds"):
        implicit_momentum(60, [4, 4], speeds)

"""How much of a mini-batch is trained in FP32, how long that takes, and the merging."""

from math import exp

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_adsp.errors import ConfigError
from flower_adsp.precision import (
    fp32_examples,
    fp32_share,
    merged,
    npu_part,
    similarity,
    time_share,
)

part = st.floats(0.0, 1.0)


@given(part, part)
def test_the_cpu_has_at_least_a_part_of_1_over_e(alpha: float, beta: float) -> None:
    share = fp32_share(alpha, beta)
    assert exp(-1.0) <= share <= 1.0
    assert share >= 1.0 - beta
    assert share == min(1.0, max(exp(-alpha), 1.0 - beta))


def test_shares_by_hand() -> None:
    assert fp32_share(1.0, 0.9) == pytest.approx(0.3679, abs=1e-4)
    assert fp32_share(0.7, 0.9) == pytest.approx(0.4966, abs=1e-4)
    assert fp32_share(1.0, 0.25) == 0.75
    assert fp32_share(-0.5, 0.9) == 1.0
    assert npu_part(3.0) == 0.75
    assert npu_part(1.0, 3.0) == 0.25
    with pytest.raises(ConfigError, match="throughputs"):
        npu_part(0.0)


def test_the_longer_part_takes_a_step_s_time() -> None:
    assert time_share(0.4, 3.0) == 0.4
    assert time_share(0.4, 0.75) == pytest.approx(0.8)
    assert time_share(1.0, 3.9) == 1.0


@given(st.integers(1, 500), st.floats(0.01, 1.0))
def test_each_part_has_an_example(examples: int, share: float) -> None:
    first = fp32_examples(examples, share)
    if share == 1.0 or examples == 1:
        assert first == examples
    else:
        assert 1 <= first <= examples - 1
        assert abs(first - share * examples) <= 1


def test_the_similarity_is_of_all_logits_as_one_vector() -> None:
    a, b = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([[2.0, 1.0], [0.5, 4.0]])
    expected = float(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0))
    assert similarity([(a, b)]) == pytest.approx(expected, abs=1e-7)
    assert similarity([(a[:1], b[:1]), (a[1:], b[1:])]) == pytest.approx(expected, abs=1e-7)
    assert similarity([(a, 2 * a)]) == pytest.approx(1.0)
    assert similarity([(a, -a)]) == pytest.approx(-1.0)
    assert similarity([(a, torch.zeros_like(a))]) == 0.0
    assert similarity([(a, a * float("nan"))]) == 0.0


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), part)
def test_merging_the_same_changes_nothing(values: list[float], share: float) -> None:
    tensor = torch.tensor(values)
    assert torch.equal(merged(tensor, tensor.clone(), share), tensor)


def test_merging_by_hand() -> None:
    fp32, int8 = torch.tensor([1.0, 4.0]), torch.tensor([3.0, 0.0])
    assert merged(fp32, int8, 0.25).tolist() == [2.5, 1.0]
    assert merged(fp32, int8, 1.0).tolist() == fp32.tolist()
    assert merged(torch.tensor(7), torch.tensor(9), 0.25) == 7

from typing import Any

import numpy as np
import pytest
from flwr.app import Array
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as np_arrays

from flower_adsp.arrays import (
    add_scaled,
    decode,
    encode,
    is_averaged,
    is_buffer_name,
    is_finite,
    mix_buffers,
    num_bytes,
    weighted_mean,
)


@given(np_arrays(np.float32, 7, elements=st.floats(width=32, allow_nan=True)))
def test_is_finite_agrees_with_numpy(array: np.ndarray) -> None:
    assert is_finite(array) == bool(np.isfinite(array).all())


def test_is_finite_is_not_fooled_by_an_overflowing_sum() -> None:
    assert is_finite(np.full(10, np.finfo(np.float32).max, dtype=np.float32))


def test_is_finite_of_integers_and_scalars() -> None:
    assert is_finite(np.array([1, 2]))
    assert is_finite(np.array(1.0))
    assert not is_finite(np.array(np.nan))


def test_round_trip_keeps_names_order_types_and_values() -> None:
    weights = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array(3, dtype=np.int64),
    }
    back = decode(encode(weights))
    assert list(back) == ["b", "a"]
    for name, array in weights.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)
    assert num_bytes(weights) == 24 + 8


def test_encoded_arrays_are_copies() -> None:
    weights = {"a": np.zeros(2)}
    record = encode(weights)
    weights["a"] += 1
    np.testing.assert_array_equal(record["a"].numpy(), [0, 0])


def test_add_scaled_is_in_place_and_keeps_the_type() -> None:
    target = np.ones(2, dtype=np.float32)
    add_scaled({"a": target}, {"a": np.array([2, 4], dtype=np.float32)}, 0.25)
    np.testing.assert_array_equal(target, [1.5, 2.0])
    assert target.dtype == np.float32


def test_buffers_are_mixed_by_value_and_integers_never_averaged() -> None:
    weights = {"running_var": np.array([4.0]), "num_batches_tracked": np.array(3)}
    mix_buffers(weights, {"running_var": np.array([0.0]), "num_batches_tracked": np.array(9)}, 0.25)
    assert weights["running_var"][0] == 3.0
    assert weights["num_batches_tracked"] == 9
    mix_buffers(weights, {"num_batches_tracked": np.array(2)}, 0.25)
    assert weights["num_batches_tracked"] == 9


def test_weighted_mean() -> None:
    mean = weighted_mean(
        [{"a": np.array([1.0]), "n": np.array(5)}, {"a": np.array([5.0]), "n": np.array(4)}],
        [0.75, 0.25],
    )
    assert mean["a"][0] == 2.0
    assert mean["n"] == 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bn.running_mean", True), ("running_var", True), ("w", False), ("my_running_mean", False)],
)
def test_batchnorm_names(name: str, expected: bool) -> None:
    assert is_buffer_name(name) is expected


def test_only_floats_are_averaged() -> None:
    assert is_averaged(np.zeros(1, np.float16))
    assert not is_averaged(np.zeros(1, np.int32))
    assert not is_averaged(np.zeros(1, bool))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (2, 3, 4)])
def test_encoding_is_flower_s_own_byte_for_byte(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    ours, theirs = encode({"a": array})["a"], Array(array)
    assert (ours.dtype, ours.shape, ours.stype) == (theirs.dtype, theirs.shape, theirs.stype)
    assert ours.data == theirs.data


def test_arrays_in_another_memory_order_keep_their_values() -> None:
    array = np.arange(24.0).reshape(4, 6)
    for view in (np.asfortranarray(array), array.T, array[::2, 1::3], array[::-1]):
        np.testing.assert_array_equal(decode(encode({"a": view}))["a"], view)

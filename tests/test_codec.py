"""Updates in fewer bytes: what travels, what is lost, and what is kept for later."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_adsp.strategies import Bsp, LoopOptions
from flwr.app import Array, ArrayRecord, Context, Message
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flower_adsp.client_app import app
from flower_adsp.codec import CODECS, compress, restore, travelling_bytes
from flower_adsp.config import load_config
from flower_adsp.errors import ConfigError
from flower_adsp.experiment import run_experiment
from flower_adsp.network import Network
from flower_adsp.testing import InProcessGrid
from tests.conftest import Recorder, run_toy, spoil, toy_grid, weight

arrays = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=0, max_dims=3, max_side=5),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
)


def draws(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(arrays, st.integers(0, 9))
def test_int8_is_within_one_step_and_what_it_lost_is_kept(array: Any, seed: int) -> None:
    sent = compress({"w": array}, "int8", draws(seed))
    assert sent.arrays["w"].dtype == np.int8
    assert sent.arrays["w"].shape == array.shape
    back = restore(sent.arrays["w"], sent.scales["w"], np.float32)
    assert back.dtype == np.float32
    step = np.max(np.abs(array), initial=0.0) / 127
    assert np.all(np.abs(back - array) <= step * (1 + 1e-3))
    assert np.all(np.abs(back + sent.lost["w"] - array) <= step * 1e-4)


def test_int8_is_right_on_average() -> None:
    array = np.linspace(-1, 1, 41, dtype=np.float32)
    random = draws()
    sent = [compress({"w": array}, "int8", random) for _ in range(4000)]
    mean = np.mean([restore(s.arrays["w"], s.scales["w"], np.float32) for s in sent], axis=0)
    # One rounding has a standard deviation of at most half a step of 1/127.
    assert np.max(np.abs(mean - array)) < 4 * 0.5 / 127 / 4000**0.5


def test_float32_is_the_arrays_themselves() -> None:
    update = {"w": np.ones(3, np.float64)}
    assert compress(update, "float32", draws()).arrays is update


def test_float16_holds_what_is_beyond_its_range_at_its_largest() -> None:
    sent = compress({"w": np.array([1e9, -1e9, 0.5, np.nan])}, "float16", draws())
    assert sent.arrays["w"].dtype == np.float16
    np.testing.assert_array_equal(sent.arrays["w"], np.array([65504, -65504, 0.5, np.nan]))


@pytest.mark.parametrize(("codec", "size"), zip(CODECS, (4, 2, 1), strict=True))
def test_bytes_of_an_element(codec: str, size: int) -> None:
    assert travelling_bytes(np.zeros((3, 2), np.float32), codec) == 6 * size
    assert travelling_bytes(np.zeros(10, np.float32), codec, size=4) == 4 * size
    assert travelling_bytes(np.zeros(2, np.int64), codec) == 16


def weights_of(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("strategy", ["adsp", "dsparse"])
def test_a_run_sends_real_bytes_and_learns(
    run_folder: Callable[..., Path], tmp_path: Path, strategy: str
) -> None:
    sizes: dict[str, list[int]] = {}

    def run(codec: str) -> dict[str, Any]:
        sizes[codec] = []

        def watch(message: Message) -> Message:
            record = message.content["arrays"]
            sizes[codec].append(sum(array.numpy().nbytes for array in record.values()))
            return message

        run_config = {
            "task": "digits-mlp",
            "strategy": strategy,
            "output": str(tmp_path / codec),
            "tracking.report": "off",
            "overrides": f"network.codec={codec} train.learning_rate=0.1 run.num_rounds=4"
            + (" strategy.check_period=20" if strategy == "adsp" else " strategy.local_steps=20"),
        }
        with InProcessGrid(spoil(app, watch), 4, run_config) as grid:
            run_experiment(grid, load_config(run_config))
        found: dict[str, Any] = json.loads((tmp_path / codec / "summary.json").read_text())
        return found

    plain, half, byte = (run(codec) for codec in CODECS)
    assert half["bytes_up"] * 2 == plain["bytes_up"] == byte["bytes_up"] * 4
    for codec, summary in zip(CODECS, (plain, half, byte), strict=True):
        assert sum(sizes[codec][: summary["commits"]]) == summary["bytes_up"]
        assert summary["test"]["accuracy"] > plain["test"]["accuracy"] - 0.03


def test_what_one_commit_loses_the_next_makes_up_for() -> None:
    # The toy's one weight always is the largest magnitude, which int8 carries exactly; so the
    # device is given something that was lost before.
    sent: list[float] = []

    def remember(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train.commit" and not sent:
            context.state["flower-adsp.lost"] = ArrayRecord({"w": Array(np.array([0.25]))})
        reply = app(message, context)
        if message.metadata.message_type == "train.commit":
            content = reply.content
            sent.append(float(content["arrays"]["w"].numpy()[0] * content["scales"]["w"].numpy()))
            assert abs(context.state["flower-adsp.lost"]["w"].numpy()[0]) < 1e-12
        return reply

    loop = LoopOptions(network=Network(codec="int8"), min_available_nodes=1)
    with toy_grid(1, client_app=remember) as grid:
        result = run_toy(Bsp(loop=loop), grid, rounds=2)
    # From 0 towards 1 at a rate of 0.5: half the way, and the quarter that was lost; then half
    # of what is left.
    assert sent[:2] == pytest.approx([0.75, 0.125])
    assert weight(result.arrays) == pytest.approx(0.875)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda c: c.update(scales=ArrayRecord({})), "scales"),
        (lambda c: c.pop("scales"), "missing-key"),
        (lambda c: c.update(scales=ArrayRecord({"w": Array(np.array(-1.0))})), "scales"),
        (lambda c: c.update(scales=ArrayRecord({"w": Array(np.array(np.inf))})), "scales"),
        (lambda c: c.update(scales=ArrayRecord({"w": Array(np.array([1.0]))})), "scales"),
        (lambda c: c.update(scales=ArrayRecord({"w": Array(np.array("x"))})), "scales"),
        (lambda c: c.update(arrays=ArrayRecord({"w": Array(np.array([1.0]))})), "dtype"),
        (lambda c: c.update(arrays=ArrayRecord({"v": Array(np.array([1], np.int8))})), "arrays"),
        (lambda c: c.update(arrays=ArrayRecord({"w": Array(np.zeros(2, np.int8))})), "shape"),
    ],
)
def test_what_is_not_what_was_assigned_is_refused(change: Any, kind: str) -> None:
    calls = 0

    def once(reply: Message) -> Message:
        nonlocal calls
        calls += 1
        if calls == 1:
            change(reply.content)
        return reply

    recorder = Recorder()
    loop = LoopOptions(network=Network(codec="int8"), callbacks=[recorder], min_available_nodes=1)
    with toy_grid(1, client_app=spoil(app, once)) as grid:
        run_toy(Bsp(loop=loop), grid, rounds=2)
    assert [record["kind"] for record in recorder.of("refused")] == [kind]
    assert len(recorder.of("commit")) == 1


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ConfigError, match=r"network\.codec.*int4.*float16"):
        load_config({"overrides": "network.codec=int4"})

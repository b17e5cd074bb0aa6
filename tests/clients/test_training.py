import time
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from flower_adsp.client_app import app
from flower_adsp.errors import ConfigError
from flower_adsp.messages import (
    Assignment,
    decode_capability,
    decode_commit,
    encode_assignment,
    encode_capability_query,
)
from flower_adsp.testing import InProcessGrid
from tests.conftest import toy_arrays, toy_grid

NODE = 1000


def send(grid: InProcessGrid, message: Message) -> Message:
    (reply,) = grid.send_and_receive([message])
    return reply


def commit(grid: InProcessGrid, arrays: ArrayRecord, lr: float = 0.5, **settings: Any) -> Any:
    work = {"id": 0, "version": 0, "first_step": 0, "steps": None, "seconds": None, **settings}
    assignment = Assignment(lr=lr, **work)
    reply = send(grid, encode_assignment(NODE, arrays, assignment, {}, "arrays", "config"))
    assert not reply.has_error(), reply.error
    weights = {name: array.numpy() for name, array in arrays.items()}
    return decode_commit(reply, assignment, weights)


def stock_train(grid: InProcessGrid, arrays: ArrayRecord, **settings: Any) -> Message:
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(settings)})
    return send(grid, Message(content, NODE, "train"))


def test_a_number_of_steps_is_done() -> None:
    with toy_grid(1) as grid:
        done = commit(grid, toy_arrays(), steps=3)
    assert done.steps == 3
    assert done.update["w"] == pytest.approx([1 - 0.5**3])
    assert done.train_loss == pytest.approx((0.5 + 0.125 + 0.03125) / 3)


def test_a_timer_ends_at_the_first_step_after_it() -> None:
    with toy_grid(1) as grid:
        commit(grid, toy_arrays(), steps=1)  # builds the device
        began = time.monotonic()
        done = commit(grid, toy_arrays(), lr=1e-6, seconds=0.3)
        elapsed = time.monotonic() - began
    assert 0.3 <= done.train_seconds <= elapsed < 1.3
    assert done.steps > 10


def test_a_timer_that_has_run_out_still_gives_one_step() -> None:
    with toy_grid(1) as grid:
        assert commit(grid, toy_arrays(), seconds=0.0).steps == 1


@pytest.mark.parametrize(
    "settings",
    [{"task": "digits-mlp"}, {"task": "mnist-cnn", "overrides": "task.crop_padding=2"}],
)
def test_how_steps_are_cut_into_commits_changes_nothing(settings: dict[str, Any]) -> None:
    with InProcessGrid(app, 2, settings) as grid:
        model = initial_model(settings)
        whole = commit(grid, model, lr=0.1, steps=5)
        first = commit(grid, model, lr=0.1, steps=2)
        middle = ArrayRecord(
            {
                name: torch.from_numpy(array.numpy() + first.update[name])
                for name, array in model.items()
            }
        )
        second = commit(grid, middle, lr=0.1, first_step=2, steps=3)
    for name, update in whole.update.items():
        np.testing.assert_allclose(update, first.update[name] + second.update[name], atol=1e-6)


def initial_model(settings: dict[str, Any]) -> ArrayRecord:
    from flower_adsp.config import load_config
    from flower_adsp.tasks.build import build_task

    return ArrayRecord(build_task(load_config(settings)).build_model().state_dict())


def test_momentum_lives_on_the_device_from_commit_to_commit() -> None:
    with toy_grid(1, overrides="train.momentum=0.5") as grid:
        first = commit(grid, toy_arrays(), lr=0.25, steps=1)
        second = commit(grid, toy_arrays(), lr=0.25, first_step=1, steps=1)
    # Both gradients are −1, from w = 0: the second step has half of the first's with it.
    assert first.update["w"] == pytest.approx([0.25])
    assert second.update["w"] == pytest.approx([0.25 * 1.5])


def test_without_momentum_nothing_is_kept() -> None:
    with toy_grid(1) as grid:
        first = commit(grid, toy_arrays(), steps=1)
        second = commit(grid, toy_arrays(), first_step=1, steps=1)
        assert len(grid.context_of(NODE).state) == 0
    assert first.update == second.update


def test_a_handler_that_fails_leaves_the_momentum_as_it_was() -> None:
    with toy_grid(1, overrides="train.momentum=0.5") as grid:
        commit(grid, toy_arrays(), steps=1)
        before = grid.context_of(NODE).state["flower-adsp.momentum"]["w"].numpy().copy()
        bad = ArrayRecord({"other": torch.zeros(1)})
        assignment = Assignment(1, 0, 1, 0.5, 1, None)
        assert send(
            grid, encode_assignment(NODE, bad, assignment, {}, "arrays", "config")
        ).has_error()
        after = grid.context_of(NODE).state["flower-adsp.momentum"]["w"].numpy()
    np.testing.assert_array_equal(before, after)


def test_a_stock_message_trains_for_one_local_epoch() -> None:
    with toy_grid(1, overrides="task.examples=10") as grid:
        reply = stock_train(grid, toy_arrays(), lr=0.5)
    assert reply.content["arrays"]["w"].numpy() == pytest.approx([1 - 0.5**9])  # 10 % held out
    assert reply.content["metrics"]["num-examples"] == 9


def test_the_rate_of_a_stock_message_is_the_run_s_unless_given() -> None:
    with toy_grid(1, overrides="train.learning_rate=0.125") as grid:
        reply = stock_train(grid, toy_arrays(), **{"local-steps": 1})
    assert reply.content["arrays"]["w"].numpy() == pytest.approx([0.125])


def test_the_proximal_term_pulls_back_to_the_global_model() -> None:
    # From w = 0: w <- w − lr ((w − 1) + μ w)
    with toy_grid(1) as grid:
        reply = stock_train(grid, toy_arrays(), lr=0.1, **{"local-steps": 3, "proximal-mu": 2.0})
    w = 0.0
    for _ in range(3):
        w -= 0.1 * ((w - 1) + 2.0 * w)
    assert reply.content["arrays"]["w"].numpy() == pytest.approx([w])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"lr": -1.0}, "lr = -1.0"),
        ({"lr": "fast"}, "lr = 'fast'"),
        ({"local-steps": 0}, "local-steps = 0"),
        ({"proximal-mu": -0.5}, "proximal-mu = -0.5"),
        ({"server-round": 0}, "server-round = 0"),
    ],
)
def test_a_bad_setting_of_a_stock_message_is_named(setting: dict[str, Any], said: str) -> None:
    with toy_grid(1) as grid:
        reply = stock_train(grid, toy_arrays(), **setting)
    assert reply.has_error()
    assert said in reply.error.reason


def test_evaluation_is_on_the_device_s_own_share() -> None:
    settings = {"task": "digits-mlp"}
    with InProcessGrid(app, 2, settings) as grid:
        model = initial_model(settings)
        content = RecordDict({"arrays": model, "config": ConfigRecord()})
        reply = send(grid, Message(content, NODE, "evaluate"))
        capability = decode_capability(send(grid, encode_capability_query(NODE)))
    metrics = reply.content["metrics"]
    share = metrics["num-examples"]
    assert share == int(0.1 * (share + capability.num_examples))
    assert metrics["eval-loss"] == pytest.approx(2.3, abs=0.3)  # about ln 10, untrained
    assert 0 <= metrics["eval-accuracy"] <= 1


def test_capability_says_who_a_device_is() -> None:
    with toy_grid(3, node_configs=[{}, {}, {"name": "attic", "memory_mib": 256}]) as grid:
        reply = send(grid, encode_capability_query(NODE + 2))
    capability = decode_capability(reply)
    assert (capability.partition_id, capability.num_partitions) == (2, 3)
    assert (capability.num_examples, capability.batch_size) == (3, 1)
    assert (capability.profile.name, capability.profile.memory_mib) == ("attic", 256)
    assert {"flwr", "torch", "python", "flower-adsp"} <= set(capability.versions)


def test_a_device_that_measures_itself_has_a_speed_and_memory() -> None:
    with toy_grid(1, devices="measured") as grid:
        profile = decode_capability(send(grid, encode_capability_query(NODE))).profile
    assert 0 < profile.seconds_per_sample < 0.1
    assert profile.memory_mib > 100


@pytest.mark.parametrize("name", ["cuda", "mps", "tpu"])
def test_an_accelerator_that_is_not_there_is_named(name: str) -> None:
    from flower_adsp.clients.device import pick_accelerator

    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=rf"train\.device.*{name}.*'cpu'"):
        pick_accelerator(name)


def test_an_assignment_may_give_another_batch_size() -> None:
    settings = {"task": "digits-mlp"}
    with InProcessGrid(app, 2, settings) as grid:
        model = initial_model(settings)
        usual = commit(grid, model, lr=0.1, steps=2)
        same = commit(grid, model, lr=0.1, steps=2, batch_size=16)
        once = commit(grid, model, lr=0.1, steps=1, batch_size=32)
    for name in usual.update:
        np.testing.assert_array_equal(usual.update[name], same.update[name])
    # One step on the same 32 examples: the loss at the initial model is the mean of both halves.
    assert once.train_loss == pytest.approx(usual.train_loss, rel=0.02)
    assert once.train_loss != usual.train_loss

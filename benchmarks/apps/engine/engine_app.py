"""Commits without training, beside an echo that keeps as many messages open by push and pull."""

import json
import time
from pathlib import Path

import numpy as np
from flower_adsp.strategies import Adsp, LoopOptions
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flower_adsp.arrays import encode
from flower_adsp.config import load_config
from flower_adsp.devices import deal
from flower_adsp.messages import (
    Capability,
    Commit,
    decode_assignment,
    encode_capability,
    encode_commit,
    software_versions,
)
from flower_adsp.tracking.base import Callback

PARAMETERS = 100_000  # 400 kB
CHECK_PERIOD, RATE = 60.0, 4  # as in the main job

client = ClientApp()
server = ServerApp()


def payload() -> dict[str, np.ndarray]:
    draws = np.random.default_rng(0)
    return {"w": draws.standard_normal(PARAMETERS).astype(np.float32)}


@client.query("capability")
def capability(message: Message, context: Context) -> Message:
    partition, number = context.node_config["partition-id"], context.node_config["num-partitions"]
    profiles = load_config({"devices": "adsp-ec2"}).devices.profiles
    profile = deal(profiles, partition + 1)[-1]
    answer = Capability(partition, number, 200, 32, profile, software_versions())
    return encode_capability(message, answer)


@client.train("commit")
def commit(message: Message, context: Context) -> Message:
    assignment, arrays, _ = decode_assignment(message)
    update = {name: array.numpy() for name, array in arrays.items()}
    return encode_commit(
        message,
        Commit(assignment.id, assignment.version, assignment.steps or 1, 0.0, 200, 1.0, update, {}),
    )


@client.train()
def echo(message: Message, context: Context) -> Message:
    arrays = message.content["arrays"]
    weights = {name: array.numpy() for name, array in arrays.items()}
    return Message(RecordDict({"arrays": encode(weights)}), reply_to=message)


class Timer(Callback):
    """Notes when the commits are taken in."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_event(self, record, state) -> None:
        """Note the time of a commit."""
        if record["event"] == "commit":
            self.times.append(time.perf_counter())


def rate(times: list[float], warm_up: int) -> float:
    return (len(times) - 1 - warm_up) / (times[-1] - times[warm_up])


def adsp_rate(grid: Grid, workers: int, commits: int) -> float:
    timer = Timer()
    loop = LoopOptions(callbacks=[timer], min_available_nodes=workers)
    strategy = Adsp(check_period=CHECK_PERIOD, commit_rate=RATE, loop=loop)
    strategy.start(grid, encode(payload()), num_rounds=max(1, commits // (RATE * workers)))
    return rate(timer.times, workers)


def echo_rate(grid: Grid, nodes: list[int], commits: int, ordered: bool = False) -> float:
    """Echo; `ordered` takes replies in the order of the messages, as virtual time asks for."""
    arrays = encode(payload())

    def send(node: int) -> str:
        content = RecordDict({"arrays": arrays, "config": ConfigRecord({"lr": 0.1})})
        return next(iter(grid.push_messages([Message(content, node, "train")])))

    is_open = [send(node) for node in nodes]
    times: list[float] = []
    while len(times) < commits:
        replies = list(grid.pull_messages(is_open[:1] if ordered else is_open))
        for reply in replies:
            is_open.remove(reply.metadata.reply_to_message_id)
            times.append(time.perf_counter())
            is_open.append(send(reply.metadata.src_node_id))
        if not replies:
            time.sleep(0.001)
    while is_open:  # so that the next measurement begins with idle actors
        for reply in grid.pull_messages(is_open):
            is_open.remove(reply.metadata.reply_to_message_id)
        time.sleep(0.01)
    return rate(times, len(nodes))


@server.main()
def main(grid: Grid, context: Context) -> None:
    nodes: list[int] = []
    while len(nodes) < 18:
        time.sleep(0.2)
        nodes = sorted(grid.get_node_ids())
    commits = int(context.run_config["commits"])
    echo_rate(grid, nodes, len(nodes) * 4)  # the actors import what they need
    rows = []
    for pair in range(int(context.run_config["pairs"])):
        order = ["adsp", "echo", "ordered_echo"]
        row: dict[str, float] = {"pair": pair}
        for name in order if pair % 2 == 0 else order[::-1]:
            row[f"{name}_per_second"] = (
                adsp_rate(grid, len(nodes), commits)
                if name == "adsp"
                else echo_rate(grid, nodes, commits, ordered=name == "ordered_echo")
            )
        row["ratio"] = row["adsp_per_second"] / row["echo_per_second"]
        row["ratio_ordered"] = row["adsp_per_second"] / row["ordered_echo_per_second"]
        rows.append(row)
    (Path(str(context.run_config["output"])) / "summary.json").write_text(
        json.dumps({"rows": rows})
    )

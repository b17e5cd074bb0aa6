"""What the event loop costs.

``ratio``: commits per second of `Adsp` through ``flwr run`` over those of an app that only echoes,
with as many messages open: 18 nodes, a model of 400 kB, no training, pairs in alternating order,
median. ``ratio_ordered``: the same over an echo that takes its replies in the order of its
messages, as a result that does not depend on the number of actors must. ``commit_ratio``: decoding,
checking, applying and encoding a commit of a model of 11 million parameters over the bare library
calls that this needs.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flower_adsp.strategies import Adsp, LoopOptions
from flower_adsp.strategies.state import FederationState, Worker
from flwr.app import Array

from benchmarks.report import arguments, print_table, write
from flower_adsp.devices import DeviceProfile
from flower_adsp.launch import run_simulation
from flower_adsp.messages import (
    Assignment,
    Commit,
    decode_assignment,
    decode_commit,
    encode_assignment,
    encode_commit,
)
from flower_adsp.testing import InProcessGrid

APP = Path(__file__).resolve().parent / "apps" / "engine"


def resnet18_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of ResNet-18's parameters: 11.7 million."""
    shapes: dict[str, tuple[int, ...]] = {"conv1": (64, 3, 7, 7), "bn1": (64,), "bias1": (64,)}
    width = 64
    for stage, out in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name = f"layer{stage}.{block}"
            shapes |= {
                f"{name}.conv1": (out, width, 3, 3),
                f"{name}.conv2": (out, out, 3, 3),
                **{f"{name}.bn{n}.{kind}": (out,) for n in (1, 2) for kind in ("weight", "bias")},
            }
            if width != out:
                shapes[f"{name}.downsample"] = (out, width, 1, 1)
            width = out
    return {**shapes, "fc.weight": (1000, 512), "fc.bias": (1000,)}


def commit_milliseconds(repetitions: int) -> tuple[float, float]:
    """Return the milliseconds of one commit, and those of the bare library calls."""
    draws = np.random.default_rng(0)
    weights = {
        name: draws.standard_normal(shape).astype(np.float32)
        for name, shape in resnet18_shapes().items()
    }
    assignment = Assignment(0, 0, 0, 0.1, 1, None)
    worker = Worker(0, 1000, DeviceProfile(), num_examples=100)
    strategy = Adsp(loop=LoopOptions())
    strategy.state = FederationState(weights, [worker])

    with InProcessGrid(lambda message, context: message, 1):  # Flower asks who builds messages
        request = encode_assignment(
            1000, strategy.state.encoded(), assignment, {}, "arrays", "config"
        )
        request.metadata.__dict__["_message_id"] = "request"
        decode_assignment(request)
        update = {name: array * 1e-6 for name, array in weights.items()}
        reply = encode_commit(request, Commit(0, 0, 1, 0.0, 100, 1.0, update, {}))
        (record,) = reply.content.array_records.values()

        def ours() -> None:
            strategy.apply(worker, decode_commit(reply, assignment, strategy.state.model))
            strategy.state.model_changed()
            encode_assignment(1000, strategy.state.encoded(), assignment, {}, "arrays", "config")

        def bare() -> None:
            # All is checked before any is applied, and a message holds all arrays at once.
            received = {name: array.numpy() for name, array in record.items()}
            assert all(np.isfinite(array).all() for array in received.values())
            for name, array in received.items():
                array *= 1.0
                weights[name] += array
            del received, array
            _ = [Array(weight) for weight in weights.values()]

        return _medians(ours, bare, repetitions)


def _medians(first: Callable[[], None], second: Callable[[], None], n: int) -> tuple[float, float]:
    taken: list[list[float]] = [[], []]
    for repetition in range(n + 2):
        for index, work in enumerate((first, second)):
            began = time.perf_counter()
            work()
            if repetition >= 2:
                taken[index].append(1000 * (time.perf_counter() - began))
    return statistics.median(taken[0]), statistics.median(taken[1])


def main() -> None:
    options = arguments("What the event loop costs.")
    pairs, commits = (1, 540) if options.quick else (5, 1080)
    ours, bare = commit_milliseconds(10 if options.quick else 40)
    print(f"a commit {ours:.1f} ms, bare {bare:.1f} ms, {ours / bare:.3f} times")
    with tempfile.TemporaryDirectory() as folder:
        settings = {"output": folder, "pairs": pairs, "commits": commits}
        rows = run_simulation(APP, settings, num_supernodes=18, num_actors=2, quiet=True)["rows"]
    ratio = statistics.median(row["ratio"] for row in rows)
    ordered = statistics.median(row["ratio_ordered"] for row in rows)
    print_table(rows, list(rows[0]))
    print(f"ratio {ratio:.3f}, over an ordered echo {ordered:.3f}")
    write(
        options.json,
        seeds=[0],
        rows=rows,
        ratio=ratio,
        ratio_ordered=ordered,
        commit_ms=ours,
        bare_ms=bare,
        commit_ratio=ours / bare,
    )


if __name__ == "__main__":
    main()

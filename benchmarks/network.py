"""The network's part: packed trees, slices by priority, and what codecs do to the time to a loss.

Trees: rates on the link tables of Blink's paper and on random graphs, against exact optima. Slices:
iterations of synchronous SGD in the model of `flower_adsp.network.slices`, at the bandwidths and
with the models of P3's paper; layers and their arithmetic are torchvision's, and the speed of a
worker is assumed: 5.3 TFLOP/s, a Quadro P4000's peak, at an efficiency that is stated. End to end:
virtual time until `mnist-cnn` has come to a loss, over links of 10, 100 and 1,000 Mbit/s.
"""

import itertools
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.report import arguments, median, print_table, write
from flower_adsp.client_app import app
from flower_adsp.config import load_config
from flower_adsp.experiment import run_experiment
from flower_adsp.network.slices import Layer, Link, iteration_seconds
from flower_adsp.network.trees import best_rate, pack_trees, private_links, shared_cards
from flower_adsp.testing import InProcessGrid

# NVLinks between the eight GPUs of a DGX-1 with V100s; with P100s each pair has one.
DGX_1V = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
PEAK_FLOPS, EFFICIENCY = 5.3e12, 0.6
BATCH = 32
# Model, Gbit/s, and the throughput that the paper's P3 gains over its baseline, at most.
SHAPES = (("vgg19", 15.0, 0.66), ("resnet50", 4.0, 0.26), ("lstm", 4.0, 0.38))
NODES, TARGET = 6, 0.3


# ------------------------------------------------------------------------------------------- trees


def both_ways(links: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    return links | {(b, a): capacity for (a, b), capacity in links.items()}


def random_links(seed: int) -> tuple[int, dict[tuple[int, int], float]]:
    """Return a root, and links with their rates over which it reaches up to eight others."""
    numbers = np.random.default_rng(seed)
    nodes = int(numbers.integers(2, 10))
    order = [int(node) for node in numbers.permutation(nodes)]
    links = {(order[int(numbers.integers(i))], order[i]): 0.0 for i in range(1, nodes)}
    for pair in itertools.permutations(range(nodes), 2):
        if numbers.random() < 0.4:
            links[pair] = 0.0
    return order[0], {edge: float(numbers.choice([1, 2, 5, 10])) for edge in links}


def random_private(seed: int) -> tuple[int, Any]:
    root, links = random_links(seed)
    return root, private_links(1 + max(max(edge) for edge in links), links)


def random_shared(seed: int) -> tuple[int, Any]:
    numbers = np.random.default_rng(seed)
    nodes = int(numbers.integers(2, 10))
    up, down = (numbers.choice([10.0, 50.0, 100.0], nodes).tolist() for _ in range(2))
    return 0, shared_cards(up, down)


def packing_row(name: str, graph: Any) -> dict[str, Any]:
    """Return what packing trees from node 0 of a graph comes to."""
    began = time.monotonic()
    packing = pack_trees(graph, 0)
    seconds = time.monotonic() - began
    return {
        "graphs": name,
        "rate": packing.rate,
        "trees": len(packing.trees),
        "share_of_optimum": packing.rate / best_rate(graph, 0),
        "seconds": seconds,
    }


def tree_rows(quick: bool) -> list[dict[str, Any]]:
    tables = (("DGX-1V", DGX_1V), ("DGX-1P", dict.fromkeys(DGX_1V, 1.0)))
    rows = [
        packing_row(
            name, private_links(8, both_ways({edge: float(c) for edge, c in links.items()}))
        )
        for name, links in tables
    ]
    count = 10 if quick else 100
    for name, draw in (("private links", random_private), ("shared cards", random_shared)):
        shares, surplus, began = [], [], time.monotonic()
        for seed in range(count):
            root, graph = draw(seed)
            packing = pack_trees(graph, root)
            shares.append(packing.rate / best_rate(graph, root))
            surplus.append(len(packing.trees) - graph.num_nodes)
        rows.append(
            {
                "graphs": f"{count} random, {name}",
                "share_of_optimum": min(shares),
                "more_trees_than_nodes": max(surplus),
                "seconds": (time.monotonic() - began) / count,
            }
        )
    if not quick:
        numbers = np.random.default_rng(0)
        up, down = (numbers.choice([10.0, 50.0, 100.0], 32).tolist() for _ in range(2))
        rows.append(packing_row("32 nodes, shared cards", shared_cards(up, down)))
    return rows


# ------------------------------------------------------------------------------------------ slices


def torchvision_layers(name: str) -> list[tuple[int, float]]:
    """Return the parameters and the MACs of each convolution and linear layer, for one image."""
    import torchvision

    with torch.device("meta"):
        model: nn.Module = getattr(torchvision.models, name)(weights=None).eval()
    found: list[tuple[int, float]] = []

    def note(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        weight = module.weight
        places = output[0, 0].numel() if isinstance(module, nn.Conv2d) else 1
        bias = module.bias.numel() if module.bias is not None else 0
        found.append((weight.numel() + bias, float(weight.numel() * places)))

    handles = [
        module.register_forward_hook(note)
        for module in model.modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    with torch.no_grad():
        model(torch.empty(1, 3, 224, 224, device="meta"))
    for handle in handles:
        handle.remove()
    return found


def lstm_layers() -> list[tuple[int, float]]:
    """Return the same of a translation model as Sockeye's: two layers of 512 on each side.

    English to Vietnamese of IWSLT 2015 has vocabularies of 17,191 and 7,709 words; a sentence is
    taken to have 25.
    """
    words, width = 25, 512
    cell = 4 * width * (2 * width + 1)
    lookup = 0.0
    return [
        (17_191 * width, lookup),
        (cell, float(words * cell)),
        (cell, float(words * cell)),
        (7_709 * width, lookup),
        (cell, float(words * cell)),
        (cell, float(words * cell)),
        (7_709 * width, float(words * 7_709 * width)),
    ]


def slice_rows() -> list[dict[str, Any]]:
    rows = []
    for name, gbits, published in SHAPES:
        counted = lstm_layers() if name == "lstm" else torchvision_layers(name)
        layers = [
            Layer(parameters, seconds, 2 * seconds)
            for parameters, macs in counted
            for seconds in [2 * macs * BATCH / (PEAK_FLOPS * EFFICIENCY)]
        ]
        for rate in sorted({gbits, 1.0, 10.0}):
            link = Link(rate * 1000, rate * 1000)
            whole = iteration_seconds(layers, link, "whole")
            layered = iteration_seconds(layers, link, "fifo", None)
            sliced = iteration_seconds(layers, link, "fifo")
            p3 = iteration_seconds(layers, link, "p3")
            rows.append(
                {
                    "model": name,
                    "gbits": rate,
                    "compute_s": sum(each.forward_s + each.backward_s for each in layers),
                    "whole_s": whole,
                    "fifo_layers_s": layered,
                    "fifo_slices_s": sliced,
                    "p3_s": p3,
                    "gain_over_layers": layered / p3 - 1,
                    "gain_over_slices": sliced / p3 - 1,
                    "published_gain": published if rate == gbits else None,
                }
            )
    return rows


# -------------------------------------------------------------------------------------- end to end


def seconds_to_loss(strategy: str, settings: str, mbps: float, seed: int) -> dict[str, Any]:
    """Return when the loss is first at the target."""
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "strategy": strategy,
            "task": "mnist-cnn",
            "devices": "uniform",
            "seed": seed,
            "output": folder,
            "tracking.progress": "off",
            "tracking.report": "off",
            "overrides": f"run.target_loss={TARGET} run.smoothing_seconds=1 run.evaluate_every=1 "
            "run.save_every=null run.num_rounds=100000 run.max_seconds=600 "
            f"train.learning_rate=0.1 {settings}",
        }
        links = {"up_mbps": mbps, "down_mbps": mbps, "seconds_per_sample": 0.003}
        with InProcessGrid(app, NODES, config, node_configs=[links] * NODES) as grid:
            summary = run_experiment(grid, load_config(config))
    return {
        "seconds": summary["seconds_to_target"],
        "bytes_up": summary["bytes_up"],
        "compute_share": statistics.fmean(row["computing"] for row in summary["devices"]),
    }


def end_to_end_rows(seeds: list[int], quick: bool) -> list[dict[str, Any]]:
    strategies = {
        "bsp": "strategy.local_steps=1",
        "dsparse": "strategy.local_steps=10",
        "adsp": "strategy.check_period=20 strategy.commit_rate=8",
    }
    variants = {
        "whole, float32": "",
        "p3, float32": "network.schedule=p3",
        "whole, float16": "network.codec=float16",
        "whole, int8": "network.codec=int8",
    }
    cells = list(
        itertools.product(strategies, (10.0,) if quick else (10.0, 100.0, 1000.0), variants)
    )
    jobs = [
        (strategy, f"{strategies[strategy]} {variants[variant]}", mbps, seed)
        for strategy, mbps, variant in cells
        for seed in seeds
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(seconds_to_loss, *zip(*jobs, strict=True)))
    rows = []
    for index, (strategy, mbps, variant) in enumerate(cells):
        runs = found[index * len(seeds) : (index + 1) * len(seeds)]
        seconds = [each["seconds"] for each in runs]
        rows.append(
            {
                "strategy": strategy,
                "mbps": mbps,
                "variant": variant,
                "seconds": seconds,
                "seconds_median": median(seconds),
                "bytes_up": statistics.median(each["bytes_up"] for each in runs),
                "compute_share": statistics.median(each["compute_share"] for each in runs),
            }
        )
    return rows


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    trees = tree_rows(options.quick)
    print_table(trees, ["graphs", "rate", "trees", "share_of_optimum", "seconds"])
    slices = slice_rows()
    print_table(slices, [*slices[0]])
    content: dict[str, Any] = {"trees": trees, "slices": slices, "efficiency": EFFICIENCY}
    seeds = [0] if options.quick else [0, 1, 2]
    write(options.json, seeds, **content)
    rows = end_to_end_rows(seeds, options.quick)
    print_table(rows, [*rows[0]])
    write(options.json, seeds, **content, rows=rows, target_loss=TARGET, nodes=NODES)


if __name__ == "__main__":
    main()

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flower_adsp.config import choices, load_config
from flower_adsp.devices import deal, heterogeneity
from flower_adsp.errors import ConfigError, DataError
from flower_adsp.tasks import Task, cifar
from flower_adsp.tasks.build import build_task
from flower_adsp.tasks.in_memory import stratified
from flower_adsp.tasks.svm import CancerSvm, MnistSvm


@pytest.mark.parametrize(
    ("name", "rate", "steps", "accuracy"),
    [("mnist-lstm", 0.5, 250, 0.6), ("mnist-svm", 0.05, 150, 0.8), ("cancer-svm", 0.05, 60, 0.9)],
)
def test_a_task_is_learnt(name: str, rate: float, steps: int, accuracy: float) -> None:
    torch.set_num_threads(1)
    task = build_task(load_config({"task": name}))
    model = task.build_model()
    data: Any = task.train_data(0, 1)
    before = task.metrics(model, task.held_out_data("validation"))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    draws = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(data), (task.batch_size,), generator=draws)
        optimizer.zero_grad()
        task.loss(model, tuple(tensor[rows] for tensor in data.tensors)).backward()
        optimizer.step()
    after = task.metrics(model, task.held_out_data("validation"))
    assert after["loss"] < 0.8 * before["loss"]
    assert after["accuracy"] > accuracy


@pytest.mark.parametrize("name", choices("task"))
def test_the_initial_weights_follow_from_the_seed(name: str) -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        task = build_task(load_config({"task": name, "seed": seed}))
        assert isinstance(task, Task)
        return list(task.build_model().state_dict().values())

    assert all(torch.equal(a, b) for a, b in zip(weights(0), weights(0), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(0), weights(1), strict=True))


def test_building_a_model_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    build_task(load_config({"task": "mnist-svm"})).build_model()
    assert torch.equal(torch.rand(1), expected)


def test_the_loss_of_an_svm_is_its_hinge_loss_and_its_norm() -> None:
    task = CancerSvm(regularization=0.5)
    model = task.build_model()
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.fill_(0.25)
    inputs = torch.stack([torch.ones(30), -torch.ones(30)])
    # Scores 3.25 and −2.75; classes 0 and 0, that is y = −1: hinge 4.25 and 0.
    loss = task.loss(model, (inputs, torch.tensor([0, 0])))
    assert loss.item() == pytest.approx((4.25 + 0) / 2 + 0.25 * 30 * 0.01)
    assert task.predictions(model(inputs)).tolist() == [1, 0]


def test_the_mean_loss_does_not_depend_on_how_evaluation_is_cut() -> None:
    task = MnistSvm()
    model = task.build_model()
    whole = task.metrics(model, task.held_out_data("test"))
    task.evaluation_batch = 130
    cut = task.metrics(model, task.held_out_data("test"))
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert cut["accuracy"] == whole["accuracy"]


def test_cancer_data_is_standardised_by_its_training_part() -> None:
    task = CancerSvm()
    inputs = task.load()["train"].tensors[0]
    np.testing.assert_allclose(inputs.mean(dim=0), np.zeros(30), atol=1e-5)
    np.testing.assert_allclose(inputs.std(dim=0), np.ones(30), atol=1e-5)
    assert [len(task.load()[split]) for split in ("train", "validation", "test")] == [455, 57, 57]


def test_cancer_data_is_laid_out_evenly_only() -> None:
    with pytest.raises(ConfigError, match=r"task\.partitioning = 'dirichlet'.*iid"):
        CancerSvm(partitioning="dirichlet")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "mnist-lstm", "overrides": "task.hidden=0"}, "task.hidden = 0"),
        ({"task": "mnist-svm", "overrides": "task.regularization=-1"}, "task.regularization = -1"),
        ({"task": "mnist-cnn", "overrides": "task.crop_padding=-1"}, "task.crop_padding = -1"),
        ({"task": "mnist-resnet", "overrides": "task.crop_padding=1.5"}, "task.crop_padding = 1.5"),
        ({"task": "mnist-svm", "overrides": "task.crop_padding=2"}, "crop_padding"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_task(load_config(settings))


def test_splits_are_disjoint_and_in_proportion() -> None:
    targets = np.arange(100) % 4
    parts = stratified(np.arange(100.0)[:, None], targets, validation=20, test=8)
    rows = [int(row) for part in parts.values() for row in part.tensors[0]]
    assert sorted(rows) == list(range(100))
    for part in parts.values():
        assert len(set(np.bincount(part.tensors[1]))) == 1
    assert set(stratified(np.zeros((8, 1)), np.arange(8) % 2, validation=2)) == {
        "train",
        "validation",
    }


def test_cifar_that_cannot_be_had_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import CIFAR10

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    settings = {"task": "cifar10-cnn", "overrides": f"task.data_folder={tmp_path}"}
    with pytest.raises(DataError) as caught:
        build_task(load_config(settings)).train_data(0, 2)
    for part in ("task.data_folder", str(tmp_path), "cifar-10-python.tar.gz"):
        assert part in str(caught.value)


def test_cifar_images_become_standardised_tensors() -> None:
    images = np.zeros((2, 32, 32, 3), np.uint8)
    images[1, 4, 5] = (255, 0, 128)
    tensors = cifar.standardised(images)
    assert (tensors.shape, tensors.dtype) == ((2, 3, 32, 32), np.float32)
    assert tensors[1, 0, 4, 5] == pytest.approx((1 - 0.4914) / 0.2470)
    assert tensors[1, 2, 4, 5] == pytest.approx((128 / 255 - 0.4465) / 0.2616)


def test_the_cifar_network_is_that_of_the_tutorial() -> None:
    model = cifar.Cifar10Cnn().build_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 148_298
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    first, second = (layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d))
    head = next(layer for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    for layer, deviation, bias in ((first, 0.05, 0.0), (second, 0.05, 0.1), (head, 1 / 192, 0.0)):
        # A normal cut at two deviations has 0.88 of its deviation left.
        assert float(layer.weight.detach().abs().max()) <= 2 * deviation
        assert float(layer.weight.detach().std()) == pytest.approx(0.88 * deviation, rel=0.03)
        assert layer.bias.tolist() == pytest.approx([bias] * len(layer.bias))


def test_the_cifar_network_pools_and_normalises_as_the_tutorial() -> None:
    layers = list(cifar.Cifar10Cnn().build_model().children())
    pool = next(layer for layer in layers if isinstance(layer, torch.nn.MaxPool2d))
    rows = torch.arange(32.0).reshape(1, 1, 32, 1).expand(1, 1, 32, 32)
    # SAME padding with window 3 and stride 2 pads at the end alone: windows start at 0, 2, ... 30.
    assert pool(rows)[0, 0, :, 0].tolist() == [*range(2, 32, 2), 31]
    norm = next(layer for layer in layers if isinstance(layer, torch.nn.LocalResponseNorm))
    values = torch.rand(1, 64, 1, 1, generator=torch.Generator().manual_seed(0)) * 100
    squares = values.flatten().square()
    for channel in (0, 10, 63):  # x / (1 + 0.001/9 Σ x²)^0.75 over four neighbours on each side
        total = float(squares[max(channel - 4, 0) : channel + 5].sum())
        expected = float(values[0, channel]) / (1 + 0.001 / 9 * total) ** 0.75
        assert float(norm(values)[0, channel]) == pytest.approx(expected, rel=1e-5)


def test_placed_cifar_files_are_read_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import CIFAR10

    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (6000, 3072), dtype=np.uint8)
    labels = (np.arange(6000) % 10).tolist()
    entries = {
        "data_batch_1": {"data": pixels, "labels": labels},
        "test_batch": {"data": pixels[:30], "labels": labels[:30]},
        "batches.meta": {"label_names": list("abcdefghij")},
    }
    sums = {}
    for name, entry in entries.items():
        content = pickle.dumps(entry)
        (folder / name).write_bytes(content)
        sums[name] = hashlib.md5(content, usedforsecurity=False).hexdigest()
    # torchvision knows the sums of the real files.
    monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", sums["data_batch_1"]]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
    splits = cifar.load_cifar10(str(tmp_path))
    assert {name: len(part) for name, part in splits.items()} == {
        "train": 1000,
        "validation": 5000,
        "test": 30,
    }
    for part in splits.values():
        assert len(set(np.bincount(part.tensors[1]).tolist())) == 1
    expected = cifar.standardised(pixels[:30].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(splits["test"].tensors[0], expected)


# ---------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", [name for name in choices("devices") if name != "measured"])
def test_a_preset_says_its_source_and_can_be_used(name: str) -> None:
    devices = load_config({"devices": name}).devices
    assert len(devices.source) > 20
    kinds = deal(devices.profiles, sum(count for _, count in devices.profiles))
    assert heterogeneity([kind.speed(32) for kind in kinds]) >= 1


@pytest.mark.parametrize(
    ("name", "workers", "degree"),
    [
        ("adsp-ec2", 18, 37 / 18),
        ("adsp-ec2-36", 36, 37 / 18),
        ("adsp-ec2-h145", 18, 1.45),
        ("adsp-ec2-h200", 18, 2.0),
        ("adsp-ec2-h260", 18, 2.6),
        ("adsp-ec2-h320", 18, 3.2),
    ],
)
def test_the_ec2_presets_have_their_degree(name: str, workers: int, degree: float) -> None:
    profiles = load_config({"devices": name}).devices.profiles
    kinds = deal(profiles, sum(count for _, count in profiles))
    assert len(kinds) == workers
    assert heterogeneity([kind.speed(32) for kind in kinds]) == pytest.approx(degree, abs=1e-3)


def test_the_lognormal_preset_has_the_quantiles_that_it_names() -> None:
    from statistics import NormalDist

    profiles = load_config({"devices": "lognormal"}).devices.profiles
    speeds = [profile.seconds_per_sample for profile, _ in profiles]
    for index, seconds in enumerate(sorted(speeds)):
        quantile = np.exp(1 + 0.6 * NormalDist().inv_cdf((index + 0.5) / 20))
        assert seconds == pytest.approx(0.005 * quantile, rel=1e-3)
    assert [count for _, count in profiles] == [1] * 20


@pytest.mark.parametrize("number", [4, 10, 18])
def test_few_devices_are_spread_over_the_lognormal_preset(number: int) -> None:
    profiles = load_config({"devices": "lognormal"}).devices.profiles
    speeds = [kind.speed(32) for kind in deal(profiles, number)]
    assert heterogeneity(speeds) > 3


@pytest.mark.parametrize("name", ["overhead-0", "overhead-2", "overhead-5", "overhead-10"])
def test_the_networks_of_fixed_overhead(name: str) -> None:
    assert load_config({"network": name}).network.overhead_s == float(name.split("-")[1])

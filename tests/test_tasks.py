import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_adsp.errors import ConfigError, DataError
from flower_adsp.seeding import stream
from flower_adsp.tasks import Task
from flower_adsp.tasks.batches import BatchStream, own_split, random_crop
from flower_adsp.tasks.images import DigitsMlp, MnistCnn, load_digits, load_mnist
from flower_adsp.tasks.partition import partition_indices
from tests.toy import Quadratic


def digits_stream(size: int, batch_size: int, seed: int = 0) -> BatchStream:
    data = torch.utils.data.TensorDataset(torch.arange(1000))
    return BatchStream(data, np.arange(100, 100 + size), batch_size, seed, partition_id=3)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 30))
def test_a_stream_of_batches_is_one_permutation_after_another(
    size: int, batch_size: int, first: int
) -> None:
    stream = digits_stream(size, batch_size)
    epochs = 3
    steps = -(-size * epochs // batch_size)
    rows = np.concatenate([stream.rows(step) for step in range(steps)])
    for epoch in range(epochs):
        part = rows[epoch * size : (epoch + 1) * size]
        assert sorted(part) == list(range(100, 100 + size))
    # A batch depends on its number alone, not on which were asked for before.
    np.testing.assert_array_equal(digits_stream(size, batch_size).rows(first), stream.rows(first))


def test_batches_collate_tensors_and_other_data_alike() -> None:
    tensors = digits_stream(10, 4)
    listed = BatchStream([(row,) for row in torch.arange(1000)], tensors.indices, 4, 0, 3)  # type: ignore[arg-type]
    torch.testing.assert_close(tensors.batch(2)[0], listed.batch(2)[0])
    assert tensors.steps_per_epoch == 3


def test_streams_differ_by_seed_and_partition() -> None:
    rows = digits_stream(50, 50).rows(0)
    assert (digits_stream(50, 50, seed=1).rows(0) != rows).any()


def test_a_random_crop_is_the_image_shifted_with_its_border_repeated() -> None:
    images = torch.from_numpy(stream(0, "images").random((40, 2, 5, 7)))
    crops = random_crop(images, 2, stream(0, "crop"))
    assert crops.shape == images.shape
    places = set()
    for image, crop in zip(images.numpy(), crops.numpy(), strict=True):
        padded = np.pad(image, ((0, 0), (2, 2), (2, 2)), mode="edge")
        found = {
            (top, left)
            for top in range(5)
            for left in range(5)
            if (padded[:, top : top + 5, left : left + 7] == crop).all()
        }
        assert len(found) == 1
        places |= found
    assert {top for top, _ in places} == {left for _, left in places} == set(range(5))


def test_an_augmented_batch_depends_on_its_step_alone() -> None:
    task = MnistCnn(batch_size=4, crop_padding=2)
    data = task.train_data(0, 7)
    rows = np.arange(20)

    def augmented() -> BatchStream:
        return BatchStream(data, rows, 4, 0, 0, task.augment)

    plain, shifted = BatchStream(data, rows, 4, 0, 0), augmented()
    one, other = (s.batch(3) for s in (plain, shifted))
    assert (one[1] == other[1]).all()
    assert (one[0] != other[0]).any()
    torch.testing.assert_close(augmented().batch(3), other, rtol=0, atol=0)
    # In the next epoch the same example is at another place.
    before, again = (
        {
            row: image
            for i in steps
            for row, image in zip(shifted.rows(i), shifted.batch(i)[0], strict=True)
        }
        for steps in (range(5), [8])
    )
    assert any((image != before[row]).any() for row, image in again.items())


def test_images_stay_as_they_are_without_padding() -> None:
    task = MnistCnn()
    batch = BatchStream(task.train_data(0, 7), np.arange(20), 4, 0, 0).batch(0)
    assert task.augment(batch, stream(0)) is batch


@given(st.integers(1, 300))
def test_own_split_is_a_partition_of_the_examples(size: int) -> None:
    train, held = own_split(size, seed=1, partition_id=2)
    if size == 1:
        assert list(train) == list(held) == [0]
    else:
        assert sorted([*train, *held]) == list(range(size))
        assert len(held) == max(size // 10, 1)


def test_mnist_is_split_in_proportion_and_shuffled() -> None:
    splits = load_mnist()
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 4000,
        "validation": 500,
        "test": 500,
    }
    for split in splits.values():
        images, labels = split.tensors
        assert images.shape[1:] == (1, 28, 28)
        assert (torch.bincount(labels) == len(labels) // 10).all()
        assert not (labels.diff() >= 0).all()
    assert abs(float(splits["train"].tensors[0].mean())) < 0.1


def test_digits_are_split_in_proportion() -> None:
    splits = load_digits()
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 1437,
        "validation": 180,
        "test": 180,
    }
    assert float(splits["train"].tensors[0].max()) <= 1


@pytest.mark.parametrize("kind", [MnistCnn, DigitsMlp])
def test_tasks_keep_to_the_protocol(kind: type[MnistCnn]) -> None:
    task = kind(seed=4)
    assert isinstance(task, Task)
    assert isinstance(Quadratic(), Task)
    first, second = task.build_model().state_dict(), task.build_model().state_dict()
    other = kind(seed=5).build_model().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    metrics = task.metrics(task.build_model(), task.held_out_data("validation"))
    assert metrics["loss"] == pytest.approx(np.log(10), rel=0.1)
    assert 0 <= metrics["accuracy"] < 0.4


def test_building_a_model_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    MnistCnn().build_model()
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("scheme", ["iid", "dirichlet"])
def test_partitions_are_disjoint_complete_and_the_same_each_time(scheme: str) -> None:
    labels = np.repeat(np.arange(10), 40)

    def parts(seed: int) -> list[list[int]]:
        return [
            partition_indices(labels, part, 18, scheme, 0.3, seed).tolist() for part in range(18)
        ]

    rows = [row for part in parts(0) for row in part]
    assert sorted(rows) == list(range(400))
    assert parts(0) == parts(0)
    assert parts(0) != parts(1)


def test_equal_parts_are_those_of_flower_datasets() -> None:
    from datasets import Dataset
    from flwr_datasets.partitioner import IidPartitioner

    labels = np.repeat(np.arange(10), 41)
    order = stream(3, "partition").permutation(len(labels))
    partitioner = IidPartitioner(7)
    partitioner.dataset = Dataset.from_dict({"row": order})
    for part in range(7):
        rows = partition_indices(labels, part, 7, "iid", 0.3, 3).tolist()
        assert rows == sorted(partitioner.load_partition(part)["row"])


def test_a_small_alpha_makes_partitions_unequal() -> None:
    labels = np.repeat(np.arange(10), 40)

    def largest_share(alpha: float) -> float:
        shares = []
        for part in range(10):
            rows = partition_indices(labels, part, 10, "dirichlet", alpha, 0)
            shares.append(np.bincount(labels[rows]).max() / len(rows))
        return float(np.mean(shares))

    assert largest_share(0.1) > largest_share(100.0) + 0.2


def test_what_cannot_be_partitioned_is_named() -> None:
    labels = np.arange(10)
    with pytest.raises(DataError, match=r"num-partitions = 11 .*no data.*at most 10"):
        partition_indices(labels, 0, 11, "iid", 1.0, 0)
    with pytest.raises(DataError, match="partition-id = 5; allowed: 0 to 4"):
        partition_indices(labels, 5, 5, "iid", 1.0, 0)
    with pytest.raises(ConfigError, match=r"task\.partitioning 'random'"):
        MnistCnn(partitioning="random")
    with pytest.raises(ConfigError, match=r"task.alpha = 0"):
        MnistCnn(alpha=0)
    with pytest.raises(ConfigError, match=r"task.batch_size = 0"):
        MnistCnn(batch_size=0)


def test_a_device_s_examples_come_from_its_partition() -> None:
    task = DigitsMlp(seed=2)
    parts = [task.train_data(part, 5) for part in range(5)]
    assert sum(len(part) for part in parts) == 1437
    assert max(map(len, parts)) - min(map(len, parts)) <= 1

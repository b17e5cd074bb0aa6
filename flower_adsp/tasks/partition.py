"""Local data laid over devices, as Flower Datasets' partitioners do it."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flower_adsp.errors import DataError, require, unknown
from flower_adsp.seeding import integer_seed, stream

SCHEMES = ("iid", "dirichlet")


def check_partitioning(scheme: str, alpha: float) -> None:
    """Check the settings of a partitioning, before any data is read."""
    if scheme not in SCHEMES:
        raise unknown("task.partitioning", scheme, SCHEMES)
    require(alpha > 0, "task.alpha", alpha, "above 0")


def partition_indices(
    labels: NDArray[np.integer],
    partition_id: int,
    num_partitions: int,
    scheme: str,
    alpha: float,
    seed: int,
) -> NDArray[np.int64]:
    """Return the rows of one device.

    Parameters
    ----------
    labels : NDArray[np.integer]
        Class of each row, of shape ``(rows,)``.
    partition_id, num_partitions : int
        Which device, of how many.
    scheme : str
        ``iid`` or ``dirichlet``.
    alpha : float
        Concentration of the Dirichlet distribution over devices that each class draws from; the
        smaller, the more unequal.
    seed : int
        Seed of the partitioning.

    Raises
    ------
    DataError
        If there is no such partition, or the data cannot be spread over so many devices.
    """
    if not 0 <= partition_id < num_partitions:
        raise DataError(f"partition-id = {partition_id}; allowed: 0 to {num_partitions - 1}")
    if num_partitions > len(labels):
        raise DataError(
            f"num-partitions = {num_partitions} leaves partitions with no data; allowed: at most "
            f"{len(labels)}, the number of training examples"
        )
    parts = _partitions(labels.tobytes(), str(labels.dtype), num_partitions, scheme, alpha, seed)
    return parts[partition_id]


@lru_cache(maxsize=4)
def _partitions(
    labels: bytes, dtype: str, num_partitions: int, scheme: str, alpha: float, seed: int
) -> list[NDArray[np.int64]]:
    classes = np.frombuffer(labels, dtype)
    order = stream(seed, "partition").permutation(len(classes))
    if scheme == "iid":  # what Flower Datasets' `IidPartitioner` does, without importing it
        return [np.sort(part) for part in np.array_split(order, num_partitions)]
    # Imported late: the import takes seconds.
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        num_partitions,
        partition_by="label",
        alpha=alpha,
        min_partition_size=1,
        seed=integer_seed(seed, "partition"),
    )
    partitioner.dataset = Dataset.from_dict({"label": classes[order], "row": order})
    try:
        return [
            np.sort(np.asarray(partitioner.load_partition(index)["row"], dtype=np.int64))
            for index in range(num_partitions)
        ]
    except ValueError as error:
        raise DataError(
            f"task.partitioning = {scheme!r} with task.alpha = {alpha} cannot spread "
            f"{len(classes)} examples over {num_partitions} devices: {error}"
        ) from None

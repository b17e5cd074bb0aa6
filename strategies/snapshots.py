"""Models of earlier versions, as long as somebody trains from them."""

from collections import Counter

import numpy as np

from flower_adsp.arrays import Weights


class Snapshots:
    """Keeps one copy of the model for each version in flight."""

    def __init__(self) -> None:
        self._models: dict[int, Weights] = {}
        self._holders: Counter[int] = Counter()
        self._held: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of models kept."""
        return len(self._models)

    def hold(self, worker: int, version: int, model: Weights) -> None:
        """Keep `model`, of `version`, for a worker that starts from it."""
        self.release(worker)
        if version not in self._models:
            self._models[version] = {name: np.copy(array) for name, array in model.items()}
        self._holders[version] += 1
        self._held[worker] = version

    def of(self, worker: int) -> Weights:
        """Return the model that a worker started from."""
        return self._models[self._held[worker]]

    def release(self, worker: int) -> None:
        """Let go of a worker's model; it is dropped when nobody else holds it."""
        version = self._held.pop(worker, None)
        if version is None:
            return
        self._holders[version] -= 1
        if not self._holders[version]:
            del self._holders[version], self._models[version]

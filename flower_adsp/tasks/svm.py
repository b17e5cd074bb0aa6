"""Linear support vector machines, trained by subgradients of the hinge loss.

Both minimise the mean hinge loss plus (λ/2)‖w‖², the bias left out of the norm; ``loss`` among
their metrics is this same function.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flower_adsp.errors import require
from flower_adsp.tasks.images import load_mnist
from flower_adsp.tasks.in_memory import InMemoryTask, stratified


@lru_cache(maxsize=1)
def load_cancer() -> dict[str, TensorDataset]:
    """Return 455 / 57 / 57 of scikit-learn's 569 breast cancer records.

    Returns
    -------
    dict[str, TensorDataset]
        ``train``, ``validation`` and ``test``: 30 features of shape ``(n, 30)``, float32,
        standardised by the training records; class numbers of shape ``(n,)``, 1 if benign.
    """
    from sklearn.datasets import load_breast_cancer

    features, targets = load_breast_cancer(return_X_y=True)
    splits = stratified(
        features.astype(np.float32), targets.astype(np.int64), validation=57, test=57
    )
    train = splits["train"].tensors[0]
    mean, scale = train.mean(dim=0), train.std(dim=0)
    return {
        name: TensorDataset((split.tensors[0] - mean) / scale, split.tensors[1])
        for name, split in splits.items()
    }


class LinearSvm(InMemoryTask):
    """A linear SVM.

    Parameters
    ----------
    seed, batch_size, partitioning, alpha
        As for `InMemoryTask`.
    regularization : float (default: 0.001)
        λ.
    """

    def __init__(
        self,
        seed: int = 0,
        batch_size: int = 32,
        partitioning: str = "iid",
        alpha: float = 0.3,
        regularization: float = 1e-3,
    ) -> None:
        super().__init__(seed, batch_size, partitioning, alpha)
        require(regularization >= 0, "task.regularization", regularization, "at least 0")
        self.regularization = regularization

    def hinge(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean hinge loss."""
        raise NotImplementedError

    def criterion(self, model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean hinge loss plus (λ/2)‖w‖²."""
        squares = [weight.square().sum() for weight in model.parameters() if weight.dim() > 1]
        return self.hinge(outputs, targets) + self.regularization / 2 * torch.stack(squares).sum()


class MnistSvm(LinearSvm):
    """Handwritten digits by a linear SVM of ten classes.

    The hinge loss is that of Weston and Watkins, Σ_{j≠y} max(0, 1 − s_y + s_j), divided by the
    number of classes, as in PyTorch's ``multi_margin_loss``.
    """

    def load(self) -> dict[str, TensorDataset]:
        """Return the MNIST subset."""
        return load_mnist()

    def layers(self) -> nn.Module:
        """Return one linear layer from pixels to scores."""
        return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))

    def hinge(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean multi-class hinge loss."""
        return nn.functional.multi_margin_loss(outputs, targets)


class CancerSvm(LinearSvm):
    """Breast cancer records by a linear SVM of two classes, max(0, 1 − y s) with y = ±1.

    The data is small, and laid over devices evenly only.
    """

    def __init__(
        self,
        seed: int = 0,
        batch_size: int = 8,
        partitioning: str = "iid",
        regularization: float = 1e-3,
    ) -> None:
        require(partitioning == "iid", "task.partitioning", partitioning, "iid, for a set so small")
        super().__init__(seed, batch_size, partitioning, regularization=regularization)

    def load(self) -> dict[str, TensorDataset]:
        """Return the breast cancer records."""
        return load_cancer()

    def layers(self) -> nn.Module:
        """Return one linear layer from features to a score."""
        return nn.Linear(30, 1)

    def hinge(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean hinge loss of scores of shape ``(n, 1)``."""
        signs = 2 * targets - 1
        return (1 - signs * outputs.squeeze(1)).clamp(min=0).mean()

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return 1 where the score is positive."""
        return (outputs.squeeze(1) > 0).long()

"""A recurrent task."""

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flower_adsp.errors import require
from flower_adsp.tasks.images import load_mnist
from flower_adsp.tasks.in_memory import InMemoryTask


class RowLstm(nn.Module):
    """Reads an image row by row, and classifies by the last hidden state.

    Parameters
    ----------
    hidden : int
        Units of the LSTM.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(28, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape ``(n, 10)`` for images of shape ``(n, 1, 28, 28)``."""
        _, (state, _) = self.lstm(images.squeeze(1))
        logits: Tensor = self.head(state[-1])
        return logits


class MnistLstm(InMemoryTask):
    """Handwritten digits as sequences of 28 rows of 28 pixels, by one LSTM layer.

    Parameters
    ----------
    seed, batch_size, partitioning, alpha
        As for `InMemoryTask`.
    hidden : int (default: 64)
        Units of the LSTM.
    """

    def __init__(
        self,
        seed: int = 0,
        batch_size: int = 32,
        partitioning: str = "iid",
        alpha: float = 0.3,
        hidden: int = 64,
    ) -> None:
        super().__init__(seed, batch_size, partitioning, alpha)
        require(hidden >= 1, "task.hidden", hidden, "at least 1")
        self.hidden = hidden

    def load(self) -> dict[str, TensorDataset]:
        """Return the MNIST subset."""
        return load_mnist()

    def layers(self) -> nn.Module:
        """Return the LSTM and its head."""
        return RowLstm(self.hidden)

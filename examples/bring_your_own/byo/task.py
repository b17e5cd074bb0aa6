"""The model and the data: handwritten digits of scikit-learn, and a small network."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class Digits:
    """What flower-adsp needs to know: five methods and a batch size."""

    batch_size = 16

    def __init__(self, seed=0):
        self.seed = seed
        digits = load_digits()
        order = np.random.default_rng(seed).permutation(len(digits.target))
        self.images = torch.tensor(digits.images[order] / 16, dtype=torch.float32)[:, None]
        self.labels = torch.tensor(digits.target[order])

    def build_model(self):
        """Return the network with its first weights, the same at each call."""
        torch.manual_seed(self.seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def loss(self, model, batch):
        """Return the mean loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def train_data(self, partition_id, num_partitions):
        """Return what one device has."""
        mine = slice(400 + partition_id, None, num_partitions)
        return TensorDataset(self.images[mine], self.labels[mine])

    def held_out_data(self, split):
        """Return the server's data, on which it evaluates."""
        part = slice(0, 200) if split == "validation" else slice(200, 400)
        return TensorDataset(self.images[part], self.labels[part])

    def metrics(self, model, data):
        """Return loss and accuracy."""
        images, labels = data.tensors
        with torch.inference_mode():
            output = model.eval()(images)
            loss = nn.functional.cross_entropy(output, labels)
            return {
                "loss": loss.item(),
                "accuracy": (output.argmax(1) == labels).float().mean().item(),
            }

"""MobileNetV2 on small colour images."""

from functools import lru_cache

from torch import nn
from torch.utils.data import TensorDataset

from flower_adsp.errors import require, unknown
from flower_adsp.tasks.cifar import load_cifar10
from flower_adsp.tasks.images import load_mnist
from flower_adsp.tasks.in_memory import ImageTask

DATA = ("mnist", "cifar10")


@lru_cache(maxsize=2)
def load_enlarged_mnist(image_size: int) -> dict[str, TensorDataset]:
    """Return the MNIST subset with three equal channels, resized bilinearly.

    Returns
    -------
    dict[str, TensorDataset]
        4,000 / 500 / 500 images of shape ``(n, 3, image_size, image_size)``, float32.
    """
    return {
        split: TensorDataset(
            nn.functional.interpolate(
                data.tensors[0], size=(image_size, image_size), mode="bilinear", antialias=True
            ).expand(-1, 3, -1, -1),
            data.tensors[1],
        )
        for split, data in load_mnist().items()
    }


class MobileNetV2(ImageTask):
    """Classes of 32×32 images by MobileNetV2, with the strides usual for CIFAR.

    torchvision's network (Sandler et al., CVPR 2018, https://arxiv.org/abs/1801.04381), its first
    convolution and its first block of stride 2 having stride 1 instead: 2,236,682 parameters and
    20 units. Peng et al., "DSparse", JCST 2025, train MobileNetV2 on CIFAR-10.

    Parameters
    ----------
    seed, batch_size, partitioning, alpha, crop_padding
        As for `ImageTask`.
    data : str (default: "mnist")
        ``mnist``: handwritten digits that an installed package ships, enlarged; ``cifar10``.
    data_folder : str (default: "data")
        Where CIFAR-10 is, or is downloaded to.
    width : float (default: 1.0)
        Factor on the numbers of channels.
    image_size : int (default: 32)
        Height and width of the digits; CIFAR-10 stays at 32.
    """

    evaluation_batch = 250

    def __init__(
        self,
        seed: int = 0,
        batch_size: int = 32,
        partitioning: str = "iid",
        alpha: float = 0.3,
        data: str = "mnist",
        data_folder: str = "data",
        width: float = 1.0,
        image_size: int = 32,
        crop_padding: int = 0,
    ) -> None:
        super().__init__(seed, batch_size, partitioning, alpha, crop_padding)
        if data not in DATA:
            raise unknown("task.data", data, DATA)
        require(width > 0, "task.width", width, "above 0")
        require(
            image_size >= 8 and (data == "mnist" or image_size == 32),
            "task.image_size",
            image_size,
            "at least 8, and 32 for cifar10",
        )
        self.data = data
        self.data_folder = data_folder
        self.width = width
        self.image_size = image_size

    def load(self) -> dict[str, TensorDataset]:
        """Return the images."""
        if self.data == "cifar10":
            return load_cifar10(self.data_folder)
        return load_enlarged_mnist(self.image_size)

    def layers(self) -> nn.Module:
        """Return the network."""
        from torchvision.models import mobilenet_v2

        model: nn.Module = mobilenet_v2(num_classes=10, width_mult=self.width)
        for path in ("features.0.0", "features.2.conv.1.0"):
            layer = model.get_submodule(path)
            assert isinstance(layer, nn.Conv2d)
            layer.stride = (1, 1)
        return model

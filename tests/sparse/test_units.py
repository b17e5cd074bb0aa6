from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import nn

from flower_adsp.errors import ConfigError
from flower_adsp.sparse.units import split_into_units
from flower_adsp.tasks.images import MnistResNet
from flower_adsp.tasks.sequences import RowLstm
from tests.sparse.models import SmallNet

MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "small": (SmallNet, ["stem", "blocks.0", "blocks.1", "blocks.2", "fc"]),
    "mobilenetv2": (
        lambda: torchvision.models.mobilenet_v2(num_classes=10),
        [*(f"features.{index}" for index in range(19)), "classifier.1"],
    ),
    "resnet18": (
        lambda: torchvision.models.resnet18(num_classes=10),
        ["conv1", *(f"layer{a}.{b}" for a in range(1, 5) for b in range(2)), "fc"],
    ),
    "lstm": (lambda: RowLstm(8), ["lstm", "head"]),
    "vit": (
        lambda: torchvision.models.VisionTransformer(16, 8, 4, 2, 32, 64, num_classes=10),
        [
            "conv_proj",
            *(f"encoder.layers.encoder_layer_{index}" for index in range(4)),
            "heads.head",
        ],
    ),
    "a large last block": (
        lambda: MnistResNet().build_model(),
        ["0", "3", "4", "5", "6", "7", "10"],
    ),
    "layer": (lambda: nn.Linear(3, 2), ["model"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_split_into_their_blocks(name: str) -> None:
    make, expected = MODELS[name]
    model = make()
    units = split_into_units(model)
    assert [unit.name for unit in units] == expected
    parameters = [key for unit in units for key in unit.parameters]
    buffers = [key for unit in units for key in unit.buffers]
    assert sorted(parameters) == sorted(key for key, _ in model.named_parameters())
    assert sorted(buffers) == sorted(key for key, _ in model.named_buffers())


def test_a_normalisation_and_an_activation_belong_to_the_layer_before() -> None:
    unit = split_into_units(SmallNet())[0]
    assert unit.modules == ("stem", "norm", "act")
    assert unit.parameters == ("stem.weight", "stem.bias", "norm.weight", "norm.bias")
    assert "norm.running_mean" in unit.buffers


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no parameters"):
        split_into_units(nn.Sequential(nn.ReLU()))


def test_tied_weights_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"'0.weight' and '1.weight'.*untie"):
        split_into_units(model)


def test_parameters_of_the_model_itself_go_to_a_unit() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.body = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    assert split_into_units(Scaled())[0].parameters == ("scale", "body.0.weight", "body.0.bias")

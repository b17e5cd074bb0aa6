"""What the server measures of a model on its own data."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_adsp.arrays import Weights, decode
from flower_adsp.errors import ConfigError
from flower_adsp.int8 import make_int8
from flower_adsp.tasks.images import DigitsMlp
from flower_adsp.tasks.sequences import MnistLstm
from flower_adsp.tasks.validation import Validation
from tests.toy import Quadratic


def weights(model: nn.Module) -> Weights:
    return decode(ArrayRecord(model.state_dict()))


def test_the_similarity_is_that_of_the_logits() -> None:
    task = DigitsMlp(0)
    fp32, int8 = task.build_model(), make_int8(task.build_model())
    inputs = task.held_out_data("validation").tensors[0]
    with torch.no_grad():
        for model in (fp32, int8):
            model[0].weight.mul_(2.0)
        a, b = fp32(inputs).flatten(), int8(inputs).flatten()
    expected = float(torch.cosine_similarity(a.double(), b.double(), dim=0))
    found = Validation(task).similarity(weights(fp32))
    assert found == pytest.approx(expected, abs=1e-12)
    assert 0.99 < found < 1.0


def test_int8_is_of_no_use_to_a_model_of_which_one_weight_outweighs_the_rest() -> None:
    task = DigitsMlp(0)
    model = task.build_model()
    with torch.no_grad():
        model[0].weight[0, 0] = 1e4  # of a pixel that is always 0
    assert float(task.held_out_data("validation").tensors[0][:, 0].abs().max()) == 0
    assert Validation(task).similarity(weights(model)) < 0.9


def test_accuracy_and_chance() -> None:
    task = DigitsMlp(0)
    validation, model = Validation(task), task.build_model()
    expected = task.metrics(model, task.held_out_data("validation"))["accuracy"]
    assert validation.accuracy(weights(model)) == expected
    labels = task.held_out_data("validation").tensors[1].numpy()
    assert validation.chance == pytest.approx(np.bincount(labels).max() / len(labels))
    assert 0.09 < validation.chance < 0.15


def test_what_cannot_be_measured_is_said() -> None:
    with pytest.raises(ConfigError, match=r"task = 'Quadratic' .* with an accuracy"):
        Validation(Quadratic()).accuracy(weights(Quadratic().build_model()))
    with pytest.raises(ConfigError, match=r"task = 'Quadratic' .* class numbers"):
        _ = Validation(Quadratic()).chance
    with pytest.raises(ConfigError, match="layer 'lstm' is a LSTM"):
        Validation(MnistLstm(0)).check_int8()

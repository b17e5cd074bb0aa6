import random
from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn

from flower_adsp.errors import ConfigError
from flower_adsp.sparse.freezing import make_portion, read_slices, train_only, write_slices
from flower_adsp.sparse.meters import PeakMeter, saved_bytes
from flower_adsp.sparse.ops import make_memory_true
from flower_adsp.sparse.portions import RATIOS, Portion
from flower_adsp.sparse.profile import ModelProfile, profile_model
from flower_adsp.sparse.units import Unit
from tests.sparse.models import SmallNet, batch, loss

Choice = dict[int, float]


def prepare(model: nn.Module, units: list[Unit], choice: Choice) -> dict[str, nn.Parameter]:
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    portions = {
        units[u].name: make_portion(model, units[u], ratio, weights) for u, ratio in choice.items()
    }
    return train_only(model, units, portions)


def random_choice(number: int, draws: random.Random) -> Choice:
    part = draws.choice([0.2, 0.5, 0.9])
    chosen = {u: draws.choice(RATIOS) for u in range(number) if draws.random() < part}
    return chosen or {draws.randrange(number): 1.0}


def one_step(
    model: nn.Module,
    trained: dict[str, nn.Parameter],
    compute: Callable[[], Tensor],
    held: list[Tensor],
) -> int:
    """Return the peak of a step with momentum, the start of what is trained being kept."""
    optimizer = torch.optim.SGD(trained.values(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        compute().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step()
    start = [parameter.detach().clone() for parameter in trained.values()]
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    optimizer.zero_grad()
    with PeakMeter(
        [*model.parameters(), *model.buffers(), *trained.values(), *start, *momenta, *held]
    ) as meter:
        step()
    optimizer.zero_grad()
    return meter.peak


@pytest.fixture(scope="module")
def profiled() -> tuple[nn.Module, list[Unit], ModelProfile]:
    torch.manual_seed(0)
    model = SmallNet()
    units, profile = profile_model(model, loss, batch(), momentum=True)
    return make_memory_true(model).train(), units, profile


def test_saved_bytes_are_exact_and_the_peak_within_a_tenth_on_100_choices(
    profiled: tuple[nn.Module, list[Unit], ModelProfile],
) -> None:
    model, units, profile = profiled
    draws = random.Random(1)
    for _ in range(100):
        choice = random_choice(len(units), draws)
        trained = prepare(model, units, choice)
        found = saved_bytes(lambda: loss(model), model, trained.values())
        assert profile.saved_bytes(choice) == found, choice
        peak = one_step(model, trained, lambda: loss(model), [*batch()])
        assert profile.peak_bytes(choice) == pytest.approx(peak, rel=0.1), choice


def test_it_is_linear_in_the_mini_batch(
    profiled: tuple[nn.Module, list[Unit], ModelProfile],
) -> None:
    _, _, profile = profiled
    _, twice = profile_model(SmallNet(), lambda m: loss(m, 8), batch(8), momentum=True)
    for choice in ({0: 1.0, 4: 1.0}, {2: 0.5, 3: 1.0}, dict.fromkeys(range(5), 1.0)):
        scaled = profile.scaled(2.0)
        assert scaled.saved_bytes(choice) == pytest.approx(twice.saved_bytes(choice), rel=0.02)
        assert scaled.peak_bytes(choice) == pytest.approx(twice.peak_bytes(choice), rel=0.05)


def test_freezing_with_stock_layers_saves_next_to_nothing_below_the_last() -> None:
    _, stock = profile_model(SmallNet(), loss, batch(), memory_true=False)
    _, ours = profile_model(SmallNet(), loss, batch())
    full, first = dict.fromkeys(range(5), 1.0), {0: 1.0, 4: 1.0}
    assert stock.saved_bytes(first) > 0.9 * stock.saved_bytes(full)
    assert ours.saved_bytes(first) < 0.4 * stock.saved_bytes(full)


def test_time_by_arithmetic(profiled: tuple[nn.Module, list[Unit], ModelProfile]) -> None:
    _, _, profile = profiled
    macs = [unit.macs for unit in profile.units]
    assert macs[0] == 4 * 144 * 3 * 8 * 9
    assert macs[1] == 4 * 144 * (8 * 9 + 8 * 8)
    assert macs[4] == 4 * 8 * 5
    total = sum(macs)
    full = 3 * total - macs[0]
    assert profile.time_share(dict.fromkeys(range(5), 1.0)) == 1.0
    assert profile.time_share({4: 1.0}) == pytest.approx((total + macs[4]) / full)
    expected = (total + macs[3] + macs[4] + 0.5 * macs[2]) / full
    assert profile.time_share({2: 0.5}) == pytest.approx(expected)


def test_what_is_frozen_stays_to_the_bit_and_what_is_trained_is_as_if_all_were() -> None:
    torch.manual_seed(0)
    reference, model = SmallNet(), SmallNet()
    model.load_state_dict(reference.state_dict())
    units, _ = profile_model(SmallNet(), loss, batch())
    make_memory_true(model).train()
    trained = train_only(model, units, {"blocks.1": Portion(), "fc": Portion()})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(trained.values(), lr=0.1, momentum=0.9, weight_decay=0.1)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for n, p in model.named_parameters() if n.startswith(("blocks.1", "fc"))}
    for _ in range(3):
        optimizer.zero_grad()
        loss(model.train()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, tensor in model.state_dict().items():
        if name.startswith(("blocks.1", "fc")):
            assert not torch.equal(tensor, before[name]), name
        else:
            assert torch.equal(tensor, before[name]), name


def test_slices_move_only_their_channels(
    profiled: tuple[nn.Module, list[Unit], ModelProfile],
) -> None:
    model, units, _ = profiled
    trained = prepare(model, units, {2: 0.25})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert sorted(trained) == ["blocks.1.conv1.weight", "blocks.1.conv2.weight"]
    assert trained["blocks.1.conv2.weight"].shape == (8, 2, 1, 1)
    assert trained["blocks.1.conv1.weight"].shape == (2, 1, 3, 3)
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    loss(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    write_slices(model)
    for name, tensor in model.state_dict().items():
        moved = (tensor != before[name]).sum()
        expected = trained[name].numel() if name in trained else 0
        assert moved <= expected, name
        assert not expected or moved > 0, name
    model.load_state_dict(before)
    read_slices(model)
    write_slices(model)
    assert torch.equal(model.state_dict()["blocks.1.conv2.weight"], before["blocks.1.conv2.weight"])


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: torchvision.models.resnet18(num_classes=10), (2, 3, 32, 32)),
        (lambda: torchvision.models.mobilenet_v3_small(num_classes=10), (2, 3, 32, 32)),
        (
            lambda: torchvision.models.VisionTransformer(16, 8, 3, 2, 32, 64, num_classes=10),
            (2, 3, 16, 16),
        ),
    ],
)
def test_other_networks_fit_the_model_too(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = make()
    x, y = torch.randn(shape), torch.zeros(shape[0], dtype=torch.int64)

    def compute(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    units, profile = profile_model(model, compute, [x, y], momentum=True)
    make_memory_true(model).train()
    draws = random.Random(2)
    for _ in range(4):
        choice = random_choice(len(units), draws)
        trained = prepare(model, units, choice)
        found = saved_bytes(lambda: compute(model), model, trained.values())
        assert profile.saved_bytes(choice) == pytest.approx(found, rel=0.01), choice
        peak = one_step(model, trained, lambda: compute(model), [x, y])
        assert profile.peak_bytes(choice) == pytest.approx(peak, rel=0.1), choice


def test_a_unit_that_runs_twice_is_refused() -> None:
    class Twice(SmallNet):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(self.blocks[0](self.blocks(self.stem(x))).mean((2, 3)))
            return out

    with pytest.raises(ConfigError, match=r"'blocks.0' runs more than once"):
        profile_model(Twice(), loss, batch())


def test_a_unit_that_never_runs_is_refused() -> None:
    model = SmallNet()
    model.spare = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"\['spare'\] do not run"):
        profile_model(model, loss, batch())


def test_unknown_units_and_wrong_channels_are_refused(
    profiled: tuple[nn.Module, list[Unit], ModelProfile],
) -> None:
    model, units, _ = profiled
    with pytest.raises(ConfigError, match=r"unit 'blocks.7'"):
        train_only(model, units, {"blocks.7": Portion()})
    with pytest.raises(ConfigError, match=r"channels of unit 'fc' at ratio 0.5"):
        train_only(model, units, {"fc": Portion(0.5)})

"""What holds for every network; a new one is one line in NETWORKS."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import ModelMixin
from torch import Tensor
from torch.testing import assert_close

from kairostep.networks import UViT2DModel, ddpm_unet, dit

SIZE, CHANNELS, NUM_CLASSES = 8, 3, 5
Build = Callable[[int | None], ModelMixin]

NETWORKS: dict[str, Build] = {
    "uvit": lambda n: UViT2DModel(SIZE, CHANNELS, hidden_size=32, depth=4, num_heads=4, num_classes=n),
    "unet": lambda n: ddpm_unet(
        SIZE, CHANNELS, channels=32, multipliers=(1, 2), blocks=1, attention=(4,), dropout=0.0, num_classes=n
    ),
    "dit": lambda n: dit(SIZE, CHANNELS, hidden_size=32, depth=2, num_heads=4, num_classes=n),
}
every_network = pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
with_and_without_classes = pytest.mark.parametrize("num_classes", [None, 1, NUM_CLASSES])


def trained(build: Build, num_classes: int | None) -> ModelMixin:
    """Return the network in evaluation mode and away from its start, where a DiT predicts 0 whatever it sees."""
    torch.manual_seed(0)
    model = build(num_classes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def inputs(num_rows: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x_t = torch.randn(num_rows, CHANNELS, SIZE, SIZE, generator=generator)
    return x_t, torch.randint(0, 1000, (num_rows,), generator=generator)


def labels_for(num_classes: int | None, num_rows: int = 3) -> dict[str, Tensor]:
    return {} if num_classes is None else {"class_labels": torch.arange(num_rows) % (num_classes + 1)}


@every_network
@with_and_without_classes
def test_the_prediction_has_the_shape_of_x_t_and_comes_as_object_or_tuple(
    build: Build, num_classes: int | None
) -> None:
    model = trained(build, num_classes)
    x_t, time = inputs()
    labels = labels_for(num_classes)
    prediction = model(x_t, time, **labels).sample
    assert prediction.shape == x_t.shape
    assert prediction.isfinite().all()
    assert_close(model(x_t, time, return_dict=False, **labels), (prediction,), rtol=0, atol=0)


@every_network
@with_and_without_classes
def test_every_parameter_gets_a_gradient(build: Build, num_classes: int | None) -> None:
    # but the keys' biases: they shift all scores of a query alike, and softmax does not see it
    model = trained(build, num_classes).train()
    x_t, time = inputs()
    model(x_t, time, **labels_for(num_classes)).sample.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if not name.endswith("to_k.bias")}
    assert [name for name, gradient in gradients.items() if gradient is None or not gradient.any()] == []


@every_network
@with_and_without_classes
def test_a_saved_network_predicts_the_same_when_loaded(build: Build, num_classes: int | None, tmp_path: Path) -> None:
    model = trained(build, num_classes)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    x_t, time = inputs()
    labels = labels_for(num_classes)
    assert_close(loaded(x_t, time, **labels).sample, model(x_t, time, **labels).sample, rtol=0, atol=0)


@every_network
def test_whole_times_may_be_of_any_type(build: Build) -> None:
    model = trained(build, None)
    x_t, _ = inputs()
    expected = model(x_t, torch.full((3,), 7)).sample
    for time in (torch.full((3,), 7.0), torch.full((3,), 7.0, dtype=torch.float64), torch.full((3,), 7).int()):
        assert_close(model(x_t, time).sample, expected)
    for time in (7, torch.tensor(7), torch.tensor(7.0)):
        assert_close(model(x_t, time).sample, expected)


@every_network
@pytest.mark.parametrize("pair", [(500.2, 500.7), (-1.1, 0.9)], ids=["flow matching", "EDM"])
def test_fractional_and_negative_times_differ(build: Build, pair: tuple[float, float]) -> None:
    model = trained(build, None)
    x_t, _ = inputs()
    first, second = (model(x_t, torch.full((3,), time)).sample for time in pair)
    assert first.isfinite().all()
    assert (first - second).abs().amax() > 1e-4


@every_network
def test_rows_do_not_mix(build: Build) -> None:
    model = trained(build, NUM_CLASSES)
    x_t, time = inputs()
    labels = torch.tensor([0, 3, NUM_CLASSES])
    alone = [model(x_t[i : i + 1], time[i : i + 1], class_labels=labels[i : i + 1]).sample for i in range(3)]
    assert_close(model(x_t, time, class_labels=labels).sample, torch.cat(alone), rtol=1e-4, atol=1e-4)


@every_network
def test_every_label_and_the_null_class_predict_differently(build: Build) -> None:
    model = trained(build, NUM_CLASSES)
    num_labels = NUM_CLASSES + 1
    x_t, time = (rows.expand(num_labels, *rows.shape[1:]) for rows in inputs(1))
    predictions = model(x_t, time, class_labels=torch.arange(num_labels)).sample.flatten(1)
    distances = torch.cdist(predictions, predictions) + torch.eye(num_labels)
    assert distances.min() > 1e-3


@every_network
def test_the_label_after_the_null_class_does_not_exist(build: Build) -> None:
    x_t, time = inputs(1)
    with pytest.raises(IndexError):
        build(NUM_CLASSES)(x_t, time, class_labels=torch.tensor([NUM_CLASSES + 1]))


@every_network
def test_labels_are_never_dropped_in_training(build: Build) -> None:
    model = trained(build, NUM_CLASSES)
    x_t, time = (rows.expand(200, *rows.shape[1:]) for rows in inputs(1))
    labels = torch.zeros(200, dtype=torch.long)
    expected = model(x_t, time, class_labels=labels).sample
    assert_close(model.train()(x_t, time, class_labels=labels).sample, expected)


@every_network
def test_labels_are_needed_with_classes_and_refused_without(build: Build) -> None:
    x_t, time = inputs()
    with pytest.raises(ValueError, match="class_labels"):
        build(NUM_CLASSES)(x_t, time)
    with pytest.raises(ValueError, match="class"):
        build(None)(x_t, time, class_labels=torch.zeros(3, dtype=torch.long))


@every_network
def test_gradient_checkpointing_changes_no_gradient(build: Build) -> None:
    model = trained(build, NUM_CLASSES).train()
    x_t, time = inputs()
    gradients = []
    for enable in (model.disable_gradient_checkpointing, model.enable_gradient_checkpointing):
        enable()
        model.zero_grad()
        model(x_t, time, class_labels=torch.tensor([0, 1, 2])).sample.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert model.is_gradient_checkpointing
    assert_close(gradients[1], gradients[0])


@every_network
def test_half_precision_and_autocast_work(build: Build) -> None:
    model = trained(build, NUM_CLASSES)
    x_t, time = inputs()
    labels = torch.tensor([0, 1, NUM_CLASSES])
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x_t, time.float(), class_labels=labels).sample.isfinite().all()
    half = model.to(torch.bfloat16)
    assert half(x_t.bfloat16(), time.float(), class_labels=labels).sample.dtype == torch.bfloat16


@every_network
def test_no_classes_at_all_are_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="num_classes must be a whole number of at least 1, got 0"):
        build(0)

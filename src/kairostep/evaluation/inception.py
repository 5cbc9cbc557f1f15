"""The Inception network on which FID is defined, in torch alone, for files that hold its weights by name.

Inception-v3 (Szegedy et al. 2016, Figures 5-7) as TensorFlow released it on 2015-12-05. It differs from other versions:
averages over 3x3 leave out the padding, and the last block takes maxima instead.
"""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

NORM_EPS = 1e-3
NUM_FEATURES = 2048
IGNORED = ("fc.weight", "fc.bias")  # the classifier of 1008 classes comes after the features
IGNORED_ENDING = ".bn.num_batches_tracked"  # counts batches of training; older files have none
STATE_DICT_SUFFIXES = (".pth", ".safetensors")

Kernel = tuple[int, int]  # height, width
Step = tuple[int, tuple[Kernel, ...]]  # channels; several kernels see the same input and are concatenated


class ConvNorm(nn.Module):
    """Convolution without bias, normalisation by fixed statistics, rectifier: (N, C, H, W) -> (N, channels, H', W')."""

    def __init__(self, inputs: int, channels: int, kernel: Kernel, stride: int = 1, *, padded: bool = True) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if padded else (0, 0)
        self.conv = nn.Conv2d(inputs, channels, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(channels, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the rectified maps."""
        return torch.relu(self.bn(self.conv(x)))


class InceptionBlock(nn.Module):
    """Branches side by side, concatenated, the pooled one last: (N, inputs, H, W) -> (N, outputs, H', W').

    Args:
        branches: The steps of each branch, by its name in the file. If there are several, the k-th is called `name_k`,
            and `name_ka`, `name_kb` if it has two kernels.
        pool: The first step of the last branch.
        pooled: Channels of the convolution after the pool. With 0 there is none, and the block halves height and width.
    """

    def __init__(self, inputs: int, branches: Mapping[str, tuple[Step, ...]], pool: nn.Module, pooled: int) -> None:
        super().__init__()
        self.branches = [self._add(name, inputs, steps, halves=not pooled) for name, steps in branches.items()]
        self.pool = pool
        self.branch_pool = ConvNorm(inputs, pooled, (1, 1)) if pooled else nn.Identity()
        last = [steps[-1] for steps in branches.values()]
        self.outputs = sum(channels * len(kernels) for channels, kernels in last) + (pooled or inputs)

    def _add(self, name: str, inputs: int, steps: tuple[Step, ...], *, halves: bool) -> list[list[str]]:
        """Add the convolutions of a branch and return their names, step by step."""
        names = []
        for number, (channels, kernels) in enumerate(steps, start=1):
            halving = halves and number == len(steps)
            stem = name if len(steps) == 1 else f"{name}_{number}"
            names.append([stem] if len(kernels) == 1 else [stem + letter for letter in "ab"])
            for child, kernel in zip(names[-1], kernels, strict=True):
                self.add_module(child, ConvNorm(inputs, channels, kernel, 2 if halving else 1, padded=not halving))
            inputs = channels
        return names

    def forward(self, x: Tensor) -> Tensor:
        """Return the branches' maps in the order of their channels."""
        maps = []
        for steps in self.branches:
            y = x
            for names in steps:
                y = torch.cat([self.get_submodule(name)(y) for name in names], dim=1)
            maps.append(y)
        return torch.cat([*maps, self.branch_pool(self.pool(x))], dim=1)  # (N, outputs, H', W')


class FIDInception(nn.Module):
    """The network up to its features: (N, 3, H, W) in [-1, 1) -> (N, 2048); FID is defined for 299 x 299."""

    def __init__(self) -> None:
        super().__init__()
        stem: list[tuple[str, nn.Module]] = [
            ("Conv2d_1a_3x3", ConvNorm(3, 32, (3, 3), 2, padded=False)),  # 149 x 149
            ("Conv2d_2a_3x3", ConvNorm(32, 32, (3, 3), padded=False)),  # 147 x 147
            ("Conv2d_2b_3x3", ConvNorm(32, 64, (3, 3))),
            ("maxpool1", _halving_pool()),  # 73 x 73
            ("Conv2d_3b_1x1", ConvNorm(64, 80, (1, 1))),
            ("Conv2d_4a_3x3", ConvNorm(80, 192, (3, 3), padded=False)),  # 71 x 71
            ("maxpool2", _halving_pool()),  # 35 x 35
        ]
        for name, module in stem + _blocks(192):
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of each of the last maps."""
        for layer in self.children():
            x = layer(x)
        return x.mean(dim=(2, 3))  # (N, 2048, 8, 8) -> (N, 2048)


def average_pool() -> nn.Module:
    """Return the mean over 3 x 3 pixels, at borders over fewer."""
    return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)


def _halving_pool() -> nn.Module:
    return nn.MaxPool2d(3, stride=2)


def _blocks(inputs: int) -> list[tuple[str, nn.Module]]:
    blocks: list[tuple[str, nn.Module]] = []

    def add(name: str, branches: Mapping[str, tuple[Step, ...]], pool: nn.Module, pooled: int = 0) -> None:
        nonlocal inputs
        block = InceptionBlock(inputs, branches, pool, pooled)
        blocks.append((name, block))
        inputs = block.outputs

    for name, pooled in (("Mixed_5b", 32), ("Mixed_5c", 64), ("Mixed_5d", 64)):  # 35 x 35
        add(name, _squares(), average_pool(), pooled)
    add("Mixed_6a", _halving_squares(), _halving_pool())  # 17 x 17
    for name, width in (("Mixed_6b", 128), ("Mixed_6c", 160), ("Mixed_6d", 160), ("Mixed_6e", 192)):
        add(name, _sevens(width), average_pool(), 192)
    add("Mixed_7a", _halving_sevens(), _halving_pool())  # 8 x 8
    add("Mixed_7b", _forks(), average_pool(), 192)
    add("Mixed_7c", _forks(), nn.MaxPool2d(3, stride=1, padding=1), 192)
    assert inputs == NUM_FEATURES
    return blocks


def _step(channels: int, *kernels: Kernel) -> Step:
    return channels, kernels


def _squares() -> dict[str, tuple[Step, ...]]:
    return {
        "branch1x1": (_step(64, (1, 1)),),
        "branch5x5": (_step(48, (1, 1)), _step(64, (5, 5))),
        "branch3x3dbl": (_step(64, (1, 1)), _step(96, (3, 3)), _step(96, (3, 3))),
    }


def _halving_squares() -> dict[str, tuple[Step, ...]]:
    return {
        "branch3x3": (_step(384, (3, 3)),),
        "branch3x3dbl": (_step(64, (1, 1)), _step(96, (3, 3)), _step(96, (3, 3))),
    }


def _sevens(width: int) -> dict[str, tuple[Step, ...]]:
    row, column = (1, 7), (7, 1)
    return {
        "branch1x1": (_step(192, (1, 1)),),
        "branch7x7": (_step(width, (1, 1)), _step(width, row), _step(192, column)),
        "branch7x7dbl": (
            _step(width, (1, 1)),
            _step(width, column),
            _step(width, row),
            _step(width, column),
            _step(192, row),
        ),
    }


def _halving_sevens() -> dict[str, tuple[Step, ...]]:
    return {
        "branch3x3": (_step(192, (1, 1)), _step(320, (3, 3))),
        "branch7x7x3": (_step(192, (1, 1)), _step(192, (1, 7)), _step(192, (7, 1)), _step(192, (3, 3))),
    }


def _forks() -> dict[str, tuple[Step, ...]]:
    return {
        "branch1x1": (_step(320, (1, 1)),),
        "branch3x3": (_step(384, (1, 1)), _step(384, (1, 3), (3, 1))),
        "branch3x3dbl": (_step(448, (1, 1)), _step(384, (3, 3)), _step(384, (1, 3), (3, 1))),
    }


# Files


def load_fid_inception(path: Path, device: torch.device | str = "cpu") -> FIDInception:
    """Return the network with the weights of a .pth or .safetensors file, for evaluation; no pickled code is run."""
    network = FIDInception()
    state = checked_state(read_tensors(path), network, path)
    network.load_state_dict(state)
    return network.requires_grad_(False).eval().to(device)


def read_tensors(path: Path) -> Mapping[str, object]:
    """Return what a .pth or .safetensors file holds, by name."""
    try:
        state = _read_safetensors(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # damaged pickles raise anything
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the Inception network must be a state dict of tensors, got {path}: {reason}; name a TorchScript file .pt"
        ) from error
    if not isinstance(state, Mapping):
        raise ValueError(
            f"the Inception network must be a state dict of tensors, got {path} with a {type(state).__name__}: "
            "save network.state_dict()"
        )
    return state


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        from kairostep.installation import missing

        raise missing(f"reading {path}", error, "eval") from error
    return load_file(path)


def checked_state(state: Mapping[str, object], network: nn.Module, path: Path) -> OrderedDict[str, Tensor]:
    """Return the network's tensors from `state`. Raise if one is missing, has another shape or is unknown."""
    wanted = {name: value for name, value in network.state_dict().items() if not name.endswith(IGNORED_ENDING)}
    given = {name: value for name, value in state.items() if not _ignored(name)}
    faults = {
        "missing": [name for name in wanted if name not in given],
        "unexpected": [str(name) for name in given if name not in wanted],
        "misshapen": [name for name, value in wanted.items() if name in given and not _fits(given[name], value)],
    }
    if any(faults.values()):
        found = "; ".join(f"{len(names)} {kind}: {', '.join(names[:3])}" for kind, names in faults.items() if names)
        raise ValueError(
            f"the Inception network must have the {len(wanted)} tensors of the FID Inception, in torchvision's names, "
            f"got {path} with {found}: take pt_inception-2015-12-05-6726825d.pth"
        )
    tensors = network.state_dict()  # its own counts of batches remain
    for name in wanted:
        value = given[name]
        assert isinstance(value, Tensor)
        tensors[name] = value
    return OrderedDict(tensors)


def _ignored(name: object) -> bool:
    return name in IGNORED or str(name).endswith(IGNORED_ENDING)


def _fits(found: object, wanted: Tensor) -> bool:
    return isinstance(found, Tensor) and found.shape == wanted.shape and found.is_floating_point()

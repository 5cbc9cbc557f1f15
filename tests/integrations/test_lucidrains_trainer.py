"""Our samplers in the real networks, the real 1D diffusion and the real Trainer of denoising-diffusion-pytorch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerators import forget_accelerators
from lucidrains_like import STAND_INS, Network, T
from real_libraries import import_real
from torch.utils.data import DataLoader

import kairostep as ks
from kairostep.integrations.lucidrains import SampledDiffusion, loss_weight_of, objective_of


def root_loss() -> ks.RootLoss:
    return ks.RootLoss(num_bins=5, warmup=4, refresh=2, gate=1.0)


def adaptive() -> ks.Adaptive:
    policy = ks.BetaPolicy.for_input((1, 4, 4), hidden=8)
    return ks.Adaptive(policy, num_steps=T, probing=ks.Probing(every=3, sweep=10, reward_rows=4))


def test_the_real_unet_and_the_real_1d_diffusion_learn_too() -> None:
    library = import_real("denoising_diffusion_pytorch", *STAND_INS)
    torch.manual_seed(0)
    flat = library.GaussianDiffusion1D(library.Unet1D(dim=8, dim_mults=(1, 2), channels=2), seq_length=16, timesteps=T)
    square = library.GaussianDiffusion(library.Unet(8, dim_mults=(1, 2), channels=1), image_size=8, timesteps=T)
    for diffusion, shape in ((flat, (2, 16)), (square, (1, 8, 8))):
        sampler, optimizer = root_loss(), torch.optim.Adam(diffusion.parameters(), lr=1e-3)
        SampledDiffusion(diffusion, sampler, optimizer)
        for _ in range(6):
            diffusion(torch.rand(8, *shape)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert int(sampler.squares.num_seen.sum()) == 48
        assert float(sampler.density(5).max()) > 0.202
    learned = library.LearnedGaussianDiffusion(
        library.Unet(8, dim_mults=(1, 2), channels=1, learned_variance=True),
        image_size=8,
        timesteps=T,
        objective="pred_noise",
    )
    with pytest.raises(ValueError, match="one squared error, got LearnedGaussianDiffusion"):
        objective_of(learned)
    assert loss_weight_of(learned) is None
    elucidated = library.ElucidatedDiffusion(
        library.Unet(8, channels=1, random_fourier_features=True), image_size=8, channels=1
    )
    with pytest.raises(ValueError, match="got a ElucidatedDiffusion without"):
        SampledDiffusion(elucidated, ks.Uniform(), torch.optim.SGD(elucidated.parameters()))


@pytest.mark.parametrize("make", [root_loss, adaptive])
def test_the_real_trainer_teaches_a_sampler_all_its_micro_batches(
    make: Callable[[], ks.TimestepSampler], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = import_real("denoising_diffusion_pytorch.denoising_diffusion_pytorch", *STAND_INS)
    monkeypatch.setattr(library, "Dataset", lambda *args, **kwargs: torch.rand(128, 1, 4, 4))  # torchvision's part
    monkeypatch.setattr(library, "cpu_count", lambda: 0)
    monkeypatch.setattr(
        library, "DataLoader", lambda *args, **kwargs: DataLoader(*args, **{**kwargs, "pin_memory": False})
    )
    forget_accelerators()
    try:
        diffusion, sampler = library.GaussianDiffusion(Network(), image_size=4, timesteps=T), make()
        trainer = library.Trainer(
            diffusion,
            "nowhere",
            train_batch_size=8,
            gradient_accumulate_every=2,
            train_num_steps=9,
            calculate_fid=False,
            results_folder=str(tmp_path),
        )
        sampled = SampledDiffusion(diffusion, sampler, trainer.opt)
        trainer.train()
    finally:
        forget_accelerators()
    assert sampler.steps.num_steps == 9
    assert sampled.observer.num_unseen == 0
    if isinstance(sampler, ks.RootLoss):
        assert int(sampler.squares.num_seen.sum()) == 9 * 2 * 8
    else:
        assert int(sampler.num_probes) == 3 * 2 * (3 * 4 + 10)  # three times, before and after

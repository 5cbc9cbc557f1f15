"""On a GPU: the same noise to the last bits, the same images, and a loop that never waits for the device."""

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from torch.testing import assert_close

from kairostep.diffusion import EPSILON, VELOCITY, DiscreteProcess, EDMProcess, FlowProcess, Objective
from kairostep.diffusion.process import Process
from kairostep.experiments import Config
from kairostep.generation import NoiseOfImages, generate, noise_of_images
from kairostep.generation.image_folder import Request, generate_images
from kairostep.networks import ddpm_unet
from kairostep.runs import Trained

pytestmark = pytest.mark.gpu
SHAPE = (3, 16, 16)


def network(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = ddpm_unet(16, 3, channels=16, multipliers=(1, 2), blocks=1, attention=(), dropout=0.0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model.eval().requires_grad_(False).to(device)


def noise(step: int, device: str = "cuda") -> torch.Tensor:
    return noise_of_images(3, torch.arange(300, device=device), step, SHAPE)


def test_noise_is_that_of_a_cpu() -> None:
    for step in (0, 17):
        there, here = noise(step).cpu(), noise(step, "cpu")
        assert int((there != here).sum()) <= 2  # of 230,400
        assert_close(there, here, rtol=1e-6, atol=1e-7)
    parts = [noise_of_images(3, part, 0, SHAPE) for part in torch.arange(300, device="cuda").split(7)]
    assert torch.equal(torch.cat(parts), noise(0))


@pytest.mark.parametrize("solver", ["ddpm", "ddim", "heun"])
@pytest.mark.parametrize("process", [DiscreteProcess.linear(), FlowProcess(1000.0), EDMProcess()])
def test_samples_are_those_of_a_cpu_and_nothing_waits(process: Process, solver: str) -> None:
    if solver == "ddpm" and not isinstance(process, DiscreteProcess):
        pytest.skip("flows and EDM have no ddpm")
    torch.backends.cudnn.allow_tf32 = False
    prediction = {DiscreteProcess: EPSILON, FlowProcess: VELOCITY}.get(type(process), EDMProcess().prediction)
    made = []
    for device in ("cuda", "cpu"):
        model = network(device)
        numbers = torch.arange(4, device=device)

        start, noise_at = noise_of_images(0, numbers, 0, SHAPE), NoiseOfImages(0, numbers, SHAPE)

        def seen(x: torch.Tensor, time: torch.Tensor, model: torch.nn.Module = model) -> torch.Tensor:
            torch.cuda.set_sync_debug_mode("error")  # from the first evaluation on
            output: torch.Tensor = model(x, time).sample
            return output

        try:
            samples = generate(seen, process, prediction, start, solver=solver, steps=6, step_noise=noise_at)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        made.append(samples.cpu())
    assert_close(made[0], made[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_folder_of_images(precision: str, tmp_path: Path) -> None:
    process = DiscreteProcess.linear()
    trained = Trained(
        config=Config(),
        process=process,
        prediction=EPSILON,
        objective=Objective(process),
        model=network("cuda").to(memory_format=torch.channels_last),
        shape=SHAPE,
        num_classes=0,
        to_pixels=lambda x0: x0,
        clip=True,
        checkpoint=Path("run/checkpoints/step-00000010.safetensors"),
        step=10,
        weights="ema",
        digest="abc",
    )
    state = PartialState()
    made = []
    for batch_size in (64, 100):
        request = Request(num=150, solver="ddpm", steps=10, batch_size=batch_size, format="npz", precision=precision)
        assert generate_images(trained, request, tmp_path / str(batch_size), state) == 150
        with np.load(tmp_path / str(batch_size) / "images.npz") as arrays:
            made.append(arrays["images"].astype(int))
    assert made[0].shape == (150, 16, 16, 3)
    difference = np.abs(made[0] - made[1])
    assert float((difference > 1).mean()) < (0.001 if precision == "fp32" else 0.5)

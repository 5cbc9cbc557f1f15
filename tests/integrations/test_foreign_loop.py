"""What adapters share: who learns, by which name, and what they say where nobody shows a loss."""

import re
import subprocess
import sys
import warnings

import pytest
import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler
from flow_matching.path import CondOTProbPath

import kairostep as ks
from kairostep.integrations.accelerate import Accelerated
from kairostep.integrations.diffusers import Scheduled
from kairostep.integrations.flow_matching import PathSampler
from kairostep.integrations.foreign_loop import name_of
from kairostep.integrations.k_diffusion import SampleDensity
from kairostep.integrations.noise_levels import LogNormal
from kairostep.timesteps.sampler import UNSHOWN

ROWS = torch.empty(4, 0)


def adapters(sampler: ks.TimestepSampler) -> list[Scheduled | Accelerated | PathSampler]:
    """Return each adapter whose loop calls `observe` by itself, and those that wrap one another."""
    scheduler, path, accelerator = DDPMScheduler(), CondOTProbPath(), Accelerator(cpu=True)
    return [
        Scheduled(sampler, scheduler),
        PathSampler(sampler, path),
        Accelerated(sampler, accelerator, name="alone"),
        Accelerated(Scheduled(sampler, scheduler), accelerator, name="scheduled"),
        PathSampler(Accelerated(sampler, accelerator, name="within"), path),
    ]


def test_what_draws_by_another_learns_if_that_one_does() -> None:
    fixed = ks.Curriculum(ks.LogitNormal(), ks.Uniform(), start=1, end=2)
    for sampler, expected in ((ks.Uniform(), False), (ks.RootLoss(), True), (fixed, False)):
        scheduled = Scheduled(sampler, DDPMScheduler())
        assert sampler.learns is scheduled.learns is expected
        assert scheduled.inner == (sampler,)
    assert ks.Curriculum(ks.LogitNormal(), ks.RootLoss(), start=1, end=2).learns
    assert fixed.inner == (fixed.first, fixed.then)
    assert ks.RootLoss().inner == ()
    assert name_of(Scheduled(fixed, DDPMScheduler())) == "Scheduled(Curriculum(LogitNormal, Uniform))"


@pytest.mark.parametrize("number", range(5))
def test_a_forgotten_observe_is_missed_once(number: int) -> None:
    sampler = adapters(ks.RootLoss())[number]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2 * UNSHOWN):
            sampler.sample(ROWS)
    (warning,) = seen
    assert re.search(r"no loss, so .*RootLoss.* learns nothing: write `with sampler\.observe", str(warning.message))


@pytest.mark.parametrize("number", range(5))
def test_nothing_is_missed_where_there_is_nothing_to_miss(number: int) -> None:
    fixed, learning = adapters(ks.Uniform())[number], adapters(ks.RootLoss())[number]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(UNSHOWN + 1):
            fixed.sample(ROWS)
            with torch.no_grad():  # an evaluation
                learning.sample(ROWS)
        for _ in range(UNSHOWN + 1):
            drawn = learning.sample(ROWS)
            with learning.observe(ROWS, drawn, torch.rand(4)):
                pass


def test_levels_whose_losses_are_never_shown_are_missed() -> None:
    sample_density = SampleDensity(ks.RootLoss(), LogNormal(-1.2, 1.2))
    for _ in range(2 * UNSHOWN):  # shown each time
        sample_density([4])
        sample_density.weighted(torch.rand(4))
    for _ in range(UNSHOWN - 1):
        sample_density([4])
    with pytest.warns(UserWarning, match="RootLoss learns nothing: show those of each draw"):
        sample_density([4])


def test_micro_batches_count_as_shown() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 * UNSHOWN)
    sampler = Accelerated(Scheduled(ks.RootLoss(), DDPMScheduler()), accelerator)
    model = torch.nn.Linear(1, 1)
    for _ in range(UNSHOWN + 1):
        with accelerator.accumulate(model), sampler.observe(ROWS, sampler.sample(ROWS), torch.rand(4)):
            pass
    assert sampler.sampler.sampler.steps.num_steps == 0


def test_an_adapter_imports_no_library_but_torch() -> None:
    adapters = "edm flow_matching k_diffusion lucidrains openai optimizer_hooks physicsnemo sit torchcfm"
    code = (
        "import importlib, sys\n"
        f"for name in {adapters.split()}: importlib.import_module(f'kairostep.integrations.{{name}}')\n"
        "libraries = {'flow_matching', 'torchcfm', 'physicsnemo', 'k_diffusion', 'denoising_diffusion_pytorch'}\n"
        "assert not libraries & set(sys.modules), libraries & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

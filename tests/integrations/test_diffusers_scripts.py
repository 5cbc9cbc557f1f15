"""Patched scripts run: uniform draws leave the losses bitwise, root_loss learns, checkpoints hold the sampler."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerators import forget_accelerators
from diffusers.training_utils import compute_density_for_timestep_sampling as their_density
from process_groups import free_port, leave_group, run_ranks
from torch.testing import assert_close
from training_scripts import SCRIPTS, SETTINGS

import kairostep as ks
from kairostep.integrations.diffusers import compute_snr
from kairostep.integrations.diffusers_scripts import ScriptSampler, sampler_for_script, scheme_quantile
from kairostep.integrations.patching import patch_script


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    forget_accelerators()
    yield
    forget_accelerators()


def run(text: str, arguments: list[str], **settings: Any) -> dict[str, Any]:
    """Run a script and return its variables, and in SAMPLERS the sampler that it made."""
    if not torch.distributed.is_initialized():
        forget_accelerators()
    space: dict[str, Any] = {"__name__": "script", "SAMPLERS": []}
    made = ", accelerator, seed=args.seed)\n"
    text = text.replace(made, f"{made}    SAMPLERS.append(timestep_sampler)\n")
    exec(compile(text, "script.py", "exec"), space)
    space["SETTINGS"].update(SETTINGS | settings)
    space["main"](space["parse_args"](arguments))
    return space


def replayed(monkeypatch: pytest.MonkeyPatch, name: str, draws: list[torch.Tensor]) -> None:
    """Let the sampler draw what the original drew."""
    left = iter(draws)
    monkeypatch.setattr(ScriptSampler, name, lambda self, *_, **__: (self._draw(8), next(left))[1])


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("settings", [{}, {"snr_gamma": None, "with_prior_preservation": False}])
def test_uniform_leaves_the_losses_of_the_original_bitwise(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "rand" if name == "rand" else "compute_density_for_timestep_sampling" if name == "flow" else "randint"
    drawn: list[torch.Tensor] = []
    before = SCRIPTS[name]
    if name == "flow":
        call = "compute_density_for_timestep_sampling("
        before = before.replace(f"u = {call}", f"u = keep({call}", 1).replace(
            "_scale,\n                )\n", "_scale,))\n"
        )
    else:
        call = "torch.rand((bsz,)" if name == "rand" else "torch.randint("
        before = before.replace(f"timesteps = {call}", f"timesteps = keep({call}", 1)
        before = before.replace("device=latents.device)\n", "device=latents.device))\n", 1)
    before = "def keep(x):\n    KEPT.append(x)\n    return x\n\n\nKEPT = []\n" + before
    original = run(before, [], **settings)
    drawn += original["KEPT"]
    replayed(monkeypatch, source, drawn)
    patched = run(patch_script(SCRIPTS[name]).text, ["--timestep_sampler=uniform"], **settings)
    assert all(map(torch.equal, original["DRAWN"], patched["DRAWN"]))
    assert original["LOSSES"] == patched["LOSSES"]


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_snr_weights_are_applied_once_and_are_those_of_min_snr(prediction: str) -> None:
    text = patch_script(SCRIPTS["snr"]).text.replace(
        "DRAWN.append(timesteps)", "DRAWN.append((timesteps, mse_loss_weights))"
    )
    space = run(text, ["--timestep_sampler=root_loss"], prediction_type=prediction)
    scheduler = space["DDPMScheduler"](prediction_type=prediction, beta_schedule="scaled_linear")
    kind = {"epsilon": ks.EPSILON, "v_prediction": ks.V}[prediction]
    for timesteps, weights in space["DRAWN"]:
        expected = ks.min_snr(5.0)(compute_snr(scheduler, timesteps).log(), kind)
        assert_close(weights, expected, rtol=1e-6, atol=1e-6)


def test_the_sampler_survives_the_scripts_own_resume(tmp_path: Path) -> None:
    text = patch_script(SCRIPTS["snr"]).text
    options = ["--timestep_sampler=root_loss", f"--output_dir={tmp_path}", "--seed=3"]
    whole = run(text, options, max_train_steps=200, checkpointing_steps=120)
    resumed = run(text, options, max_train_steps=200, resume_from_checkpoint="checkpoint-120")
    assert (tmp_path / "checkpoint-120" / "timestep_sampler_0.pt").exists()
    assert len(resumed["DRAWN"]) == 80
    assert all(map(torch.equal, whole["DRAWN"][120:], resumed["DRAWN"]))
    fresh = run(text, ["--timestep_sampler=root_loss", "--seed=4"], max_train_steps=2)
    assert not torch.equal(fresh["DRAWN"][0], whole["DRAWN"][0])


def run_rank(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    text = patch_script(SCRIPTS["snr"]).text
    space = run(text, ["--seed=3", f"--output_dir={folder}"], max_train_steps=100, checkpointing_steps=60)
    drawn, density = torch.stack(space["DRAWN"]), space["SAMPLERS"][0].sampler.density(20)
    torch.distributed.barrier()
    resumed = run(
        text, ["--seed=3", f"--output_dir={folder}"], max_train_steps=100, resume_from_checkpoint="checkpoint-60"
    )
    torch.save({"drawn": drawn, "density": density, "resumed": torch.stack(resumed["DRAWN"])}, f"{folder}/{rank}.pt")
    leave_group()


def test_a_checkpoint_of_the_script_before_the_patch_goes_on_with_a_new_sampler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = [f"--output_dir={tmp_path}", "--seed=3"]
    original = run(SCRIPTS["snr"], options, max_train_steps=8, checkpointing_steps=6)
    text = patch_script(SCRIPTS["snr"]).text
    resumed = run(
        text, [*options, "--timestep_sampler=root_loss"], max_train_steps=8, resume_from_checkpoint="checkpoint-6"
    )
    assert f"{tmp_path}/checkpoint-6 was saved without a timestep sampler: it starts afresh" in caplog.messages
    assert (len(original["DRAWN"]), len(resumed["DRAWN"])) == (8, 2)
    assert resumed["SAMPLERS"][0].sampler.sampler.steps.num_steps == 1  # of two micro-batches


def test_two_processes_draw_different_times_from_one_state(tmp_path: Path) -> None:
    run_ranks(run_rank, str(tmp_path), free_port())
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert torch.equal(first["density"], second["density"])
    assert all(not torch.equal(*pair) for pair in zip(first["drawn"], second["drawn"], strict=True))
    for saved in (first, second):
        assert torch.equal(saved["drawn"][60:], saved["resumed"])


class Alone:
    """As much of an accelerator as a sampler needs."""

    device, process_index, num_processes, sync_gradients = torch.device("cpu"), 0, 1, True

    def register_save_state_pre_hook(self, hook: Any) -> None:
        """Keep nothing."""

    def register_load_state_pre_hook(self, hook: Any) -> None:
        """Keep nothing."""


def sampler(name: Any = "root_loss", accelerator: Any = None) -> ScriptSampler:
    return ScriptSampler(name, accelerator or Alone())


def test_the_mean_is_weighted_and_its_expectation_that_of_the_original() -> None:
    drawing = sampler(ks.RootLoss(warmup=1, refresh=1))
    for _ in range(200):
        steps = drawing.randint(0, 1000, (64,))
        drawing.mean((steps / 1000).square()[:, None] * torch.ones(64, 3))
        with drawing.observe():
            pass
    density = drawing.sampler.density(10)
    assert float(density[-1]) > 2 * float(density[0])  # draws follow the root of the loss
    means = []
    for _ in range(300):
        with torch.no_grad():
            steps = drawing.randint(0, 1000, (64,))
        means.append(drawing.mean((steps / 1000).square()))
        drawing._losses.clear()
    assert_close(torch.stack(means).mean(), torch.tensor(1 / 3), rtol=0.01, atol=0)


def test_root_loss_is_told_of_the_weights_that_the_script_applied() -> None:
    drawing = sampler(ks.RootLoss(num_bins=4, warmup=1, refresh=1))
    told = ks.RootLoss(num_bins=4, warmup=1, refresh=1, loss_weight=lambda t: 1 + 9 * t)
    for _ in range(50):
        drawing.randint(0, 1000, (64,))
        drawn = told.sample(torch.empty(64, 0))
        weights = 1 + 9 * drawn.t
        losses = drawn.t.square() * weights
        drawing.mean(losses, weights[:, None, None])
        with drawing.observe(), told.observe(torch.empty(64, 0), drawn, losses):
            pass
    assert_close(drawing.sampler.density(4), told.density(4))
    assert float(told.density(4).max()) > 0.3


def test_multinomial_draws_by_the_weights_of_the_script() -> None:
    drawing = sampler("uniform")
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0])
    steps = torch.cat([drawing.multinomial(weights, 64, replacement=True) for _ in range(50)])
    assert_close(steps.bincount(minlength=5) / len(steps), weights / 8, rtol=0, atol=0.01)


@pytest.mark.parametrize("scheme", ["logit_normal", "mode", "none", "sigma_sqrt", "cosmap"])
def test_uniform_draws_by_the_schemes_of_diffusers(scheme: str) -> None:
    options = {"logit_mean": 0.3, "logit_std": 0.7, "mode_scale": 1.29}
    t = (torch.arange(20000) + 0.5) / 20000
    ours = scheme_quantile(scheme, t, **options).sort().values
    torch.manual_seed(0)
    theirs = their_density(scheme, 20000, **options).sort().values
    assert_close(ours[200:-200], theirs[200:-200], rtol=0, atol=0.02)  # the tails of a sample scatter
    assert bool((scheme_quantile(scheme, t, **options).diff() <= 0).all())  # noise at u = 0


def test_sigmas_rise_with_t_where_u_falls() -> None:
    drawing, t = sampler("uniform"), torch.linspace(0.125, 0.875, 7)
    drawing.sampler.sample = lambda x0: ks.Timesteps(t, torch.ones(7))  # type: ignore[method-assign]
    u = drawing.compute_density_for_timestep_sampling("logit_normal", 7, 0.5, 1.0)
    sigmas = drawing.compute_density_of_sigmas("logit_normal", 7, 0.5, 1.0)
    assert bool((sigmas.diff() > 0).all())
    assert_close(sigmas, u.flip(0))  # the same draws, the other way round


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shares_stay_under_one_in_every_precision(dtype: torch.dtype) -> None:
    drawing = sampler("uniform")
    drawing.sampler.sample = lambda x0: ks.Timesteps(torch.full((2,), 1 - 2**-24), torch.ones(2))  # type: ignore[method-assign]
    shares = drawing.rand((2,), dtype=dtype)
    assert shares.dtype == dtype
    assert bool((shares < 1).all())


def test_prior_halves_have_their_own_weights_and_one_observation() -> None:
    drawing = sampler(ks.RootLoss(warmup=1, refresh=1))
    drawing.randint(0, 1000, (4,))
    drawing._drawn = ks.Timesteps(drawing._drawn.t, torch.tensor([1.0, 2.0, 3.0, 4.0]))  # type: ignore[union-attr]
    assert float(drawing.prior.mean(torch.ones(2, 5))) == 3.5
    with pytest.raises(ValueError, match="losses of all 4 samples must be weighted before the step, got 2"):
        drawing.observe()
    drawing.prior.mean(torch.ones(2))
    assert float(drawing.mean(torch.ones(2))) == 1.5
    with drawing.observe():
        pass
    drawing.randint(0, 1000, (4,))
    with pytest.raises(ValueError, match="one for each of the 4 timesteps, or for half of them"):
        drawing.mean(torch.ones(3))


def test_losses_without_a_wrapped_step_are_learned_from_at_the_next_draw() -> None:
    drawing = sampler(ks.RootLoss(warmup=1, refresh=1))
    for _ in range(3):
        drawing.randint(0, 10, (4,))
        drawing.mean(torch.ones(4))
    assert drawing.sampler.sampler.steps.advance() == 3
    waiting = SimpleNamespace(**{name: getattr(Alone, name) for name in ("device", "process_index", "num_processes")})
    waiting.register_save_state_pre_hook = waiting.register_load_state_pre_hook = lambda hook: None
    waiting.sync_gradients = False
    micro = sampler(ks.RootLoss(warmup=1, refresh=1), waiting)
    for _ in range(3):
        micro.randint(0, 10, (4,))
        micro.mean(torch.ones(4))
    assert micro.sampler.sampler.steps.advance() == 1


def test_a_draw_has_one_mean() -> None:
    drawing = ScriptSampler("root_loss", Alone())  # type: ignore[arg-type]
    drawing.randint(0, 1000, (4,))
    drawing.mean(torch.rand(4))
    with pytest.raises(ValueError, match=r"each draw has one mean, got a second: add up the losses"):
        drawing.mean(torch.rand(4))
    with drawing.observe():
        pass
    with pytest.raises(ValueError, match="losses must follow a draw"):
        drawing.mean(torch.rand(4))


@pytest.mark.parametrize("name", ["beta", "adaptive", "speed"])
def test_names_that_a_script_cannot_take_are_refused_with_those_that_it_can(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"got '{name}': take one of logit_normal, loss_second_moment, mode, root_loss, uniform, or"
    ):
        sampler_for_script(name)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("rootloss", r"unknown sampler rootloss: did you mean root_loss\?"),
        ("min_snr", "unknown sampler min_snr: valid are logit_normal, loss_second_moment, mode, root_loss, uniform"),
        ("progress", "the sampler progress was removed.*: take root_loss"),
    ],
)
def test_names_that_are_of_no_sampler_are_told_with_the_nearest(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        sampler_for_script(name)


def test_what_a_script_cannot_supply_is_refused() -> None:
    with pytest.raises(ValueError, match="losses must follow a draw"):
        sampler().mean(torch.ones(3))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="a patched script"):
        sampler(ks.GradientVariance(model.parameters()))
    assert isinstance(ScriptSampler("uniform", Accelerator(cpu=True)).observe(), object)

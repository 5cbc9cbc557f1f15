"""kairostep patch: a weight that undoes factors of a rebuilt prediction is no weight of the network's error."""

import ast

import pytest
import torch
from training_scripts import FLOW, FLOW_LOSS, RAND, RANDINT, SNR, script

import kairostep as ks
from kairostep.integrations.kohya import shifted
from kairostep.integrations.patching import Refused, patch_script
from kairostep.timesteps.noise import noise_ratio

STEP = " " * 16  # the loop's indent
WEIGHTED = f"""{STEP}loss = weighting.float() * (denoised.float() - latents.float()) ** 2
{STEP}loss = torch.mean(loss.reshape(latents.shape[0], -1), 1)
{STEP}loss = loss.mean()
"""
SIGMAS = f"{STEP}sigmas = get_sigmas(timesteps)\n{STEP}weighting = (sigmas**-2.0).float()\n"
REBUILT = {
    "T2I adapter": (RAND + SIGMAS, "denoised = model_pred * (-sigmas) + noisy_latents"),
    "EDM": (RANDINT + SIGMAS, "denoised = model_pred.float() * (sigmas / (sigmas**2 + 1) ** 0.5) + noisy_latents"),
    "CogVideoX": (RANDINT + SIGMAS, "denoised = noise_scheduler.get_velocity(model_pred, noisy_latents, timesteps)"),
    "a step": (RANDINT + SIGMAS, "denoised = noise_scheduler.step(model_pred, timesteps, noisy_latents).pred_original"),
    "by keyword": (RANDINT + SIGMAS, "denoised = rebuild(output=model_pred, sigmas=sigmas)"),
    "its two halves": (
        RANDINT + SIGMAS,
        "half, other = torch.chunk(model_pred, 2, dim=1); denoised = noisy_latents - sigmas * half",
    ),
}


@pytest.mark.parametrize("name", REBUILT)
def test_a_weight_that_undoes_the_rebuilding_is_not_shown_and_told(name: str) -> None:
    draw, line = REBUILT[name]
    text = script(draw, f"{STEP}{line}\n{WEIGHTED}")
    patched = patch_script(text)
    assert "loss = timestep_sampler.mean(loss)\n" in patched.text
    assert patched.weights == ()
    at = text[: text.index(line)].count("\n") + 1
    assert patched.notes[0].startswith(f"line {at} rebuilds the prediction from the network's output, and weighting")


def test_a_branch_that_rebuilds_is_enough() -> None:
    """Scripts for SD3 rebuild unless --precondition_outputs=0."""
    line = f"{STEP}if args.precondition_outputs:\n{STEP}    model_pred = model_pred * (-sigmas) + noisy_latents\n"
    patched = patch_script(script(FLOW + line, FLOW_LOSS))
    assert "loss = timestep_sampler.mean(loss)\n" in patched.text
    assert not any("nearly flat" in note for note in patched.notes)


def test_other_weights_are_shown() -> None:
    unpack = "model_pred = FluxPipeline._unpack_latents(model_pred, height=noisy_latents.shape[2] * 8)"
    assert "timestep_sampler.mean(loss, weighting)" in patch_script(script(FLOW + f"{STEP}{unpack}\n", FLOW_LOSS)).text
    assert "timestep_sampler.mean(loss, weighting)" in patch_script(script(FLOW, FLOW_LOSS)).text
    assert "timestep_sampler.mean(loss, mse_loss_weights)" in patch_script(script(RANDINT, SNR)).text
    errors = "F.mse_loss(model_pred, latents, reduction='none')"
    lines = ["snr_weights = snr[timesteps]", f"loss = snr_weights * {errors}", "loss = loss.mean()"]
    sample = "".join(f"{STEP}{line}\n" for line in lines)
    assert "mean(loss, snr_weights)" in patch_script(script(RANDINT, sample)).text


def test_an_output_that_another_network_takes_is_not_rebuilt() -> None:
    """As in scripts for ControlNet."""
    lines = [
        "residuals = controlnet(noisy_latents, timesteps, return_dict=False)[0]",
        "down, mid = adapter(noisy_latents, timesteps, return_dict=False)",
        "model_pred = transformer(noisy_latents, timestep=timesteps, residuals=residuals, down=down)[0]",
    ]
    both = FLOW + "".join(f"{STEP}{line}\n" for line in lines)
    assert "timestep_sampler.mean(loss, weighting)" in patch_script(script(both, FLOW_LOSS)).text
    rebuilt = "model_pred = model_pred * (-sigmas) + noisy_latents"
    text = script(f"{both}{STEP}if args.precondition_outputs:\n{STEP}    {rebuilt}\n", FLOW_LOSS)
    assert patch_script(text).notes[0].startswith(f"line {text[: text.index(rebuilt)].count(chr(10)) + 1} rebuilds")


def test_a_flow_at_constant_weighting_is_told_that_root_loss_does_nothing() -> None:
    (note,) = patch_script(script(FLOW, FLOW_LOSS)).notes
    assert note.startswith("the loss of a flow is nearly flat in t, so root_loss draws as uniform does")
    assert patch_script(script(FLOW, FLOW_LOSS), sampler="logit_normal").notes == ()


def test_shown_the_weight_root_loss_would_draw_where_noise_grows() -> None:
    """Errors of the output fall with t; rebuilt by sigma and weighted by 1 / sigma**2 they are what they were."""
    t = torch.linspace(0.025, 0.975, 20).repeat(50)
    error, weight = 1 / (0.05 + t), ((1 - t) / t) ** 2
    shown = {"without": error, "with": error * weight}  # a script's loss times its weight is what RootLoss records
    ratios = {}
    for name, losses in shown.items():
        sampler = ks.RootLoss(warmup=1, refresh=1)
        for _ in range(3):
            sampler.record(t, losses)
        ratios[name] = float(noise_ratio(sampler.density(20), error[:20]))
    assert ratios["without"] < 0.9
    assert ratios["with"] > 1.2


@pytest.mark.parametrize(
    ("shift", "scheme", "saved"), [(1.0, "none", 0.65), (3.0, "none", 0.80), (3.0, "normal", 0.89)]
)
def test_what_root_loss_saves_in_scripts_for_sd3(shift: float, scheme: str, saved: float) -> None:
    """For a flow error flat in t; docs/recipes/sd3_flux.md has the figures."""
    u = (torch.arange(2000) + 0.5) / 2000
    sigma = shifted(torch.special.ndtri(u).sigmoid() if scheme == "normal" else u, shift)
    sampler = ks.RootLoss(warmup=1, refresh=1)
    for _ in range(3):
        sampler.record(u, sigma**2)
    ratio = noise_ratio(sampler.density(20), (sigma**4).reshape(20, -1).mean(1))
    assert float(ratio) == pytest.approx(saved, abs=0.005)


@pytest.mark.parametrize("name", ["time_steps", "noise_levels_at"])
def test_draws_are_known_by_where_their_values_go(name: str) -> None:
    text = script(RANDINT, SNR).replace("timesteps = timesteps.long()", "")
    text = "".join(
        line.replace("timesteps", name) if "num_train_timesteps" in line else line.replace(" timesteps)", f" {name})")
        for line in text.splitlines(keepends=True)
    ).replace(f"num_train_{name}", "num_train_timesteps")
    patched = patch_script(
        text.replace("ones_like(timesteps)", f"ones_like({name})").replace("DRAWN.append(timesteps)", "")
    )
    assert f"{name} = timestep_sampler.randint(" in patched.text
    ast.parse(patched.text)


def test_places_in_a_table_are_draws_whatever_they_are_called() -> None:
    lines = [
        "timestep_indices = torch.multinomial(table_weights, bsz, replacement=True).long()",
        "timesteps = noise_scheduler.timesteps[timestep_indices]",
    ]
    draw = "".join(f"{STEP}{line}\n" for line in lines) + RANDINT[RANDINT.index(f"{STEP}noisy_latents =") :]
    patched = patch_script(script(draw, SNR)).text
    assert "timestep_indices = timestep_sampler.multinomial(table_weights, bsz, replacement=True).long()\n" in patched
    other = script(RANDINT, SNR).replace("accelerator.backward(loss)", "optimizer.backward(loss)")
    with pytest.raises(Refused) as refused:
        patch_script(other)
    assert refused.value.line == other[: other.index("optimizer.backward")].count("\n") + 1

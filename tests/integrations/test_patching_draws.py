"""kairostep patch: which random numbers of a script are its timesteps, and what may be done with them."""

import inspect
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from training_scripts import RAND, RANDINT, SCRIPTS, script

from kairostep.integrations.diffusers_scripts import ScriptSampler
from kairostep.integrations.patching import Refused, patch_script
from kairostep.integrations.patching.draws import NUM_POSITIONAL, PARAMETERS

SCRIPT = SCRIPTS["mse"]
DRAW = "torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,), device=latents.device)"
ARGS = SimpleNamespace(first=10, last=20, device="cpu")
STEP = " " * 16  # the loop's indent
NOISY = f"{STEP}noisy = latents + u.view(-1, 1, 1, 1) * noise\n"


def refusal(text: str) -> str:
    with pytest.raises(Refused) as refused:
        patch_script(text)
    return str(refused.value)


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def test_a_random_number_that_becomes_no_timestep_is_no_draw() -> None:
    dropout = f"u = torch.rand((bsz,))\n{STEP}drop_caption = u < 0.1\n{STEP}"
    text = SCRIPT.replace(f"timesteps = {DRAW}", f"{dropout}timesteps = sample_timesteps(bsz)")
    assert refusal(text).startswith(f"line {line_of(text, 'timesteps = sample')}: no draw of timesteps is recognised")
    masked = text.replace("sample_timesteps(bsz)", "torch.where(u < 0.1, 0, sample_timesteps(u.shape[0]))")
    assert "no draw of timesteps is recognised" in refusal(masked)
    offset = text.replace("bsz)\n", f"bsz)\n{STEP}noise = noise + 0.1 * u.view(-1, 1, 1, 1)\n", 1)
    assert "no draw of timesteps is recognised" in refusal(offset)
    name = SCRIPT.replace(DRAW, "torch.rand((bsz,))").replace("timesteps.long()", "sample_timesteps(bsz)")
    assert "no draw of timesteps is recognised" in refusal(name)
    patched = patch_script(SCRIPT.replace(f"timesteps = {DRAW}", f"{dropout}timesteps = {DRAW}")).text
    assert "u = torch.rand((bsz,))\n" in patched
    assert "timesteps = timestep_sampler.randint(\n" in patched


@pytest.mark.parametrize(
    "draw",
    [
        f"u = torch.rand((bsz,))\n{STEP}indices = (u * 1000).long()\n{STEP}timesteps = table[indices]\n" + NOISY,
        f"u = torch.rand((bsz,))\n{STEP}sigma = u\n" + NOISY,
        f"t = torch.rand((bsz,))\n{STEP}noisy = noise_scheduler.add_noise(latents, noise, t)\n",
        f"t = torch.rand((bsz,))\n{STEP}t_ = t.view(-1, 1, 1, 1)\n{STEP}noisy = (1 - t_) * latents + t_ * noise\n",
    ],
)
def test_a_share_that_becomes_a_timestep_is_a_draw(draw: str) -> None:
    kept = RAND[RAND.index("                model_pred") :].replace("noisy_latents", "noisy")
    loss = STEP + "loss = torch.nn.functional.mse_loss(model_pred, target)\n"
    text = script(STEP + draw + kept, loss)
    assert "timestep_sampler.rand((bsz,))" in patch_script(text).text


REORDERED = [
    "timesteps = timesteps.long().sort().values",
    "timesteps, order = torch.sort(timesteps)",
    "timesteps = torch.tensor(sorted(timesteps.tolist()))",
    "timesteps = timesteps[torch.randperm(bsz)]",
    "timesteps = timesteps[order].long()",
    "timesteps = timesteps[order + 1]",
    "timesteps = timesteps.flip(0)",
    "timesteps = timesteps.roll(1, 0)",
    "order = timesteps.argsort()",
    "timesteps = noise_scheduler.timesteps[timesteps][order]",
    "timesteps = noise_scheduler.timesteps[timesteps[order]]",
    "timesteps = timesteps[0].repeat(bsz)",
    "s = timesteps - 1\n" + STEP + "timesteps = s[order]",
]


@pytest.mark.parametrize("line", REORDERED)
def test_draws_in_another_order_are_refused(line: str) -> None:
    text = SCRIPT.replace("timesteps = timesteps.long()", line)
    message = refusal(text)
    assert message.startswith(f"line {line_of(text, line.splitlines()[-1])}: the draws must keep their order")
    assert message.endswith("leave it out: their order is random already")


@pytest.mark.parametrize(
    "line",
    [
        "timesteps = noise_scheduler.timesteps[timesteps].to(device=latents.device)",
        "timesteps = noise_scheduler.timesteps.flip(0)[timesteps]",
        "alphas = noise_scheduler.alphas_cumprod.gather(0, timesteps)[:, None, None, None]",
        "rows = latents[torch.randperm(timesteps.shape[0])]",
        "first = timesteps[0].item()",
        "sigmas = noise_scheduler.sigmas[timesteps][(...,) + (None,) * (latents.ndim - 1)]",
    ],
)
def test_tables_read_at_the_draws_and_one_of_them_printed_are_no_other_order(line: str) -> None:
    assert "timestep_sampler.randint(" in patch_script(SCRIPT.replace("timesteps = timesteps.long()", line)).text


CALLS = {  # in the script, and what is made of it
    "0, 1000, (bsz,)": "0, 1000, (bsz,)",
    "0, T, (bsz,)": "0, T, (bsz,)",
    "1, T, [bsz]": "1, T, [bsz]",
    "T, (bsz,)": "0, T, (bsz,)",
    "T, size=(bsz,)": "0, T, size=(bsz,)",
    "0, T, size=(bsz,)": "0, T, size=(bsz,)",
    "args.first, args.last, (bsz,)": "args.first, args.last, (bsz,)",
    "size=(bsz,), high=1000, low=0": "size=(bsz,), high=1000, low=0",
    "0, high=T, size=(bsz,), device=latents.device": "0, high=T, size=(bsz,), device=latents.device",
}


@pytest.mark.parametrize("arguments", CALLS)
def test_any_bound_and_keywords_are_read_where_the_draw_becomes_timesteps(arguments: str) -> None:
    patched = patch_script(SCRIPT.replace(DRAW, f"torch.randint({arguments})")).text
    assert f"timesteps = timestep_sampler.randint({CALLS[arguments]})\n" in patched


def test_the_calls_that_a_patch_writes_run() -> None:
    made = ScriptSampler("uniform", Accelerator(cpu=True))
    for arguments in CALLS.values():
        steps = eval(f"made.randint({arguments})", {"made": made, "T": 1000, "bsz": 4, "args": ARGS, "latents": ARGS})
        assert steps.shape == (4,)
        assert 0 <= steps.min() <= steps.max() < 1000


def test_the_draw_that_an_error_advises_is_recognised() -> None:
    helper = SCRIPT.replace(DRAW, "sample_timesteps(bsz)")
    advised = refusal(helper).split("write ")[1].split(", or ")[0]
    assert advised.startswith("timesteps = torch.randint(")
    assert "timestep_sampler.randint(" in patch_script(SCRIPT.replace(f"timesteps = {DRAW}", advised)).text
    unused = SCRIPT.replace(f"timesteps = {DRAW}", f"t = torch.randint(0, T, (bsz,))\n{STEP}timesteps = helper(bsz)")
    assert "no draw of timesteps is recognised" in refusal(unused)


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (DRAW[:-1] + ", requires_grad=False)", "takes low=, high=, size=, device=, dtype=, got requires_grad=: leave"),
        (DRAW[:-1] + ", **options)", "takes low=, high=, size=, device=, dtype=, got torch.randint("),
        ("torch.randint(0, 1000, (bsz,), None)", "the arguments of this draw are not recognised"),
        ("torch.randint(*bounds, (bsz,))", "the arguments of this draw are not recognised"),
        ("torch.randint(0, 1000, size=(bsz, 1))", "the size of a draw must be (bsz,), got (bsz, 1)"),
        ("torch.rand(size=(1,))", "each sample must have a timestep, got (1,) for all"),
        ("torch.rand(bsz)", "the size of a draw must be (bsz,), got bsz"),
    ],
)
def test_calls_that_the_sampler_does_not_take_are_refused(draw: str, told: str) -> None:
    text = SCRIPT.replace(DRAW, draw)
    message = refusal(text)
    assert message.startswith(f"line {line_of(text, draw)}: ")
    assert told in message


@pytest.mark.parametrize("function", PARAMETERS)
def test_the_parameters_of_a_draw_are_those_of_the_samplers_method(function: str) -> None:
    method = getattr(ScriptSampler, function.removeprefix("torch."))
    assert list(inspect.signature(method).parameters)[1:] == list(PARAMETERS[function])
    positional = [part for part in inspect.signature(method).parameters.values() if part.kind is not part.KEYWORD_ONLY]
    assert len(positional) - 1 >= NUM_POSITIONAL[function]


DIFFUSERS = {  # what its scripts make of their draws, each with the function that draws
    "distillation": """
                index = torch.randint(0, args.num_ddim_timesteps, (bsz,), device=latents.device).long()
                start_timesteps = solver.ddim_timesteps[index]
                timesteps = start_timesteps - topk
                timesteps = torch.where(timesteps < 0, torch.zeros_like(timesteps), timesteps)
                noisy_latents = noise_scheduler.add_noise(latents, noise, start_timesteps)
                model_pred = unet(noisy_latents, start_timesteps)
                x_prev = solver.ddim_step(model_pred, noise, index)
                target = unet(x_prev.float(), timesteps).sample
""",
    "an adapter": """
                timesteps = torch.rand((bsz,), device=latents.device)
                timesteps = (1 - timesteps**3) * noise_scheduler.config.num_train_timesteps
                timesteps = timesteps.long().to(noise_scheduler.timesteps.dtype)
                timesteps = timesteps.clamp(0, noise_scheduler.config.num_train_timesteps - 1)
                noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
                sigmas = get_sigmas(timesteps, len(noisy_latents.shape), noisy_latents.dtype)
                model_pred = unet(noisy_latents / ((sigmas**2 + 1) ** 0.5), timesteps, return_dict=False)[0]
                target = latents
""",
    "two branches": """
                if not args.do_edm_style_training:
                    timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,))
                    timesteps = timesteps.long()
                else:
                    indices = torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,))
                    timesteps = noise_scheduler.timesteps[indices].to(device=latents.device)
                snr = compute_snr(noise_scheduler, timesteps)
                gamma = args.snr_gamma * torch.ones_like(timesteps)
                mse_loss_weights = torch.stack([snr, gamma], dim=1).min(dim=1)[0] / snr
                mse_loss_weights[snr == 0] = 1.0
                model_pred = unet(noise_scheduler.add_noise(latents, noise, timesteps), timesteps)[0]
                target = noise
""",
    "a list": """
                u = compute_density_for_timestep_sampling(args.weighting_scheme, bsz)
                indices = (u * noise_scheduler.config.num_train_timesteps).long()
                timesteps = noise_scheduler.timesteps[indices].to(device=latents.device)
                sigmas = get_sigmas(timesteps, n_dim=latents.ndim)[:, None]
                noisy_list = list(((1.0 - sigmas) * latents + sigmas * noise).unsqueeze(2).unbind(dim=0))
                model_pred = torch.stack(transformer(noisy_list, (1000 - timesteps) / 1000)[0], dim=0)
                model_pred = model_pred[:, : latents.size(1), :]
                target = noise - latents
""",
}


@pytest.mark.parametrize("name", DIFFUSERS)
def test_what_diffusers_makes_of_its_draws_is_recognised(name: str) -> None:
    text = SCRIPTS["mse"].replace(RANDINT, DIFFUSERS[name].lstrip("\n"))
    patched = patch_script(text).text
    num_draws = patched.count("timestep_sampler.r") + patched.count("timestep_sampler.compute_density")
    assert num_draws == (2 if name == "two branches" else 1)
    assert patched.count("timestep_sampler.mean(") == 1

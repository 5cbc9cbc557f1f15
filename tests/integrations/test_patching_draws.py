"""kairostep patch: which random numbers of a script are its timesteps, and what may be done with them."""

import pytest
from training_scripts import RAND, SCRIPTS, script

from kairostep.integrations.patching import Refused, patch_script

SCRIPT = SCRIPTS["mse"]
DRAW = "torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,), device=latents.device)"
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
    "timesteps = timesteps[torch.randperm(bsz)]",
    "timesteps = timesteps[order].long()",
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
    ],
)
def test_tables_read_at_the_draws_and_one_of_them_printed_are_no_other_order(line: str) -> None:
    assert "timestep_sampler.randint(" in patch_script(SCRIPT.replace("timesteps = timesteps.long()", line)).text

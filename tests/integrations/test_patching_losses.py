"""kairostep patch: which means of a script are those of its losses, and that each step takes one."""

import pytest
from training_scripts import FLOW, PRIOR, RANDINT, SCRIPTS, script

from kairostep.integrations.patching import Refused, patch_script

STEP = " " * 16  # the loop's indent
LINE = 'loss = F.mse_loss(model_pred.float(), target.float(), reduction="mean")'
NONE = 'loss = F.mse_loss(model_pred.float(), target.float(), reduction="none")'
MEAN = 'timestep_sampler.mean(F.mse_loss(model_pred.float(), target.float(), reduction="none"))'


def with_loss(*lines: str) -> str:
    return script(RANDINT, "".join(f"{STEP}{line}\n" for line in lines))


def refusal(text: str) -> Refused:
    with pytest.raises(Refused) as refused:
        patch_script(text)
    return refused.value


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


TWO_MEANS = {
    "one line": ["mse, l1 = f(model_pred)", "loss = mse.mean() + 0.1 * l1.mean()"],
    "two lines": [LINE, "loss = loss + 0.1 * F.l1_loss(model_pred, target)"],
    "in place": [LINE, "smooth = (model_pred - target).abs().mean()", "loss += 0.1 * smooth"],
    "a branch": [LINE, "if args.smooth:", "    loss = loss + F.l1_loss(model_pred, target)"],
}


@pytest.mark.parametrize("name", TWO_MEANS)
def test_two_means_of_one_step_are_refused(name: str) -> None:
    text = with_loss(*TWO_MEANS[name])
    refused = refusal(text)
    at = {"one line": "loss = mse.mean()", "in place": "smooth ="}.get(name, "F.l1_loss(model_pred, target)")
    assert refused.line == line_of(text, at)
    assert "a step must take one mean of its losses, got a second after that of line" in str(refused)
    assert str(refused).endswith(
        "add them before the mean, loss = (first + second).mean() with one loss for each sample, and patch again"
    )


def test_means_of_different_steps_and_of_the_two_halves_are_all_replaced() -> None:
    other = with_loss(LINE, "if args.huber:", "    loss = F.huber_loss(model_pred, target)")
    assert patch_script(other).text.count("timestep_sampler.mean(") == 2
    branches = with_loss("if args.huber:", "    loss = F.huber_loss(model_pred, target)", "else:", f"    {LINE}")
    assert patch_script(branches).text.count("timestep_sampler.mean(") == 2
    prior = patch_script(script(RANDINT, PRIOR)).text
    assert (prior.count("timestep_sampler.mean("), prior.count("timestep_sampler.prior.mean(")) == (1, 1)
    assert "weighting" in FLOW
    twice = PRIOR + f"{STEP}loss = loss + args.prior_loss_weight * prior_loss\n"
    assert patch_script(script(RANDINT, twice)).num_changed == patch_script(script(RANDINT, PRIOR)).num_changed
    halves = PRIOR.replace("torch.chunk(model_pred, 2, dim=0)", "model_pred[:4], model_pred[4:]")
    halves = halves.replace("torch.chunk(target, 2, dim=0)", "target[:4], target[4:]")
    assert "a second after that of line" in str(refusal(script(RANDINT, halves)))


@pytest.mark.parametrize("weight", ["model.weight", "model.bias"])
def test_a_mean_that_has_no_timestep_is_left_alone(weight: str) -> None:
    text = with_loss(LINE, f"reg = {weight}.pow(2).mean()", "loss = loss + 1e-4 * reg")
    patched = patch_script(text).text
    assert f"reg = {weight}.pow(2).mean()\n" in patched
    assert f"loss = {MEAN}\n" in patched
    alone = with_loss(f"loss = {weight}.pow(2).mean()")
    refused = refusal(alone)
    assert refused.line == line_of(alone, "accelerator.backward")
    assert "the loss must be a mean over the losses of a batch" in str(refused)


PICKED = {
    "losses": (f"{NONE}[mask].mean()", ")[mask].mean()"),
    "losses of a line": ("loss = loss[mask].mean()", "loss = loss[mask]"),
    "predictions": ("loss = F.mse_loss(model_pred[mask], target[mask])", "loss = F.mse_loss(model_pred[m"),
    "predictions before": ("loss = F.mse_loss(pred, target[mask])", "pred = model_pred[mask]"),
    "a comparison": ("loss = F.mse_loss(model_pred[latents > 0], target)", "loss = F.mse_loss(model_pred[lat"),
    "the largest": ("loss = loss.flatten().topk(4).values.mean()", "loss = loss.flat"),
    "every second": ("loss = loss[::2].mean()", "loss = loss[::2]"),
    "a function": ("loss = loss.masked_select(mask).mean()", "loss = loss.masked"),
}


@pytest.mark.parametrize("name", PICKED)
def test_losses_of_picked_elements_are_refused(name: str) -> None:
    line, at = PICKED[name]
    text = with_loss("mask = latents > 0", "pred = model_pred[mask]", NONE, line)
    refused = refusal(text)
    assert refused.line == line_of(text, at)
    assert "losses must be of whole samples in the order of the batch" in str(refused)


def test_a_slice_of_other_dimensions_and_a_weight_read_from_a_table_are_no_picking() -> None:
    text = with_loss(
        "model_pred = model_pred[:, : target.size(1), :]",
        "model_pred = model_pred[:, channels]",
        "snr_weights = noise_scheduler.alphas_cumprod.to(timesteps.device)[timesteps].view(-1, 1, 1, 1)",
        'loss = (F.mse_loss(model_pred, target[:, :4], reduction="none") * snr_weights).mean()',
    )
    assert "loss = timestep_sampler.mean(\n" in patch_script(text).text


@pytest.mark.parametrize("arguments", ['None, None, "sum"', "size_average=False", "reduce=True", '"mean"'])
def test_options_of_a_loss_that_are_not_keywords_of_today_are_refused(arguments: str) -> None:
    text = with_loss(f"loss = F.mse_loss(model_pred, target, {arguments})")
    refused = refusal(text)
    assert refused.line == line_of(text, "loss = F.mse_loss")
    assert "a mean over the batch is expected" in str(refused)
    assert "write loss = losses.mean() as the last line before backward, and patch again" in str(refused)


@pytest.mark.parametrize("module", ["nn.functional", "torch.nn.functional"])
def test_the_functions_of_torch_are_known_by_their_full_names(module: str) -> None:
    text = SCRIPTS["mse"].replace(LINE, LINE.replace("F.", f"{module}."))
    assert f"{module}.mse_loss(" in patch_script(text).text


def test_annotated_assignments_are_assignments() -> None:
    text = SCRIPTS["mse"].replace("loss = F.", "loss: torch.Tensor = F.")
    text = text.replace("timesteps = torch.randint", "timesteps: torch.Tensor = torch.randint")
    patched = patch_script(text).text
    assert "timesteps: torch.Tensor = timestep_sampler.randint(" in patched
    assert "loss: torch.Tensor = timestep_sampler.mean(" in patched


SNR = "snr_weight = compute_snr(noise_scheduler, timesteps)"
ROWS = 'loss = F.mse_loss(model_pred, target, reduction="none").mean([1, 2, 3])'


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ([SNR, ROWS, "loss *= snr_weight", "loss = loss.mean()"], "(loss, snr_weight)"),
        ([SNR, f"{ROWS} * snr_weight", "loss = loss.mean()"], "(loss, snr_weight)"),
        ([SNR, ROWS, "loss += 0.0 * snr_weight", "loss = loss.mean()"], "(loss)"),
        (
            ["weighted_loss = F.mse_loss(model_pred, target)", "loss = (weighted_loss * mask).mean()"],
            "(weighted_loss * m",
        ),
        ([ROWS, "snr_losses = loss * 2", "loss = (snr_losses * mask).mean()"], "(snr_losses * mask)"),
    ],
)
def test_a_weight_is_what_multiplies_losses_and_no_loss(lines: list[str], shown: str) -> None:
    text = with_loss(*[line.replace("F.mse_loss(model_pred, target)", "(model_pred - target) ** 2") for line in lines])
    assert f"loss = timestep_sampler.mean{shown}" in patch_script(text).text


def test_means_of_slices_are_told_to_become_halves() -> None:
    first, second = (f"F.mse_loss(model_pred[{part}], target[{part}])" for part in (":2", "2:"))
    refused = refusal(with_loss(f"loss = {first}", f"loss = loss + args.prior_loss_weight * {second}"))
    assert str(refused).endswith("torch.chunk(model_pred, 2, dim=0), and patch again")

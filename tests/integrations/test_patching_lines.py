"""kairostep patch: lines that statements share, comments within calls, and which lines are taken for kairostep's."""

import pytest
from training_scripts import SCRIPTS

from kairostep.integrations.patching import Refused, patch_script, rewrite
from kairostep.integrations.patching.source import Source

SCRIPT = SCRIPTS["mse"]
STEP = " " * 16  # the loop's indent
LINE = 'loss = F.mse_loss(model_pred.float(), target.float(), reduction="mean")\n'


def refusal(text: str) -> Refused:
    with pytest.raises(Refused) as refused:
        patch_script(text)
    return refused.value


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def loss_in(text: str) -> str:
    patched = patch_script(SCRIPT.replace(LINE, text)).text
    return patched[patched.index("loss = timestep_sampler") : patched.index(STEP + "DRAWN")]


def test_options_are_added_after_the_last_argument_not_within_its_comment() -> None:
    call = f"loss = F.mse_loss(\n{STEP}    model_pred,  # b) c\n{STEP}    (target)  # (the noise)\n{STEP})\n"
    assert loss_in(call) == (
        f"loss = timestep_sampler.mean(F.mse_loss(\n{STEP}    model_pred,  # b) c\n"
        f'{STEP}    (target), reduction="none"  # (the noise)\n{STEP}))\n'
    )
    comma = call.replace("(target)  #", "target,  #")
    assert 'target, reduction="none",  # (the noise)\n' in loss_in(comma)


def test_comments_within_a_mean_stay() -> None:
    call = f'loss = torch.mean(\n{STEP}    F.mse_loss(model_pred, target, reduction="none")  # of each\n{STEP})\n'
    assert loss_in(call) == call.replace("torch.mean", "timestep_sampler.mean")
    before = f"loss = torch.mean(  # over all\n{STEP}    (model_pred - target) ** 2\n{STEP})\n"
    assert loss_in(before) == before.replace("torch.mean", "timestep_sampler.mean").replace(f"\n{STEP})", ")")
    losses = f"(\n{STEP}    (model_pred - target) ** 2  # of each\n{STEP})"
    assert loss_in(f"loss = {losses}.mean()\n") == f"loss = timestep_sampler.mean({losses})\n"


def test_a_comment_that_the_patch_would_lose_is_refused() -> None:
    text = SCRIPT.replace(LINE, f"loss = ((model_pred - target) ** 2).mean(  # over all\n{STEP})\n")
    refused = refusal(text)
    assert refused.line == line_of(text, "# over all")
    assert "a comment must not stand within a line that changes, got # over all" in str(refused)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{STEP}optimizer.step()\n", f"{STEP}if accelerator.sync_gradients: optimizer.step()\n"),
        (f"{STEP}optimizer.step()\n{STEP}optimizer.zero_grad()\n", f"{STEP}optimizer.step(); optimizer.zero_grad()\n"),
        (f"{STEP}accelerator.backward(loss)\n", f"{STEP}accelerator.backward(loss); optimizer.step()\n"),
    ],
)
def test_a_step_that_shares_its_line_is_refused(old: str, new: str) -> None:
    text = SCRIPT.replace(old, new)
    assert text != SCRIPT
    refused = refusal(text)
    assert refused.line == line_of(text, new)
    assert str(refused).endswith(f"must stand alone on its line, got {new.strip()}: give it a line of its own")


def test_a_patch_that_would_be_no_python_is_refused_with_the_original_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_step(source: Source, step: object) -> str:
        source.edits[-1] = type(source.edits[-1])(source.edits[-1].start, source.edits[-1].end, "= = (")
        return ""

    monkeypatch.setattr(rewrite, "wrap_step", break_step)
    refused = refusal(SCRIPT)
    assert refused.line == line_of(SCRIPT, "loss = F.mse_loss")
    assert "the patched script would be no Python" in str(refused)


def test_a_prepare_that_shares_its_line_does_not_repeat_what_stands_before() -> None:
    text = SCRIPT.replace("    global_step = 0\n", "    a = 1; b = accelerator.prepare(a)\n    global_step = 0\n")
    assert "    a = 1; b = accelerator.prepare(a)\n    timestep_sampler = ScriptSampler(" in patch_script(text).text


def test_words_about_kairostep_do_not_make_a_script_patched() -> None:
    commented = SCRIPT.replace("    global_step = 0\n", "    global_step = 0  # kairostep\n")
    text = '"""To be tried with kairostep."""\n' + commented
    assert patch_script(text).num_changed == patch_script(SCRIPT).num_changed
    for line in ("import kairostep as ks", "from kairostep import RootLoss", "x = kairostep.RootLoss()"):
        used = SCRIPT.replace("    global_step = 0\n", f"    {line}\n")
        assert refusal(used).line == line_of(used, line)


@pytest.mark.parametrize("divided", ["loss / 4", "loss / args.gradient_accumulation_steps", "loss / n"])
def test_a_loss_divided_in_the_backward_pass_is_the_loss(divided: str) -> None:
    text = SCRIPT.replace("accelerator.backward(loss)", f"accelerator.backward({divided})")
    assert f"accelerator.backward({divided})\n" in patch_script(text).text
    assert "timestep_sampler.mean(" in patch_script(text).text
    by_losses = SCRIPT.replace("accelerator.backward(loss)", "accelerator.backward(loss / loss.max())")
    assert "backward must take one variable" in str(refusal(by_losses))


def test_the_longest_lines_are_wrapped_if_not_all_can_be() -> None:
    """Three calls are too long, and twelve lines leave room for two, which are not the first two."""
    text = SCRIPTS["prior"].replace('reduction="mean"', 'weight=args.chan, reduction="mean"')
    patched = patch_script(text.replace("device=latents.device)", "device=x.device)"))
    assert patched.num_changed == 12
    (draw,) = [line for line in patched.text.splitlines() if len(line) > 119]
    assert "timesteps = timestep_sampler.randint(0, " in draw

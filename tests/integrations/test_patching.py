"""kairostep patch: what it changes in scripts of diffusers' shapes, and what it refuses."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from training_scripts import FLOW, FLOW_LOSS, MSE, RANDINT, SCRIPTS, SNR, script

from kairostep.cli import main
from kairostep.integrations.patching import Refused, patch_script

DRAW = "torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,), device=latents.device)"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_shape_is_patched_by_twelve_lines_that_compile_and_leave_the_rest_alone(name: str) -> None:
    before = SCRIPTS[name]
    patched = patch_script(before, name=f"{name}.py")
    compile(patched.text, name, "exec")
    assert patched.num_changed <= 12
    removed = [line[1:] for line in patched.diff.splitlines()[2:] if line.startswith("-")]
    kept = [line for line in before.splitlines() if line not in removed]
    assert [line for line in patched.text.splitlines() if line in kept] == kept
    assert all(len(line) <= 119 for line in patched.text.splitlines())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_patch_adds_no_finding_of_pyflakes(name: str, tmp_path: Path) -> None:
    found = []
    for text in (SCRIPTS[name], patch_script(SCRIPTS[name]).text):
        (tmp_path / "script.py").write_text(text)
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F", "--output-format=concise"]
        told = subprocess.run([*command, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False).stdout
        found.append(sorted(line.partition(" ")[2] for line in told.splitlines() if line.startswith("script.py")))
    assert found[1] == found[0]


def test_the_diff_of_a_snr_script_reads_as_written_by_hand() -> None:
    diff = patch_script(SCRIPTS["snr"]).diff
    added = [line[1:].strip() for line in diff.splitlines()[2:] if line.startswith("+")]
    assert added == [
        "from kairostep.integrations.diffusers_scripts import ScriptSampler",
        'parser.add_argument("--timestep_sampler", default="root_loss", help="uniform has the script\'s density")',
        "timestep_sampler = ScriptSampler(args.timestep_sampler, accelerator, seed=args.seed)",
        "timesteps = timestep_sampler.randint(",
        "0, noise_scheduler.config.num_train_timesteps, (bsz,), device=latents.device",
        ")",
        'loss = timestep_sampler.mean(F.mse_loss(model_pred.float(), target.float(), reduction="none"))',
        "loss = timestep_sampler.mean(loss, mse_loss_weights)",
        "with timestep_sampler.observe():",
        "optimizer.step()",
    ]


def test_the_diff_of_a_flow_script_drops_the_import_that_nothing_uses() -> None:
    patched = patch_script(SCRIPTS["flow"], sampler="uniform")
    assert "    compute_density_for_timestep_sampling,\n" not in patched.text
    assert "u = timestep_sampler.compute_density_for_timestep_sampling(\n" in patched.text
    assert "loss = timestep_sampler.mean(loss, weighting)\n" in patched.text
    assert 'default="uniform"' in patched.text
    one_line = SCRIPTS["flow"].replace(
        SCRIPTS["flow"][SCRIPTS["flow"].index("(\n    cast") : SCRIPTS["flow"].index(")\n", 400) + 1],
        "compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3",
    )
    assert "import compute_loss_weighting_for_sd3\n" in patch_script(one_line).text


def test_a_density_that_is_the_noise_level_itself_keeps_its_direction() -> None:
    text = SCRIPTS["flow"].replace("                u = compute_density", "                sigmas = compute_density")
    assert "sigmas = timestep_sampler.compute_density_of_sigmas(\n" in patch_script(text).text


def test_a_mask_is_no_weight_and_prior_means_are_of_the_second_half() -> None:
    masked = patch_script(SCRIPTS["mask"]).text
    assert "timestep_sampler.mean((loss * mask).sum([1, 2, 3]) / mask.sum([1, 2, 3]))" in masked
    prior = patch_script(SCRIPTS["prior"]).text
    assert "timestep_sampler.prior.mean(\n" in prior
    assert prior.count("prior.mean") == 1


def test_a_branch_for_predicted_images_passes_its_snr_on() -> None:
    loss = """                if args.prediction_type == "epsilon":
                    loss = F.mse_loss(model_pred.float(), noise.float())  # this could have different weights!
                elif args.prediction_type == "sample":
                    alpha_t = noise_scheduler.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
                    snr_weights = alpha_t / (1 - alpha_t)
                    loss = snr_weights * F.mse_loss(model_pred.float(), latents.float(), reduction="none")
                    loss = loss.mean()
                else:
                    raise ValueError(f"Unsupported prediction type: {args.prediction_type}")
"""
    patched = patch_script(script(RANDINT, loss)).text
    assert 'timestep_sampler.mean(F.mse_loss(model_pred.float(), noise.float(), reduction="none"))  # this' in patched
    assert "loss = timestep_sampler.mean(loss, snr_weights)\n" in patched


def test_a_parser_under_the_main_guard_gets_the_argument() -> None:
    before = SCRIPTS["mse"]
    start, end = before.index("def parse_args"), before.index("SETTINGS = {}")
    guard = """if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
"""
    text = before[:start] + before[end : before.index("if __name__")] + guard + "    main(args)\n"
    assert '"--seed", type=int)\n    parser.add_argument("--timestep_sampler", ' in patch_script(text).text


def test_an_argument_of_some_other_branch_is_no_place_for_ours() -> None:
    text = SCRIPTS["mse"].replace(
        "    args = parser.parse_args(input_args)\n",
        "    if torch.cuda.is_available():\n"
        '        parser.add_argument("--gpu")\n    args = parser.parse_args(input_args)\n',
    )
    patched = patch_script(text).text
    assert patched.index('"--timestep_sampler"') < patched.index("if torch.cuda.is_available()")


def test_the_import_is_sorted_as_the_scripts_are_without_regard_to_capitals() -> None:
    text = SCRIPTS["mse"].replace("from packaging import version\n", "from PIL import Image\n")
    line = "from kairostep.integrations.diffusers_scripts import ScriptSampler\n"
    assert f"import set_seed\n{line}from PIL import Image\n" in patch_script(text).text


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_other_line_ends_stay(end: str) -> None:
    text = SCRIPTS["mse"].replace("\n", end)
    patched = patch_script(text).text
    assert patched.count("\n") == patched.count("\r\n")
    assert patched.replace(end, "\n") == patch_script(SCRIPTS["mse"]).text


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


REFUSALS = {
    "another size": (DRAW, DRAW.replace("(bsz,)", "(bsz, 4)"), "timesteps = torch.randint", "must be (bsz,)"),
    "one for all": (DRAW, DRAW.replace("(bsz,)", "(1,)"), "timesteps = torch.randint", "each sample must have"),
    "a generator": (DRAW, DRAW[:-1] + ", generator=g)", "timesteps = torch.randint", "its own seed"),
    "another draw": (DRAW, "torch.normal(0, 1, (bsz,))", "timesteps = torch.normal", "no draw of timesteps"),
    "sigmas of a class": (
        f"timesteps = {DRAW}",
        "sigmas = noise_scheduler.sample(bsz, 64)",
        "sigmas = noise_scheduler.sample",
        "no draw of timesteps",
    ),
    "drawn twice": (
        "timesteps = timesteps.long()",
        "timesteps = torch.rand((bsz,))",
        "timesteps = torch.rand((bsz,))",
        "must draw once",
    ),
    "another loss": (MSE, MSE.replace("F.mse_loss", "my_loss"), "loss = my_loss", "a mean over the batch is expected"),
    "a sum": (MSE, MSE.replace('"mean"', '"sum"'), "loss = F.mse_loss", "a mean over the batch is expected"),
    "scaled by a variable": (MSE, MSE + "                loss = loss * bsz\n", "loss = loss * bsz", "taken last"),
    "no backward": ("accelerator.backward(loss)", "loss.backward()", "loss.backward()", "accelerator.backward"),
    "no name": ("accelerator.backward(loss)", "accelerator.backward(2 * loss)", "accelerator.backward", "one variable"),
    "no step": ("optimizer.step()", "step_all()", "accelerator.backward", "optimizer.step()"),
    "loaded too soon": (
        "    # Prepare everything.\n",
        "    accelerator.load_state('x')\n",
        "    accelerator.load_state('x'",
        "",
    ),
    "not Python": ("    global_step = 0\n", "    global_step = = 0\n", "    global_step = = 0", "must be Python"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_recognised_is_refused_with_its_line_and_the_change_by_hand(name: str) -> None:
    old, new, at, told = REFUSALS[name]
    text = SCRIPTS["mse"].replace(old, new)
    assert text != SCRIPTS["mse"]
    with pytest.raises(Refused) as refused:
        patch_script(text)
    assert refused.value.line == line_of(text, at)
    assert told in str(refused.value)
    assert str(refused.value).startswith(f"line {refused.value.line}: ")


def test_a_patched_script_is_refused() -> None:
    with pytest.raises(Refused, match="line 8: the script must be as diffusers has it"):
        patch_script(patch_script(SCRIPTS["mse"]).text)


def test_draws_in_two_branches_are_both_replaced() -> None:
    branches = f"""                if args.snr_gamma:
                    timesteps = {DRAW}
                else:
                    timesteps = torch.multinomial(weights, bsz, replacement=True).long()
"""
    patched = patch_script(script(RANDINT.replace(f"                timesteps = {DRAW}\n", branches), MSE)).text
    assert patched.count("timestep_sampler.randint(") == 1
    assert "timesteps = timestep_sampler.multinomial(weights, bsz, replacement=True).long()" in patched


def test_changes_are_told_with_lines_of_the_original() -> None:
    text = script(FLOW, FLOW_LOSS)
    changes = patch_script(text).changes
    assert f"line {line_of(text, 'compute_density_for_timestep_sampling(')}: draws" in " ".join(changes)
    assert len(changes) == 6
    ast.parse(text)


def test_the_command_writes_checks_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original, out = tmp_path / "train.py", tmp_path / "out.py"
    original.write_text(script(RANDINT, SNR))
    main(["patch", str(original), "--check"])
    told = capsys.readouterr().out
    assert "is recognised; a patch changes 10 lines" in told
    assert original.read_text() == script(RANDINT, SNR)
    main(["patch", str(original), "-o", str(out), "--sampler", "loss_second_moment"])
    assert out.read_text() == patch_script(original.read_text(), "loss_second_moment").text
    assert "+++ b/train.py" in capsys.readouterr().out
    main(["patch", str(original)])
    assert original.read_text() == patch_script(script(RANDINT, SNR)).text
    for arguments in ([str(original)], [str(out), "--sampler", "adaptive"], [str(out), "--sampler", "min_snr"]):
        with pytest.raises(SystemExit) as ended:
            main(["patch", *arguments])
        assert ended.value.code == 2

"""Every file in experiments/comparisons can be planned, and the negative controls draw in the wrong places."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from kairostep.comparison.arms import read_arms
from kairostep.comparison.plan import make_plan
from kairostep.experiments import preset
from kairostep.experiments.config import differences, with_overrides
from kairostep.timesteps import LeastNoise, RootLoss, Timesteps

ROOT = Path(__file__).parents[2]
RECIPE = {"learning_rate", "schedule", "warmup_steps", "ema_decay"}
FILES = sorted((ROOT / "experiments" / "comparisons").glob("*.yaml"))


@pytest.fixture(autouse=True)
def importable_controls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let arms name what lies in benchmarks/samplers, as the commands in the files do by PYTHONPATH."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "samplers"))
    yield
    for name in ("permuted", "weighted"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_makes_a_plan_for_each_task(path: Path, tmp_path: Path) -> None:
    file = read_arms(str(path))
    assert file.preset is not None
    assert f"--arms experiments/comparisons/{path.name}" in path.read_text()
    where = {"cifar10": ["--data.path=cifar10.npz"], "images": ["--data.folder=photos"]}
    for task, own in (file.tasks or {"": ()}).items():
        given = {"rates": file.learning_rates, "baseline": file.baseline}
        plan = make_plan(
            tmp_path / task,
            file.preset,
            file.arms,
            [*file.settings, *own, *where.get(preset(file.preset).data.name, [])],
            seeds=(0, 1, 2),
            **given,
        )
        baseline = plan.configs[plan.baseline]
        is_of_preset = path.stem.startswith("preset-")
        assert baseline.sampler.name == (preset(file.preset).sampler.name if is_of_preset else "uniform")
        has_fid = baseline.data.name == "cifar10" and "on a CPU" not in path.read_text()  # of photographs, on a GPU
        assert (baseline.fid_every > 0) == has_fid
        assert len({run.directory for arm in plan.names for run in plan.runs(arm, 0)}) >= len(plan.arms)


@pytest.mark.parametrize("name", [path.stem.removeprefix("preset-") for path in FILES if "preset-" in path.stem])
def test_the_file_of_a_preset_shortens_it_in_proportion_and_looks_for_a_recipe_alone(name: str) -> None:
    path = ROOT / "experiments" / "comparisons" / f"preset-{name}.yaml"
    file = read_arms(str(path))
    assert file.preset == name
    old, *others = (with_overrides(preset(name), [*file.settings, *arm.settings]) for arm in file.arms)
    whole = with_overrides(old, path.read_text().partition("At full length: ")[2].partition("\n")[0].split())
    assert whole.steps == preset(name).steps
    assert old.warmup_steps == whole.warmup_steps * old.steps // whole.steps
    assert old.steps * (1 - old.ema_decay) == pytest.approx(whole.steps * (1 - whole.ema_decay))
    for other in others:
        assert other.warmup_steps * 10 <= other.steps
        assert {line.partition(":")[0] for line in differences(old, other)} <= RECIPE


def test_half_of_the_draws_by_each_density_are_half_of_each() -> None:
    from weighted import MixedRootLoss, ShownRootLoss

    t = (torch.arange(2000) + 0.5) / 2000
    losses = (-3 * t).exp() * (1 + 9 * t)  # an error that falls, times a weighting that rises
    densities = []
    for sampler in (
        RootLoss(loss_weight=lambda t: 1 + 9 * t, warmup=0, refresh=1, gate=1.0),
        ShownRootLoss(warmup=0, refresh=1, gate=1.0),
        MixedRootLoss(loss_weight=lambda t: 1 + 9 * t, warmup=0, refresh=1, gate=1.0),
    ):
        with sampler.observe(torch.zeros(2000, 1), Timesteps(t, torch.ones(2000)), losses):
            pass
        densities.append(sampler.density(20))
    assert_close(densities[2], (densities[0] + densities[1]) / 2, rtol=1e-2, atol=0)  # the weighting varies in a bin


def test_the_arms_are_those_that_each_file_is_about() -> None:
    arms = {path.stem: [arm.name for arm in read_arms(str(path)).arms] for path in FILES}
    assert set(arms) >= {"table1-small", "ablation-S", "what-and-where"}
    assert [name for name in arms["ablation-S"] if name.startswith("S-")] == ["S-1", "S-3", "S-10"]
    assert len(arms["table1-small"]) == 10
    assert sum(name.startswith("root_loss") for name in arms["what-and-where"]) == 6


@pytest.mark.parametrize("original", [RootLoss, LeastNoise])
def test_the_control_is_as_uneven_in_other_bins_and_keeps_the_objective(original: type[RootLoss | LeastNoise]) -> None:
    from permuted import PermutedLeastNoise, PermutedRootLoss

    control = {RootLoss: PermutedRootLoss, LeastNoise: PermutedLeastNoise}[original]
    samplers = [kind(num_bins=10, warmup=1, refresh=1, floor=0.1) for kind in (original, control)]
    t = (torch.arange(1000) + 0.5) / 1000
    for sampler in samplers:
        for _ in range(3):
            sampler.record(t, 1 / (0.01 + t))
    plain, permuted = (sampler.density(10) for sampler in samplers)
    assert not torch.allclose(plain, permuted, atol=1e-3)
    torch.testing.assert_close(plain.sort().values, permuted.sort().values)
    drawn = samplers[1].sample(torch.zeros(4096, 1))
    assert float((drawn.weight * drawn.t).mean()) == pytest.approx(0.5, abs=0.02)

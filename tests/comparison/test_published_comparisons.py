"""Every file in experiments/comparisons can be planned, and the negative controls draw in the wrong places."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kairostep.comparison.arms import read_arms
from kairostep.comparison.plan import make_plan
from kairostep.timesteps import LeastNoise, RootLoss

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments" / "comparisons").glob("*.yaml"))


@pytest.fixture(autouse=True)
def importable_controls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let arms name what lies in benchmarks/samplers, as the commands in the files do by PYTHONPATH."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "samplers"))
    yield
    for name in ("permuted_root_loss", "permuted_least_noise"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_makes_a_plan_for_each_task(path: Path, tmp_path: Path) -> None:
    file = read_arms(str(path))
    assert file.preset == "cifar10-small"
    assert f"--arms experiments/comparisons/{path.name}" in path.read_text()
    for task, own in (file.tasks or {"": ()}).items():
        given = {"rates": file.learning_rates, "baseline": file.baseline}
        plan = make_plan(
            tmp_path / task,
            file.preset,
            file.arms,
            [*file.settings, *own, "--data.path=cifar10.npz"],
            seeds=(0, 1, 2),
            **given,
        )
        assert plan.configs[plan.baseline].sampler.name == "uniform"
        assert plan.configs[plan.baseline].fid_every > 0
        assert len({run.directory for arm in plan.names for run in plan.runs(arm, 0)}) >= len(plan.arms)


def test_the_arms_are_those_that_each_file_is_about() -> None:
    arms = {path.stem: [arm.name for arm in read_arms(str(path)).arms] for path in FILES}
    assert set(arms) >= {"table1-small", "ablation-S", "what-and-where"}
    assert [name for name in arms["ablation-S"] if name.startswith("S-")] == ["S-1", "S-3", "S-10"]
    assert len(arms["table1-small"]) == 10
    assert sum(name.startswith("root_loss") for name in arms["what-and-where"]) == 6


@pytest.mark.parametrize("original", [RootLoss, LeastNoise])
def test_the_control_is_as_uneven_in_other_bins_and_keeps_the_objective(original: type[RootLoss | LeastNoise]) -> None:
    from permuted_least_noise import PermutedLeastNoise
    from permuted_root_loss import PermutedRootLoss

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

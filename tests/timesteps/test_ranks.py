"""Two processes under gloo: equal learned state, different draws, and together what one process does alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from process_groups import run_ranks
from samplers import SAMPLERS, batch, build, build_model, gloo_rank, tilted_losses_of, train_step
from torch.testing import assert_close

import kairostep as ks

NUM_ROWS = 64
ADAPTIVE = tuple(name for name in SAMPLERS if name.startswith("adaptive"))
MIRRORED = ("speed", "speed_v1")  # of two ranks, each has the mirrors of the other's draws
TOO_FAST = ("adaptive_pair_unbiased",)  # its policy runs to its bounds, where rounding shows


def train(name: str, rows: slice, num_steps: int) -> tuple[ks.TimestepSampler, torch.nn.Module, torch.Tensor]:
    model = build_model().double()
    sampler = build(name, model, 7)
    batches = [batch(k, NUM_ROWS).double()[rows] for k in range(num_steps)]
    times = [train_step(sampler, model, x0, tilted_losses_of).t for x0 in batches]
    return sampler, model, torch.stack(times)


def run_rank(rank: int, folder: str) -> None:
    results: dict[str, Any] = {}
    half = slice(rank * NUM_ROWS // 2, (rank + 1) * NUM_ROWS // 2)
    with gloo_rank(rank, folder):
        for name in SAMPLERS:
            sampler, model, times = train(name, half, num_steps=50)
            state = {key: value.clone() for key, value in sampler.state_dict().items()}
            results[name] = {"times": times, "state": state, "density": sampler.density()}
            train_step(sampler, model, batch(99, 20 if rank else 32).double())  # an unequal last batch
            results[name]["after_unequal"] = sampler.state_dict()
    torch.save(results, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run_rank, str(folder))
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("when", ["state", "after_unequal"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_hold_the_same_state(ranks: list[dict[str, Any]], name: str, when: str) -> None:
    first, second = ranks[0][name][when], ranks[1][name][when]
    for key in first:
        assert torch.equal(first[key], second[key]), key
        assert bool(first[key].isfinite().all())
    assert torch.equal(ranks[0][name]["density"], ranks[1][name]["density"])


@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_draw_different_numbers(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = ranks[0][name]["times"], ranks[1][name]["times"]  # (steps, rows)
    assert float((first == second).float().mean()) < 0.01
    around_mean = torch.stack([times - times.mean(1, keepdim=True) for times in (first, second)]).flatten(1)
    correlation = float(torch.corrcoef(around_mean)[0, 1])
    assert correlation < -0.5 if name in MIRRORED else abs(correlation) < 0.1


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in TOO_FAST])
def test_two_ranks_do_what_one_does_with_the_whole_batch(ranks: list[dict[str, Any]], name: str) -> None:
    sampler, _, times = train(name, slice(None), num_steps=50)
    assert_close(torch.cat([rank[name]["times"] for rank in ranks], dim=1), times, rtol=0, atol=1e-6)
    state, expected = ranks[0][name]["state"], sampler.state_dict()
    for key in state:
        assert_close(state[key], expected[key], rtol=2e-6, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
    assert_close(ranks[0][name]["density"], sampler.density(), rtol=1e-5, atol=1e-6)


def test_strata_cover_the_batches_of_both_ranks(ranks: list[dict[str, Any]]) -> None:
    times = torch.cat([rank["uniform"]["times"] for rank in ranks], dim=1)  # (steps, 64)
    strata = (times * NUM_ROWS).floor().long().sort(dim=1).values
    assert bool((strata == torch.arange(NUM_ROWS)).all())


def test_every_timestep_is_swept_by_one_rank_also_with_unequal_batches(ranks: list[dict[str, Any]]) -> None:
    for name in ADAPTIVE:
        before, after = ranks[0][name]["state"]["queue.drops"], ranks[0][name]["after_unequal"]["queue.drops"]
        changed = (before != after).any(1)
        assert int(changed.sum()) <= 1
        assert bool((after[changed] != 0).all())  # a loss drops at every timestep of this problem

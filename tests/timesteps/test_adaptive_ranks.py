"""The adaptive sampler on two gloo ranks: what one rank does with the whole batch, and life inside DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import run_ranks
from samplers import gloo_rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

import kairostep as ks

NUM_ROWS, NUM_STEPS = 32, 40  # 20 updates


def train(rows: slice, sampler: ks.Adaptive) -> Tensor:
    """Train on these rows of each batch in float64, gradients summed over ranks; noise belongs to the rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objective = ks.Objective(ks.FlowProcess(), ks.VELOCITY)
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        x0, noise = torch.randn(2, NUM_ROWS, 4, generator=generator, dtype=torch.float64)[:, rows]

        def loss_at(rows: Tensor, t: Tensor, x0: Tensor = x0, noise: Tensor = noise) -> Tensor:
            return objective(
                lambda xt, time: model(torch.cat([xt, time[:, None]], 1)), x0[rows], t.double(), noise=noise[rows]
            )

        drawn = sampler.sample(x0)
        losses = loss_at(torch.arange(len(x0)), drawn.t)
        optimizer.zero_grad()
        (losses.sum() / NUM_ROWS).backward()
        if dist.is_initialized():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        with sampler.observe(x0, drawn, losses.detach(), loss_at):
            optimizer.step()
    return parameters_to_vector(sampler.policy.parameters()).detach()


def train_in_ddp(rank: int) -> dict[str, Tensor]:
    """Train as a user of DDP would: the wrapped model in the loss, a buffer in it, other data on each rank.

    Probes use the bare model: ranks have unequally many rows of a probe, and DDP sends buffers in every forward.
    """
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, 4))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-2)
    objective = ks.Objective(ks.DiscreteProcess.linear())
    sampler = ks.Adaptive(ks.BetaPolicy.for_input((4,), 16), probing=ks.Probing(every=2), model=wrapped)
    for _ in range(12):
        x0 = torch.randn(16, 4)

        def loss_at(rows: Tensor, t: Tensor, x0: Tensor = x0) -> Tensor:
            return objective(lambda xt, time: model(xt), x0[rows], t)

        drawn = sampler.sample(x0)
        losses = objective(lambda xt, time: wrapped(xt), x0, drawn.t)
        optimizer.zero_grad()
        (losses * drawn.weight).mean().backward()
        with sampler.observe(x0, drawn, losses.detach(), loss_at):
            optimizer.step()
    return {**sampler.state_dict(), "weights": parameters_to_vector(model.parameters()).detach()}


def build(credit: str) -> ks.Adaptive:
    """Return a sampler that sweeps one x0, whose rank does it all, or three, of which a rank has one or two."""
    probing = ks.Probing(every=2, queue_size=8, sweep_x0=3 if credit == "sample" else 1, credit=credit)
    return ks.Adaptive(ks.BetaPolicy.for_input((4,), 16), probing=probing, seed=3)


def run_rank(rank: int, folder: str) -> None:
    half = slice(rank * NUM_ROWS // 2, (rank + 1) * NUM_ROWS // 2)
    with gloo_rank(rank, folder):
        results = {credit: train(half, build(credit)) for credit in ("sample", "batch")}
        torch.save({**results, "ddp": train_in_ddp(rank)}, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run_rank, str(folder))
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("credit", ["sample", "batch"])
def test_two_ranks_end_with_the_policy_of_one(ranks: list[dict[str, Any]], credit: str) -> None:
    alone = train(slice(None), build(credit))
    start = parameters_to_vector(build(credit).policy.parameters()).detach()
    assert float((alone - start).abs().max()) > 0.05  # it did learn
    assert torch.equal(ranks[0][credit], ranks[1][credit])
    assert_close(ranks[0][credit], alone, rtol=0, atol=1e-6)


def test_in_ddp_all_ranks_hold_the_same_state(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks[0]["ddp"], ranks[1]["ddp"]
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key
    assert int(first["num_probes"]) == 6 * 2 * (128 + 2 * 3 * 16)  # the sweep is shared
    assert float(first["reward"].abs().max()) > 0

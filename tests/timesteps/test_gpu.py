"""On a CUDA device: no synchronisation, the draws of the CPU, and replay in a CUDA graph."""

from collections.abc import Iterator

import pytest
import torch
from samplers import SAMPLERS, batch, build, build_model, losses_of, train_step
from torch.testing import assert_close

import kairostep as ks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),  # torch's, once in a process
]
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


@pytest.fixture(autouse=True)
def _waiting_is_an_error() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def teach_on(device: str, name: str, *, waiting: str = "default") -> tuple[ks.TimestepSampler, torch.Tensor]:
    """Return a sampler shown twelve steps on this device, and all it drew (12, 64)."""
    model = build_model().to(device)
    sampler = build(name, model, 0).to(device)
    times = []
    for step in range(12):
        x0 = batch(step).to(device)
        torch.cuda.set_sync_debug_mode(waiting if step else "default")  # the first step may fill caches
        drawn = train_step(sampler, model, x0)
        torch.cuda.set_sync_debug_mode("default")
        times.append(drawn.t)
    return sampler, torch.stack(times)


@every_sampler
def test_sampling_and_observing_never_wait_for_the_device(name: str) -> None:
    teach_on("cuda", name, waiting="error")


@every_sampler
def test_draws_are_those_of_the_cpu(name: str) -> None:
    on_cpu, times = teach_on("cpu", name)
    on_gpu, times_gpu = teach_on("cuda", name)
    num_steps = 1 if name.startswith("adaptive") else None  # Adam follows the sign of the smallest difference
    assert_close(times_gpu.cpu()[:num_steps], times[:num_steps], rtol=0, atol=2e-3)  # where a density is thin
    if num_steps is None:
        assert_close(on_gpu.density().cpu(), on_cpu.density(), rtol=0, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # in inductor
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # which would round what is compared
@pytest.mark.parametrize("name", ["uniform", "logit_normal", "speed", "loss_second_moment", "infonoise", "adaptive"])
def test_compiled_sampling_draws_the_same(name: str) -> None:
    model = build_model().cuda()
    sampler, compiled = (build(name, model).cuda() for _ in range(2))
    sample = torch.compile(compiled.sample, fullgraph=True)
    for step in range(3):
        assert_close(sample(batch(step).cuda()).t, sampler.sample(batch(step).cuda()).t, rtol=0, atol=1e-4)


@every_sampler
def test_a_cuda_graph_replays_fresh_draws(name: str) -> None:
    model = build_model().cuda()
    sampler, reference = (build(name, model, 0).cuda() for _ in range(2))
    x0 = batch(0).cuda()
    sampler.sample(x0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sampler.sample(x0)
    reference.sample(x0)
    for _ in range(3):
        graph.replay()
        assert_close(drawn.t, reference.sample(x0).t)


def test_a_cuda_graph_sees_what_the_policy_learned() -> None:
    sampler = ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(every=1), floor=0.0).cuda()
    x0 = batch(0).cuda()
    sampler.sample(x0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sampler.sample(x0)
    for _ in range(200):
        gradient = torch.tensor([1.0, -1.0], device="cuda")  # toward small a and large b: early times
        sampler.optimizer.step(sampler.policy, gradient, torch.tensor(True, device="cuda"))
    graph.replay()
    assert float(drawn.t.mean()) < 0.2


def test_probes_of_least_noise_never_wait_for_the_device() -> None:
    model = build_model().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    sampler = ks.LeastNoise(optimizer, warmup=1, rows_per_probe=4).cuda()
    for step in range(12):  # probes from step 4 on
        x0 = batch(step).cuda()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        loss_at, drawn = losses_of(model, x0), sampler.sample(x0)
        losses = loss_at(torch.arange(len(x0), device="cuda"), drawn.t)
        (losses * drawn.weight).mean().backward()
        with sampler.observe(x0, drawn, losses.detach(), loss_at):
            optimizer.step()
        optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")
    assert int(sampler.diagnostics()["probe_evaluations"]) == 4 * 8

"""The loss against the same loss written out by hand."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from objective_by_hand import PREDICTIONS, PROCESSES, by_hand, example, network
from torch.testing import assert_close

import kairostep as ks

SHAPES = [(6,), (6, 5), (6, 2, 7), (6, 3, 4, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", PREDICTIONS)
@pytest.mark.parametrize("name", PROCESSES)
def test_losses_are_those_written_by_hand(name, target, shape):
    x0, noise, t = example(shape)
    losses = ks.Objective(PROCESSES[name], PREDICTIONS[target], ks.constant())(network, x0, t, noise=noise)
    assert losses.shape == (6,)
    assert losses.dtype == torch.float64
    assert_close(losses, by_hand(name, target, x0, noise, t)[2], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("target", ["epsilon", "x0", "v", "velocity"])
@pytest.mark.parametrize("name", PROCESSES)
def test_losses_carry_the_weighting(name, target):
    x0, noise, t = example()
    alpha, sigma, losses = by_hand(name, target, x0, noise, t)
    snr = (alpha / sigma) ** 2
    conversion = {"epsilon": 1 / snr, "x0": 1, "v": 1 / (snr + 1), "velocity": 1 / (1 + snr.sqrt()) ** 2}[target]
    weighted = ks.Objective(PROCESSES[name], PREDICTIONS[target], ks.min_snr(5.0))(network, x0, t, noise=noise)
    assert_close(weighted, losses * snr.clamp(max=5) * conversion, rtol=1e-6, atol=1e-9)


def test_default_is_the_plain_error_of_the_noise():
    x0, noise, t = example()
    losses = ks.Objective(PROCESSES["discrete"])(network, x0, t, noise=noise)
    assert_close(losses, by_hand("discrete", "epsilon", x0, noise, t)[2])


def test_vlb_weighting_gives_the_terms_of_the_bound():
    x0, noise, t = example()
    process = PROCESSES["discrete"]
    losses = ks.Objective(process, ks.EPSILON, ks.vlb(process))(network, x0, t, noise=noise)
    assert_close(losses, by_hand("discrete", "epsilon", x0, noise, t)[2] * process.vlb_weight(t))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("discrete", torch.tensor([0, 250, 999])),
        ("flow", torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)),
        ("edm", torch.tensor([0.002, 0.002**0.75 * 80**0.25, 80.0], dtype=torch.float64).log() / 4),
    ],
)
def test_model_is_told_the_time_in_its_own_terms(name, expected):
    told = []

    def model(x, time):
        told.append(time)
        return x

    t = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    ks.Objective(PROCESSES[name], ks.X0)(model, torch.randn(3, 4, dtype=torch.float64), t)
    assert_close(told[0], expected)


def test_model_may_return_an_object_with_a_sample():
    x0, noise, t = example()
    objective = ks.Objective(PROCESSES["flow"], ks.VELOCITY)
    wrapped = objective(lambda x, time: SimpleNamespace(sample=network(x, time)), x0, t, noise=noise)
    assert_close(wrapped, objective(network, x0, t, noise=noise))


def test_conditions_are_passed_on():
    x0, noise, t = example()
    losses = ks.Objective(PROCESSES["flow"], ks.VELOCITY)(network, x0, t, noise=noise, shift=0.3)
    assert_close(losses, by_hand("flow", "velocity", x0, noise, t, shift=0.3)[2])


def test_noise_is_drawn_from_torch_unless_given():
    x0, _, t = example()
    objective = ks.Objective(PROCESSES["discrete"])
    torch.manual_seed(3)
    first, second = objective(network, x0, t), objective(network, x0, t)
    torch.manual_seed(3)
    assert_close(objective(network, x0, t, noise=torch.randn_like(x0)), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROCESSES)
def test_losses_of_a_bfloat16_model_are_float32(name, dtype):
    x0, noise, t = example(dtype=torch.float32)
    objective = ks.Objective(PROCESSES[name], ks.V, ks.min_snr())
    losses = objective(lambda x, time: network(x, time).bfloat16(), x0.to(dtype), t, noise=noise.to(dtype))
    assert losses.dtype == torch.float32
    assert_close(losses, objective(network, x0, t, noise=noise), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("shape", [(), (5,), (6, 1), (1,)])
def test_wrong_shape_of_t_raises(shape):
    x0, _, _ = example()
    with pytest.raises(ValueError, match=r"t must.*\(6,\)"):
        ks.Objective(PROCESSES["flow"], ks.VELOCITY)(network, x0, torch.full(shape, 0.5, dtype=torch.float64))


def test_wrong_shape_of_the_output_raises():
    x0, _, t = example()
    with pytest.raises(ValueError, match=r"\(6, 3, 4, 4\).*\(6, 6, 4, 4\)"):
        ks.Objective(PROCESSES["discrete"])(lambda x, time: torch.cat([x, x], dim=1), x0, t)


@pytest.mark.parametrize("target", PREDICTIONS)
@pytest.mark.parametrize("name", PROCESSES)
def test_a_model_that_knows_the_only_data_point_has_no_loss(name, target):
    x0, _, t = example()
    process, prediction = PROCESSES[name], PREDICTIONS[target]
    alpha, sigma = (f(t).view(-1, 1, 1, 1) for f in (process.alpha, process.sigma))

    def exact(x, time):
        xt = x / process.input_scale(t).view_as(alpha)
        return prediction.target(x0, (xt - alpha * x0) / sigma, alpha, sigma)

    losses = ks.Objective(process, prediction, ks.soft_min_snr())(exact, x0, t)
    assert_close(losses, torch.zeros_like(losses), rtol=0, atol=1e-12)


@pytest.mark.parametrize("target", PREDICTIONS)
@pytest.mark.parametrize("name", PROCESSES)
def test_x0_itself_as_target_changes_nothing(name, target):
    x0, noise, t = example()
    process, prediction = PROCESSES[name], PREDICTIONS[target]
    itself = ks.Objective(process, prediction, target=lambda x0, xt, alpha, sigma: x0)
    assert_close(itself(network, x0, t, noise=noise), ks.Objective(process, prediction)(network, x0, t, noise=noise))


@pytest.mark.parametrize("target", PREDICTIONS)
@pytest.mark.parametrize("name", PROCESSES)
def test_target_replaces_x0_in_what_is_predicted_and_leaves_x_t(name, target):
    x0, noise, t = example()
    process, prediction = PROCESSES[name], PREDICTIONS[target]
    seen = []

    def halved(x0, xt, alpha, sigma):
        seen.append((xt, alpha, sigma))
        return x0 / 2

    losses = ks.Objective(process, prediction, target=halved)(network, x0, t, noise=noise)
    ((xt, alpha, sigma),) = seen
    assert_close(xt, alpha * x0 + sigma * noise)
    implied_noise = noise + alpha / sigma * x0 / 2  # so that x_t = alpha x0 / 2 + sigma implied_noise
    output = network(process.input_scale(t).view_as(alpha) * xt, process.time(t))
    expected = (output - prediction.target(x0 / 2, implied_noise, alpha, sigma)).square().mean((1, 2, 3))
    assert_close(losses, expected)


def test_target_works_where_the_flow_has_no_noise():
    x0, noise, _ = example()
    objective = ks.Objective(PROCESSES["flow"], ks.VELOCITY, target=lambda x0, xt, alpha, sigma: x0)
    losses = objective(network, x0, torch.zeros(6, dtype=torch.float64), noise=noise)
    assert_close(losses, by_hand("flow", "velocity", x0, noise, torch.zeros(6, dtype=torch.float64))[2])


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (ks.EPSILON, lambda snr: snr),
        (ks.X0, lambda snr: torch.ones_like(snr)),
        (ks.V, lambda snr: snr + 1),
        (ks.VELOCITY, lambda snr: (1 + snr.sqrt()) ** 2),
        (ks.EDMProcess(0.6).prediction, lambda snr: (1 / snr + 0.36) * snr / 0.36),
    ],
)
def test_x0_weight_of_the_plain_and_of_the_min_snr_loss(prediction, expected):
    process = ks.FlowProcess()
    t = process.t_at(torch.linspace(-15, 15, 61, dtype=torch.float64))
    snr = process.log_snr(t).exp()
    plain = ks.Objective(process, prediction, ks.constant()).x0_weight(t)
    min_snr = ks.Objective(process, prediction, ks.min_snr(5.0)).x0_weight(t)
    assert_close(plain, expected(snr), rtol=1e-9, atol=0)
    assert_close(min_snr, snr.clamp(max=5), rtol=1e-9, atol=0)


@pytest.mark.parametrize("target", PREDICTIONS)
def test_x0_weight_is_never_nan(target):
    ends = torch.tensor([0, 1e-300, 1 - 1e-16, 1], dtype=torch.float64)
    for weighting in (ks.constant(), ks.min_snr()):
        assert not ks.Objective(ks.FlowProcess(), PREDICTIONS[target], weighting).x0_weight(ends).isnan().any()


@pytest.mark.parametrize("target", PREDICTIONS)
@pytest.mark.parametrize("name", PROCESSES)
def test_loss_is_x0_weight_times_the_error_of_x0(name, target):
    x0, noise, t = example()
    process, prediction = PROCESSES[name], PREDICTIONS[target]
    objective = ks.Objective(process, prediction, ks.p2())
    alpha, sigma = (f(t).view(-1, 1, 1, 1) for f in (process.alpha, process.sigma))
    xt = alpha * x0 + sigma * noise
    output = network(process.input_scale(t).view_as(alpha) * xt, process.time(t))
    error = (prediction.to_x0(output, xt, alpha, sigma) - x0).square().mean((1, 2, 3))
    losses = objective(network, x0, t, noise=noise)
    assert_close(losses, objective.x0_weight(t) * error, rtol=1e-6, atol=1e-9)


def test_losses_carry_gradients_to_the_model_only():
    x0, noise, t = example()
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    losses = ks.Objective(PROCESSES["flow"], ks.X0, ks.min_snr())(network, x0, t, noise=noise, shift=shift)
    (gradient,) = torch.autograd.grad(losses[0], shift)
    snr = ((1 - t[0]) / t[0]) ** 2
    output = network((1 - t[0]) * x0[:1] + t[0] * noise[:1], t[:1])
    assert_close(gradient, snr.clamp(max=5) * 2 * (output - x0[:1]).mean())


@pytest.mark.parametrize("prediction", [ks.EPSILON, ks.X0, ks.V], ids=["epsilon", "x0", "v"])
def test_reweighting_turns_any_loss_into_the_bound(prediction: ks.Prediction) -> None:
    process = ks.DiscreteProcess.linear()
    t = (torch.arange(0, 1000, 50, dtype=torch.float64) + 0.5) / 1000
    objective = ks.Objective(process, prediction, ks.min_snr())
    log_snr = process.log_snr(t)
    total = objective.reweighting(ks.vlb(process))(t) * ks.min_snr()(log_snr, prediction)
    in_epsilon = total / prediction.log_x0_error(log_snr).exp() * ks.EPSILON.log_x0_error(log_snr).exp()
    torch.testing.assert_close(in_epsilon, process.vlb_weight(t))


def test_steps_integers_and_wrong_arguments_are_refused_with_the_fix() -> None:
    objective, x0 = ks.Objective(ks.DiscreteProcess.linear()), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"pass drawn\.t, not drawn\.index"):
        objective(lambda xt, time: xt, x0, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"scale images to \[-1, 1\] first"):
        objective(lambda xt, time: xt, x0.to(torch.uint8), torch.rand(3))
    with pytest.raises(ValueError, match=r"prediction must be ks\.EPSILON"):
        ks.Objective(ks.FlowProcess(), "velocity")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"call its maker, as in ks.min_snr\(\)"):
        ks.Objective(ks.FlowProcess(), ks.V, ks.min_snr)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="zero terminal SNR"):
        ks.vlb(ks.DiscreteProcess.linear().with_zero_terminal_snr())


def test_a_model_may_return_a_tuple_and_an_objective_can_be_pickled() -> None:
    x0, t, noise = torch.randn(3, 4), torch.rand(3), torch.randn(3, 4)
    for weighting in (ks.constant(), ks.min_snr(), ks.p2(), ks.debias(), ks.edm(), ks.soft_min_snr()):
        objective = pickle.loads(pickle.dumps(ks.Objective(ks.DiscreteProcess.linear(), ks.V, weighting)))
        plain = objective(lambda xt, time: 2 * xt, x0, t, noise=noise)
        torch.testing.assert_close(objective(lambda xt, time: (2 * xt,), x0, t, noise=noise), plain)


def test_a_single_number_is_no_batch():
    with pytest.raises(ValueError, match=r"x0 must be a batch \(B, ...\), got a single number: pass x0\[None\]"):
        ks.Objective(ks.FlowProcess(), ks.VELOCITY)(network, torch.tensor(0.5), torch.tensor(0.5))


def test_numbers_as_samples_train_with_a_sampler():
    x0, sampler = torch.randn(16, generator=torch.Generator().manual_seed(0)), ks.RootLoss()
    drawn = sampler.sample(x0)
    pairs = ks.antithetic_pairs(ks.FlowProcess(), x0, drawn)
    losses = ks.Objective(ks.FlowProcess(), ks.VELOCITY)(network, x0[pairs.rows], drawn.t, noise=pairs.noise)
    assert losses.shape == (16,)
    with sampler.observe(x0, drawn, losses):
        pass

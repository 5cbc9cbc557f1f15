"""A model that a sampler was told of belongs to the caller: no copy of the sampler takes it along."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from problem import Problem, data
from torch import nn

import kairostep as ks

BUILDERS: dict[str, Callable[[nn.Module], ks.TimestepSampler]] = {
    "adaptive": lambda model: ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(every=1), model=model),
}


class Uncopied(nn.Sequential):
    """A model that can be neither deep-copied nor pickled."""

    def __deepcopy__(self, memo: object) -> nn.Module:
        raise AssertionError("the model was copied")

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        raise AssertionError("the model was pickled")


def saved_and_loaded(sampler: ks.TimestepSampler) -> ks.TimestepSampler:
    file = io.BytesIO()
    torch.save(sampler, file)
    file.seek(0)
    loaded: ks.TimestepSampler = torch.load(file, weights_only=False)
    return loaded


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda s: pickle.loads(pickle.dumps(s)), "torch.save": saved_and_loaded}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("name", BUILDERS)
def test_copies_leave_the_model_behind_and_keep_what_was_learned(
    name: str, copied: Callable[[ks.TimestepSampler], ks.TimestepSampler]
) -> None:
    problem = Problem()
    problem.model = Uncopied(*problem.model)
    sampler = BUILDERS[name](problem.model)
    problem.step(sampler, data(0))
    other = copied(sampler)
    state, other_state = sampler.state_dict(), other.state_dict()
    assert all(torch.equal(state[key], other_state[key]) for key in state)
    assert torch.equal(sampler.density(), other.density())
    assert torch.equal(sampler.sample(data(1)).t, other.sample(data(1)).t)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_copy_says_once_that_it_has_no_model_and_takes_one(name: str) -> None:
    problem = Problem()
    sampler, modes = BUILDERS[name](problem.model), []
    problem.model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    twice = copy.deepcopy(copy.deepcopy(sampler))
    with pytest.warns(UserWarning, match=r"copies leave the model behind.*sampler\.set_model\(model\)"):
        problem.step(twice, data(0))
    problem.step(twice, data(1))  # once is enough: a second warning would be an error
    assert all(modes)
    named = copy.deepcopy(sampler)
    named.set_model(problem.model)  # type: ignore[operator]
    modes.clear()
    problem.step(named, data(0))
    assert modes[0]  # training
    assert not any(modes[1:])  # probes


def test_a_sampler_without_a_model_has_copies_without_a_word() -> None:
    problem = Problem()
    problem.step(copy.deepcopy(ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(every=1))), data(0))


def test_a_copy_of_gradient_variance_leaves_the_parameters_behind_and_says_so() -> None:
    problem = Problem()
    sampler = ks.GradientVariance(problem.model.parameters(), every=1)
    problem.step(sampler, data(0))
    size = sum(p.numel() for p in problem.model.parameters())
    assert len(pickle.dumps(sampler)) < len(pickle.dumps(ks.GradientVariance([nn.Parameter(torch.zeros(size))]))) + 500
    other = copy.deepcopy(sampler)
    assert torch.equal(sampler.density(), other.density())
    with pytest.raises(RuntimeError, match=r"leave the parameters of the model behind: make a GradientVariance"):
        problem.step(other, data(1))
    fresh = ks.GradientVariance(problem.model.parameters(), every=1)
    fresh.load_state_dict(other.state_dict())
    problem.step(fresh, data(1))

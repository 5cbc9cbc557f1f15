"""Lightning: a sampler in a callback draws in training_step, observes the optimizer's step and is in the checkpoint."""

import warnings
from pathlib import Path

import pytest
import torch
from denoiser import Denoiser, assert_same, fit, loader, trainer_of
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from small_problem import NUM_ROWS, Make, losses_of, make_adaptive, make_root_loss, make_uniform
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

import kairostep as ks
from kairostep.integrations.lightning import TimestepSampling

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated"),  # Lightning on torch 2.13
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", logger="lightning.pytorch")


def test_uniform_gives_the_losses_and_weights_of_the_module_without_it(tmp_path: Path) -> None:
    class Plain(Denoiser):
        def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
            losses = losses_of(self.network, x, self.sampling.sampler.sample(x).t)  # stands for torch.rand
            self.losses.append(losses.detach())
            return losses.mean()

    found = fit(Denoiser(make_uniform), tmp_path, 8, accumulate_grad_batches=2)
    plain = fit(Plain(make_uniform), tmp_path, 8, accumulate_grad_batches=2, callbacks=[])
    assert torch.equal(torch.stack(found.losses), torch.stack(plain.losses))
    assert_same(found.state_dict(), plain.state_dict())


@pytest.mark.parametrize("make", [make_root_loss, make_adaptive])
def test_a_step_is_the_hand_written_one(make: Make, tmp_path: Path) -> None:
    found = fit(Denoiser(make), tmp_path, 10, gradient_clip_val=0.5)
    model = Denoiser(make)
    sampler, optimizer = model.sampling.sampler, model.configure_optimizers()
    for x in loader(10):
        drawn = sampler.sample(x)
        losses = losses_of(model.network, x, drawn.t)
        optimizer.zero_grad()
        (losses * drawn.weight).mean().backward()
        with sampler.observe(x, drawn, losses.detach(), lambda rows, t, x=x: losses_of(model.network, x[rows], t)):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert_same(found.sampling.sampler.state_dict(), sampler.state_dict())
    assert_same(found.state_dict(), model.state_dict())


def test_probes_see_the_weights_before_and_after_the_step(tmp_path: Path) -> None:
    model = fit(Denoiser(make_adaptive), tmp_path, 1)
    first, last = model.probed[0][1], model.probed[-1][1]
    start = Denoiser(make_adaptive).network.weight
    assert torch.equal(first, start)
    assert torch.equal(last, model.network.weight)
    assert not torch.equal(first, last)


def test_a_step_of_the_optimizer_teaches_the_losses_of_all_its_micro_batches(tmp_path: Path) -> None:
    model = fit(Denoiser(make_root_loss), tmp_path, 7, accumulate_grad_batches=3)  # the last batch is a step of its own
    alone = make_root_loss(model.network)
    for step in (slice(0, 3), slice(3, 6), slice(6, 7)):
        alone.record(torch.cat(model.times[step]), torch.cat(model.losses[step]))
    assert model.sampling.sampler.steps.num_steps == 3
    assert torch.equal(model.sampling.sampler.squares.read(), alone.squares.read())


@pytest.mark.parametrize("make", [make_root_loss, make_adaptive])
def test_a_checkpoint_goes_on_bitwise(make: Make, tmp_path: Path) -> None:
    whole, second = Denoiser(make), Denoiser(make)
    for model, resumed_from in ((whole, None), (second, tmp_path / "step=8.ckpt")):
        checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        options = {"enable_checkpointing": True, "max_epochs": 3}
        trainer = trainer_of(model, tmp_path, callbacks=[checkpoint, model.sampling], **options)
        trainer.fit(model, loader(4), ckpt_path=resumed_from, weights_only=True)
    assert torch.equal(torch.stack(second.times), torch.stack(whole.times)[8:])
    assert_same(second.sampling.sampler.state_dict(), whole.sampling.sampler.state_dict())
    assert_same(second.state_dict(), whole.state_dict())
    untrained = make(nn.Linear(4, 3)).state_dict()
    learned = {n for n, v in whole.sampling.sampler.state_dict().items() if not torch.equal(v, untrained[n])}
    assert {"table.rows", "optimizer.num_updates"} & learned


def test_the_sampler_is_no_part_of_the_module(tmp_path: Path) -> None:
    model = Denoiser(make_adaptive)
    assert set(model.state_dict()) == {"network.weight", "network.bias"}
    fit(model, tmp_path, 2)
    assert len(list(model.parameters())) == 2


def test_probes_run_in_the_trainers_precision(tmp_path: Path) -> None:
    model = fit(Denoiser(make_adaptive), tmp_path, 2, precision="bf16-mixed")
    assert {autocast for autocast, _ in model.probed} == {True}
    assert {autocast for autocast, _ in fit(Denoiser(make_adaptive), tmp_path, 2).probed} == {False}


def test_a_step_that_the_scaler_skips_earns_nothing(tmp_path: Path) -> None:
    model = Denoiser(make_adaptive)
    model.scale = 1e38  # the gradient overflows, the losses do not
    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    fit(model, tmp_path, 1, plugins=[precision])
    assert torch.equal(model.network.weight, Denoiser(make_adaptive).network.weight)
    assert model.sampling.sampler.steps.num_steps == 1
    assert torch.equal(model.sampling.sampler.reward, torch.zeros(2))


def test_the_sampler_follows_the_module_to_its_device(tmp_path: Path) -> None:
    model = Denoiser(make_root_loss)
    model.sampling.on_fit_start(trainer_of(model, tmp_path), model.to("meta"))
    assert model.sampling.sampler.table.rows.device.type == "meta"


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_skipped_batch_is_not_learned_from(tmp_path: Path) -> None:
    class Skipping(Denoiser):
        def training_step(self, x: Tensor, batch_idx: int) -> Tensor | None:
            if batch_idx == 1:
                self.sampling.sample(x)
                return None
            return super().training_step(x, batch_idx)

    model = fit(Skipping(make_root_loss), tmp_path, 4)
    assert model.sampling.sampler.steps.num_steps == 3
    assert int(model.sampling.sampler.draws.step) == 4


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_skipped_after_its_loss_belongs_to_no_step(tmp_path: Path) -> None:
    class Skipping(Denoiser):
        def training_step(self, x: Tensor, batch_idx: int) -> Tensor | None:
            loss = super().training_step(x, batch_idx)
            return None if batch_idx == 1 else loss

    model = fit(Skipping(make_root_loss), tmp_path, 4, accumulate_grad_batches=2)
    alone = make_root_loss(model.network)
    alone.record(model.times[0], model.losses[0])
    alone.record(torch.cat(model.times[2:]), torch.cat(model.losses[2:]))
    assert torch.equal(model.sampling.sampler.squares.read(), alone.squares.read())


# What is refused


def test_a_callback_that_no_trainer_knows_is_missed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"L.Trainer\(callbacks=\[sampling\]\)"):
        fit(Denoiser(make_root_loss), tmp_path, 1, callbacks=[])


def test_losses_that_are_not_shown_are_missed(tmp_path: Path) -> None:
    class Forgetful(Denoiser):
        def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
            return losses_of(self.network, x, self.sampling.sample(x).t).mean()

    with pytest.raises(RuntimeError, match=r"return sampling.loss\(x, drawn, losses\)"):
        fit(Forgetful(make_root_loss), tmp_path, 1)


def test_what_asks_for_losses_must_be_given_them(tmp_path: Path) -> None:
    class WithoutLossAt(Denoiser):
        def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
            drawn = self.sampling.sample(x)
            return self.sampling.loss(x, drawn, losses_of(self.network, x, drawn.t))

    with pytest.raises(ValueError, match=r"Adaptive asks for losses at other times: .*loss_at\(rows, t\)"):
        fit(WithoutLossAt(make_adaptive), tmp_path, 1)
    assert fit(WithoutLossAt(make_root_loss), tmp_path, 2).sampling.sampler.steps.num_steps == 2


def test_losses_that_are_not_one_per_sample_are_refused(tmp_path: Path) -> None:
    class Unreduced(Denoiser):
        def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
            drawn = self.sampling.sample(x)
            return self.sampling.loss(x, drawn, x * self.network.weight.sum())

    with pytest.raises(ValueError, match=r"one value per sample, \(16,\), got \(16, 3\)"):
        fit(Unreduced(make_uniform), tmp_path, 1)


def test_manual_optimization_is_refused(tmp_path: Path) -> None:
    model = Denoiser(make_root_loss)
    model.automatic_optimization = False
    with pytest.raises(ValueError, match=r"needs automatic optimization.*with sampling.sampler.observe"):
        fit(model, tmp_path, 1)


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    class Two(Denoiser):
        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.Adam(self.parameters())]

    with pytest.raises(RuntimeError, match="multiple optimizers"):  # by Lightning itself
        fit(Two(make_root_loss), tmp_path, 1)


def test_an_optimizer_that_runs_its_closure_again_is_refused(tmp_path: Path) -> None:
    class WithLBFGS(Denoiser):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    with pytest.raises(RuntimeError, match="must run its closure once per step"):
        fit(WithLBFGS(make_root_loss), tmp_path, 1)


def test_a_failed_step_leaves_the_sampler_usable(tmp_path: Path) -> None:
    class Failing(Denoiser):
        fails = True

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            if self.fails:
                raise OSError("the disk is full")

    model = Failing(make_adaptive)
    with pytest.raises(OSError, match="the disk is full"):
        fit(model, tmp_path, 1)
    assert int(model.sampling.sampler.optimizer.num_updates) == 0
    model.fails = False
    fit(model, tmp_path, 2)
    assert int(model.sampling.sampler.optimizer.num_updates) == 1


@pytest.mark.parametrize("error", [OSError("the disk is full"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_step_teaches_nothing(error: BaseException, tmp_path: Path) -> None:
    class Failing(Denoiser):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            raise error

    model = Failing(make_root_loss)
    expected = OSError if isinstance(error, OSError) else SystemExit
    with pytest.raises(expected):
        fit(model, tmp_path, 1)
    assert int(model.sampling.sampler.squares.num_seen.sum()) == 0
    assert model.sampling.sampler.steps.num_steps == 0


def test_only_samplers_are_taken() -> None:
    with pytest.raises(ValueError, match="must be a kairostep sampler"):
        TimestepSampling(nn.Linear(1, 1))
    sampling = TimestepSampling(ks.Uniform())
    x = torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match="none is going on"):
        sampling.loss(x, sampling.sample(x), torch.zeros(2))
    assert_close(sampling.sampler.density(2), torch.tensor([0.5, 0.5]))


def test_the_checkpoint_of_another_sampler_is_refused(tmp_path: Path) -> None:
    found = TimestepSampling(ks.Uniform())
    with pytest.raises(ValueError, match="the checkpoint must hold the state of a LogitNormal"):
        TimestepSampling(ks.LogitNormal()).load_state_dict(found.state_dict())


def test_a_checkpoint_without_the_callback_says_that_the_sampler_starts_afresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Plain(Denoiser):
        def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
            return losses_of(self.network, x, torch.full((len(x),), 0.5)).mean()

    caplog.set_level("WARNING", logger="kairostep")
    plain = Plain(make_uniform)
    trainer = trainer_of(plain, tmp_path, callbacks=[], max_epochs=1)
    trainer.fit(plain, loader(2))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    model = Denoiser(make_root_loss)
    trainer_of(model, tmp_path, max_epochs=2).fit(
        model, loader(2), ckpt_path=tmp_path / "plain.ckpt", weights_only=True
    )
    assert "holds no timestep sampler: RootLoss starts afresh" in caplog.text


class Halves(Denoiser):
    """Draws for the two halves of a batch apart."""

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss of both halves."""
        total = torch.zeros(())
        for half in x.chunk(2):
            drawn = self.sampling.sample(half)
            total = total + self.sampling.loss(half, drawn, losses_of(self.network, half, drawn.t)) / 2
        return total


def test_a_training_step_may_draw_several_times(tmp_path: Path) -> None:
    model = fit(Halves(make_root_loss), tmp_path, 6, accumulate_grad_batches=2)
    assert int(model.sampling.sampler.squares.num_seen.sum()) == 6 * NUM_ROWS
    assert model.sampling.sampler.steps.num_steps == 3


def test_a_draw_without_its_losses_beside_one_with_them_is_named(tmp_path: Path) -> None:
    class Forgetful(Denoiser):
        def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
            self.sampling.sample(x)
            return super().training_step(x, batch_idx)

    with pytest.raises(RuntimeError, match="training_step did not show them"):
        fit(Forgetful(make_root_loss), tmp_path, 1)


def test_a_sampler_that_reads_the_optimizer_learns_of_it(tmp_path: Path) -> None:
    model = fit(Denoiser(lambda network: ks.LeastNoise(num_bins=4, warmup=1)), tmp_path, 20)
    assert int(model.sampling.sampler.num_probes) > 0


class Tuned(Denoiser):
    """What the tuner changes are attributes."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.lr, self.batch_size = 0.05, 4

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return batches of the tuned size."""
        return DataLoader(torch.randn(64, 3), self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return gradient descent at the tuned rate."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("tuned", ["rate", "batch size"])
def test_trial_steps_of_the_tuner_teach_nothing(tuned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Tuned(make_root_loss)
    trainer = trainer_of(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        if tuned == "rate":
            Tuner(trainer).lr_find(model, num_training=4)
        else:
            Tuner(trainer).scale_batch_size(model, steps_per_trial=2, max_trials=2)
    assert model.sampling.sampler.steps.num_steps == 0
    trainer.fit(model)
    assert model.sampling.sampler.steps.num_steps > 0
    assert int(model.sampling.sampler.squares.num_seen.sum()) > 0

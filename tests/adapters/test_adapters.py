"""Training with the real libraries, interrupted in the middle of an epoch: it ends with the bits of an unbroken run.

`make adapters-test` installs the libraries and runs this.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make adapters-test")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from muster.checkpoint import Checkpoint, CheckpointError, ShardedSampler  # noqa: E402
from muster.checkpoint.testing.agent_in_thread import AgentInThread  # noqa: E402
from muster.checkpoint.training import loop  # noqa: E402
from muster.checkpoint.training.loop import AFTER_LAST_STEP  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.long,
    pytest.mark.filterwarnings("default"),  # those of the libraries are their own business
]

torch.set_num_threads(1)
STEPS, KEPT_STEPS, ACCUMULATION, SAMPLES = 9, 4, 2, 22
"""Three steps of eight samples make an epoch, so the break is in the second one."""


class Crash(Exception):
    """The process dies here."""


def sampler() -> ShardedSampler:
    return ShardedSampler(SAMPLES, batch_size=4, accumulation=ACCUMULATION, seed=1)


def loader(of: ShardedSampler, **options: Any) -> Any:
    return DataLoader(Points(), batch_sampler=of, generator=torch.Generator(), **options)  # type: ignore[var-annotated]


class Points:
    """Samples by their number, as dicts, which all libraries understand."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        x = torch.tensor([number / SAMPLES, 1.0])
        return {"x": x, "labels": x[0] * 3}


class Net(nn.Module):
    """A model as transformers' Trainer wants it. Its dropout shows whether random generators go on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, x: Any, labels: Any, **_: Any) -> dict[str, Any]:
        return {"loss": nn.functional.mse_loss(self.layers(x).squeeze(1), labels)}


def bits(model: Any) -> dict[str, bytes]:
    return {name: value.detach().numpy().tobytes() for name, value in model.state_dict().items()}


def straight_and_broken(train: Any, agent: AgentInThread) -> tuple[Any, Any]:
    """The weights of an unbroken run, and of one whose process dies after its fourth step.

    `train(seed, link, crash)` trains a new model; `crash(step)` is called after each step.
    """

    def crash(step: int) -> None:
        agent.await_committed(step)
        if step == KEPT_STEPS:
            raise Crash

    straight = train(1, None, lambda step: None)
    with pytest.raises(Crash):
        train(1, agent.connect(), crash)
    steps: list[int] = []
    broken = train(99, agent.connect(), steps.append)
    assert steps == list(range(KEPT_STEPS + 1, STEPS + 1))
    return straight, broken


def lightning_trainer(folder: Path, **options: Any) -> Any:
    """A trainer on one CPU that writes nothing by itself."""
    import lightning.pytorch as lightning

    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=ACCUMULATION,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


def test_lightning(agent: AgentInThread, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed: make adapters-test")
    from muster.checkpoint.adapters.lightning import MusterCallback

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(**batch)["loss"]

        def validation_step(self, batch: Any, number: int) -> None:
            self.net(**batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class AfterStep(lightning.Callback):  # type: ignore[name-defined,misc]
        def __init__(self, call: Any) -> None:
            self.call, self.seen = call, 0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.seen = trainer.global_step

        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step > self.seen:
                self.seen = trainer.global_step
                self.call(self.seen)

    def train(seed: int, link: Any, after_step: Any) -> Any:
        torch.manual_seed(seed)
        module, data = Module(), sampler()
        callbacks = [MusterCallback(sampler=data, link=link), AfterStep(after_step)]
        trainer = lightning_trainer(tmp_path, max_steps=STEPS, callbacks=callbacks)
        trainer.fit(module, loader(data), DataLoader(Points(), batch_size=4))  # type: ignore[arg-type,var-annotated]
        assert trainer.global_step == STEPS
        assert trainer.current_epoch == 3
        return bits(module)

    straight, broken = straight_and_broken(train, agent)
    assert broken == straight


def test_the_last_step_of_lightnings_epochs_is_the_last_one(agent: AgentInThread, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed: make adapters-test")
    from muster.checkpoint.adapters.lightning import MusterCallback

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> Any:
            assert AFTER_LAST_STEP not in agent.declared
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    data = sampler()
    trainer = lightning_trainer(tmp_path, max_epochs=2, callbacks=[MusterCallback(sampler=data, link=agent.connect())])
    trainer.fit(Module(), loader(data))
    agent.await_committed(trainer.global_step)
    assert AFTER_LAST_STEP in agent.declared


def test_a_further_rank_has_the_progress_of_the_others(
    agent: AgentInThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning.pytorch", reason="lightning is not installed: make adapters-test")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make adapters-test")
    from muster.checkpoint.adapters.lightning import _Loops
    from muster.checkpoint.adapters.transformers import _Progress

    def made() -> Any:
        trainer = lightning_trainer(tmp_path)
        state = transformers.TrainerState()
        return trainer.fit_loop, state, {"loops": _Loops(trainer.fit_loop), "trainer": _Progress(state)}

    loops, state, states = made()
    checkpoint = Checkpoint(**states, link=agent.connect())
    checkpoint.restore()
    for step in (1, 2):
        loops.epoch_progress.current.processed = state.global_step = step
        state.log_history.append({"loss": 1.0 / step})
        checkpoint.step(step)
        agent.await_committed(step)
    checkpoint.close()
    monkeypatch.setattr(loop, "rank_and_world_size", lambda: (1, 2))
    loops, state, states = made()
    checkpoint = Checkpoint(**states, link=agent.connect(further_rank=1))
    assert checkpoint.restore() == 2
    assert loops.epoch_progress.current.processed == 2
    assert (state.global_step, state.log_history) == (2, [{"loss": 1.0}, {"loss": 0.5}])
    checkpoint.close()


def test_transformers(agent: AgentInThread, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make adapters-test")
    from muster.checkpoint.adapters.transformers import MusterCallback

    class AfterStep(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def __init__(self, call: Any) -> None:
            self.call = call

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.call(state.global_step)

    class ShardedTrainer(transformers.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            return loader(data, collate_fn=self.data_collator)

    data = sampler()

    def train(seed: int, link: Any, after_step: Any) -> Any:
        nonlocal data
        torch.manual_seed(seed)
        model, data = Net(), sampler()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            learning_rate=1e-2,
            gradient_accumulation_steps=ACCUMULATION,
            seed=seed,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            eval_strategy="steps",
            eval_steps=3,  # not after the step that is kept: an evaluation draws random numbers, and is not repeated
            disable_tqdm=True,
        )
        trainer = ShardedTrainer(
            model,
            arguments,
            train_dataset=Points(),
            eval_dataset=Points(),
            callbacks=[MusterCallback(sampler=data, link=link), AfterStep(after_step)],
        )
        trainer.train()
        assert trainer.state.global_step == STEPS
        assert trainer.state.epoch == pytest.approx(3)
        return bits(model)

    straight, broken = straight_and_broken(train, agent)
    assert broken == straight


@pytest.mark.parametrize("epoch_end", ["carry", "drop", "pad"])
def test_a_number_of_epochs_is_that_of_an_unbroken_run(agent: AgentInThread, tmp_path: Path, epoch_end: Any) -> None:
    """Of transformers. Four batches make a step, so that some epochs have one step, and others two."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make adapters-test")
    from muster.checkpoint.adapters.transformers import MusterCallback

    class Stop(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            agent.await_committed(state.global_step)
            control.should_training_stop |= state.global_step == 2 and not is_restored

    class ShardedTrainer(transformers.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            return loader(data, collate_fn=self.data_collator)

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=3,
        gradient_accumulation_steps=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    for is_restored in (False, True):
        data = ShardedSampler(SAMPLES, batch_size=4, accumulation=4, epoch_end=epoch_end)
        callbacks = [MusterCallback(sampler=data, link=agent.connect()), Stop()]
        trainer = ShardedTrainer(Net(), arguments, train_dataset=Points(), callbacks=callbacks)
        if epoch_end == "pad":
            with pytest.raises(CheckpointError, match="a step of fewer batches than 4"):
                trainer.train()
            continue
        trainer.train()
        steps = 3 * SAMPLES // 16 + 1 if epoch_end == "carry" else 3
        assert trainer.state.global_step == (steps if is_restored else 2)


def test_accelerate(agent: AgentInThread) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make adapters-test")
    from muster.checkpoint.adapters.accelerate import prepared_checkpoint

    def train(seed: int, link: Any, after_step: Any) -> Any:
        torch.manual_seed(seed)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        net, data = Net(), sampler()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
        checkpoint = prepared_checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, sampler=data, link=link)
        done = checkpoint.restore()
        while done < STEPS:
            for batch in loader(data):
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    done += 1
                    checkpoint.step(done, final=done == STEPS)
                    after_step(done)
                    if done == STEPS:
                        break
        return bits(net)

    straight, broken = straight_and_broken(train, agent)
    assert broken == straight


def test_states_of_accelerate_are_those_of_torch(agent: AgentInThread) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make adapters-test")
    from muster.checkpoint.adapters.accelerate import unwrapped

    optimizer = torch.optim.SGD(Net().parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    prepared = accelerate.Accelerator(cpu=True).prepare(optimizer, scheduler)
    assert [unwrapped(value) for value in prepared] == [optimizer, scheduler]
    checkpoint = Checkpoint(scheduler=unwrapped(prepared[1]))
    assert not checkpoint._states.per_rank


def test_the_gradient_scaler_of_accelerate_is_kept() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make adapters-test")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make adapters-test")
    from muster.checkpoint.adapters.accelerate import prepared_checkpoint
    from muster.checkpoint.adapters.transformers import MusterCallback

    accelerate.Accelerator(cpu=True)  # on CPUs it makes no scaler by itself
    scaler, net = torch.amp.GradScaler("cpu"), Net()
    optimizer = accelerate.optimizer.AcceleratedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), scaler=scaler)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer)
    assert prepared_checkpoint(model=net, optimizer=optimizer)._states.shared["scaler"] is scaler
    own = torch.amp.GradScaler("cpu")
    assert prepared_checkpoint(model=net, optimizer=optimizer, scaler=own)._states.shared["scaler"] is own
    callback = MusterCallback()
    arguments = SimpleNamespace(gradient_accumulation_steps=1)
    callback.on_train_begin(
        arguments, transformers.TrainerState(), None, model=net, optimizer=optimizer, lr_scheduler=scheduler
    )
    assert callback._checkpoint is not None
    assert callback._checkpoint._states.shared["scaler"] is scaler

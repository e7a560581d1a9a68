"""Two ranks that train with a library's own distributed training. test_adapters_over_ranks.py runs it.

The job: {"library", "out", "seed", "halt_after": the step after which the ranks wait to be killed; 0: none}. Each rank
writes its weights and the steps that it has made to out/RANK.pt.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from muster.checkpoint import ShardedSampler
from muster.checkpoint.testing.rank_processes import run_ranks
from muster.checkpoint.training.states import inner_tensors

STEPS, ACCUMULATION, SAMPLES, WORLD = 9, 2, 44, 2


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


class Run:
    """One rank's run: its data, and what is done after each step."""

    def __init__(self, rank: int, job: dict[str, Any]) -> None:
        self.steps: list[int] = []
        self.out = Path(job["out"])
        self._rank, self._halt_after = rank, job["halt_after"]
        self.sampler = ShardedSampler(
            SAMPLES, batch_size=4, accumulation=ACCUMULATION, seed=1, rank=rank, num_replicas=WORLD
        )
        torch.manual_seed(job["seed"] + rank)

    def net(self) -> Net:
        """The model; the dropout of each rank is its own."""
        state = torch.get_rng_state()
        torch.manual_seed(5)
        net = Net()
        torch.set_rng_state(state)
        return net

    def loader(self, **options: Any) -> Any:
        return DataLoader(Points(), batch_sampler=self.sampler, generator=torch.Generator(), **options)  # type: ignore[var-annotated]

    def batch(self) -> Any:
        """A batch for the warmup."""
        return torch.utils.data.default_collate([Points()[number] for number in range(4)])

    def after_step(self, step: int) -> None:
        self.steps.append(step)
        if step == self._halt_after:
            signal.pause()  # until it is killed

    def end(self, net: nn.Module) -> None:
        weights = {name: inner_tensors.local_tensor(value) for name, value in net.state_dict().items()}
        torch.save({"steps": self.steps, "weights": weights}, self.out / f"{self._rank}.pt")


def lightning_ddp(run: Run) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    train_with_lightning(run, DDPStrategy(process_group_backend="gloo"))


def lightning_fsdp2(run: Run) -> None:
    """Lightning's other strategy for FSDP (FSDPStrategy) refuses CPUs."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1, process_group_backend="gloo")
    train_with_lightning(run, strategy)


def train_with_lightning(run: Run, strategy: Any) -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from torch.distributed.fsdp import fully_shard

    from muster.checkpoint.adapters.lightning import MusterCallback

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = run.net()

        def configure_model(self) -> None:
            if self.device_mesh is not None:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(**batch)["loss"]

        def forward(self, batch: Any) -> Any:
            return self.training_step(batch, 0)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class AfterStep(lightning.Callback):  # type: ignore[name-defined,misc]
        seen = 0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.seen = trainer.global_step

        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step > self.seen:
                self.seen = trainer.global_step
                run.after_step(self.seen)

    module = Module()
    callback = MusterCallback(sampler=run.sampler, warmup=lambda wrapped: wrapped(run.batch()).backward())
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        plugins=[LightningEnvironment()],
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATION,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.out,
        callbacks=[callback, AfterStep()],
    )
    trainer.fit(module, run.loader())
    run.end(module.net)


def transformers_ddp(run: Run) -> None:
    import transformers

    from muster.checkpoint.adapters.transformers import MusterCallback

    class AfterStep(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            run.after_step(state.global_step)

    class ShardedTrainer(transformers.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            return run.loader(collate_fn=self.data_collator)

    arguments = transformers.TrainingArguments(
        output_dir=str(run.out),
        max_steps=STEPS,
        learning_rate=1e-2,
        gradient_accumulation_steps=ACCUMULATION,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    net = run.net()
    trainer = ShardedTrainer(net, arguments, train_dataset=Points(), callbacks=[AfterStep()])
    assert arguments.world_size == WORLD

    def warmup() -> None:
        trainer.compute_loss(trainer.model_wrapped, run.batch()).backward()

    trainer.callback_handler.callbacks.insert(0, MusterCallback(sampler=run.sampler, warmup=warmup))
    trainer.train()
    run.end(net)


def accelerate_ddp(run: Run) -> None:
    import accelerate

    from muster.checkpoint.adapters.accelerate import prepared_checkpoint

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    assert accelerator.num_processes == WORLD
    net = run.net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    checkpoint = prepared_checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, sampler=run.sampler)
    done = checkpoint.restore(warmup=lambda: model(**run.batch())["loss"].backward())
    while done < STEPS:
        for batch in run.loader():
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                checkpoint.step(done, final=done == STEPS)
                run.after_step(done)
                if done == STEPS:
                    break
    run.end(net)


LIBRARIES: dict[str, Callable[[Run], None]] = {
    "lightning_ddp": lightning_ddp,
    "lightning_fsdp2": lightning_fsdp2,
    "transformers_ddp": transformers_ddp,
    "accelerate_ddp": accelerate_ddp,
}


def train(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORLD), NODE_RANK="0", CUDA_VISIBLE_DEVICES="")
    LIBRARIES[job["library"]](Run(rank, job))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_ranks(train)

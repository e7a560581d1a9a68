"""Optimizers whose states have 8 bits, of the libraries themselves: restored from memory and from a folder.

`make adapters-test` installs the libraries and runs this.
"""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make adapters-test")

from torch import nn  # noqa: E402

from muster.checkpoint import Checkpoint  # noqa: E402
from muster.checkpoint.testing.agent_in_thread import AgentInThread  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.long,
    pytest.mark.filterwarnings("default"),  # those of the libraries are their own business
]


def made(library: str) -> Any:
    """The class of an optimizer with states of 8 bits."""
    optimizers = pytest.importorskip(f"{library}.optim", reason=f"{library} is not installed: make adapters-test")
    return optimizers.AdamW8bit


def train(net: nn.Module, optimizer: Any, step: int) -> None:
    torch.manual_seed(step)
    net(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(net: nn.Module) -> list[bytes]:
    return [value.detach().numpy().tobytes() for value in net.state_dict().values()]


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_an_optimizer_with_states_of_8_bits_goes_on(library: str, agent: AgentInThread, tmp_path: Path) -> None:
    adam = made(library)

    def job(link: Any, seed: int) -> tuple[nn.Module, Any, Checkpoint]:
        torch.manual_seed(seed)
        net = nn.Linear(512, 64)
        optimizer = adam(net.parameters(), lr=1e-2)
        return net, optimizer, Checkpoint(model=net, optimizer=optimizer, link=link)

    net, optimizer, checkpoint = job(agent.connect(), 1)
    checkpoint.restore()
    for step in (1, 2, 3):
        train(net, optimizer, step)
        checkpoint.step(step, final=step == 3)
        agent.await_committed(step)
    folder = agent.flush(3, tmp_path)
    checkpoint.close()
    train(net, optimizer, 4)
    for link, durable in ((agent.connect(), None), (None, folder)):
        other, other_optimizer, again = job(link, 99)
        assert again.restore(durable=durable) == 3
        train(other, other_optimizer, 4)
        assert bits(other) == bits(net)
        again.close()

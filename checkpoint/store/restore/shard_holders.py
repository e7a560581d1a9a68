"""Asks other nodes for a shard: which of its pieces they hold, and how these can be fetched.

A holder keeps the shard until the call in which it has offered the shard ends.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece
from muster.checkpoint.store.replication import shard_offers
from muster.checkpoint.store.replication.dial import Dial, host_of
from muster.checkpoint.store.streams.transport import Holder
from muster.v1 import peer_pb2

OFFER_TIMEOUT_S = 20.0
"""Seconds for a holder to answer. The transfer itself may take long: only quiet streams end it."""
OTHERS_WAIT_S = 0.3
"""Seconds that further holders have when the first one has answered: a longer wait would cost more than they bring."""


@dataclass(frozen=True)
class Source:
    """A shard in the memory of another node, as the restore plan names it. `digest`: in hex; empty: not known."""

    node: str
    rank: int
    digest: str


@dataclass
class Answers:
    """What holders have answered: the pieces of the shards that they hold, and why others do not give theirs."""

    offers: list[tuple[Source, tuple[Piece, ...], Holder]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """By node."""


class ShardHolders:
    """Asks the agents of a gang for shards.

    Args:
        gang_id, node: of this agent.
        dial: returns a stub for the agent on a node.
        address_of: returns the address ("host:port") of the agent on a node; empty: the order names none.
    """

    def __init__(self, gang_id: str, node: str, dial: Dial, address_of: Callable[[str], str]) -> None:
        self._gang_id = gang_id
        self._node = node
        self._dial = dial
        self._address_of = address_of

    async def ask(
        self, sources: Iterable[Source], version: Version, calls: AsyncExitStack, *, at_once: bool = False
    ) -> Answers:
        """Ask all sources at the same time. Closing `calls` lets them free their shards.

        Those that have not answered soon after the first one are left out. `at_once`: the first one has no longer.
        """
        answers = Answers()
        tasks = [asyncio.create_task(self._ask_one(source, version, calls, answers)) for source in sources]
        pending = set(tasks)
        try:
            while pending and not answers.offers and not at_once:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if pending:
                await asyncio.wait(pending, timeout=OTHERS_WAIT_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return answers

    async def _ask_one(self, source: Source, version: Version, calls: AsyncExitStack, answers: Answers) -> None:
        try:
            answers.offers.append(await self._offer(source, version, calls))
        except CorruptShard as error:
            answers.failures[source.node] = str(error)
        except TimeoutError:
            answers.failures[source.node] = f"no answer within {OFFER_TIMEOUT_S:.0f} s"
        except grpc.aio.AioRpcError as error:
            answers.failures[source.node] = f"{error.code().name}: {error.details()}"

    async def _offer(
        self, source: Source, version: Version, calls: AsyncExitStack
    ) -> tuple[Source, tuple[Piece, ...], Holder]:
        address = self._address_of(source.node)
        if not address:
            raise CorruptShard(f"the order names no address for {source.node}")
        request = peer_pb2.FetchRequest(
            gang_id=self._gang_id, node=self._node, rank=source.rank, version=version.to_wire()
        )
        call = self._dial(source.node, address).Fetch(request)
        calls.callback(call.cancel)  # the holder need not keep the shard any longer
        async with asyncio.timeout(OFFER_TIMEOUT_S):
            offer = await anext(aiter(call), None)
        if offer is None:
            raise CorruptShard("the answer holds no offer")
        pieces = shard_offers.pieces_of_offer(offer)
        offered_version = shard_offers.version_of_offer(offer)
        if (offer.rank, offered_version) != (source.rank, version):
            raise CorruptShard(f"the answer is rank {offer.rank} of {offered_version}")
        if source.digest and offer.digest.hex() != source.digest:
            raise CorruptShard(f"the shard's digest is {offer.digest.hex()}, the order says {source.digest}")
        return source, pieces, shard_offers.holder_of_offer(offer, host_of(address))


def usable_for(
    pieces: Sequence[Piece], wanted: Iterable[int], offered: Sequence[Piece], holder: Holder
) -> Holder | None:
    """The holder with those of the `wanted` pieces that its shard has under the same numbers; None: it has none."""
    numbers = frozenset(n for n in wanted if n < len(offered) and offered[n].digest == pieces[n].digest)
    return Holder(holder.node, holder.host, holder.access, numbers) if numbers else None

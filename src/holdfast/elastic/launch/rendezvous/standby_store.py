"""The store that a launcher keeps ready in case the host of the rendezvous store goes, and the watch over both.

Torch's store has no deadline of its own against a host that is frozen: its constructor and most of its calls wait for
ever. So strangers' stores are dialled in threads that may be left behind, and a launcher whose own store is silent for
`DEAF_S` is woken by cutting its connection: its call raises then, as after the death of the host.

The watch is one thread per launcher of a job with several nodes. Keys: `USES` in every store.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from holdfast.core.elastic.rendezvous_failover import Answer, host_yields
from holdfast.elastic.worker.group_teardown import own_sockets

logger = logging.getLogger(__name__)

USES = "holdfast.uses"
LOOK_S = 1.0
# How long a store may be silent: a starved host takes seconds, a dead one says so at once.
DEAF_S = 10.0
KNOCK_S = 1.0
DIAL_S = 2.0
CALL_TIMEOUT_S = 60.0


# Threads that call a store. One that does while Python ends aborts the process, whatever the exit code.
_callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def call_apart(call: Callable[[], object], name: str, *, wait_s: float = 0.0) -> threading.Thread:
    """Call something that may hang in a store, in a thread that may be left behind; wait for it so many seconds at most."""
    thread = threading.Thread(target=call, name=name, daemon=True)
    _callers.add(thread)
    thread.start()
    thread.join(wait_s)
    return thread


def any_calls() -> bool:
    """Return whether such a thread has been left behind."""
    return any(thread.is_alive() for thread in _callers)


class Dialler:
    """Reaches stores by address; at most one attempt per address is under way.

    An attempt may take longer than one question: what it finds is the answer to the next one then.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, threading.Thread] = {}
        self._found: dict[str, tuple[float, Answer, TCPStore]] = {}

    def ask(self, addresses: Iterable[str]) -> dict[str, tuple[Answer, TCPStore]]:
        """Return those that answer within `DIAL_S`, all asked at once."""
        wanted = [address for address in dict.fromkeys(addresses) if address]
        oldest = time.monotonic() - DIAL_S
        for address in [address for address, (at, *_) in tuple(self._found.items()) if at < oldest]:
            del self._found[address]  # what was true then need not be now
        began = [self._begin(address) for address in wanted]
        deadline = time.monotonic() + DIAL_S
        for thread in began:
            thread.join(max(0.0, deadline - time.monotonic()))
        found = {address: self._found.pop(address) for address in wanted if address in self._found}
        return {address: (answer, store) for address, (_, answer, store) in found.items()}

    def under_way(self) -> set[str]:
        """Return the addresses that have neither answered nor refused yet."""
        return {address for address, thread in self._under_way.items() if thread.is_alive()}

    def _begin(self, address: str) -> threading.Thread:
        known = self._under_way.get(address)
        if known is None or not (known.is_alive() or address in self._found):
            known = call_apart(partial(_dial, address, self._found), f"holdfast dials {address}")
            self._under_way[address] = known
        return known


class StandbyStore:
    """The standby store of this launcher, and the thread that watches it and the store in use.

    Args:
        host: the name or address of this node as others know it.
        bind: the address to listen on; empty: all, as torch's own stores do.
    """

    def __init__(self, host: str, bind: str, endpoint: str) -> None:
        timeout = timedelta(seconds=CALL_TIMEOUT_S)
        if bind:
            family, _, _, _, place = socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(place[:2], family=family)
            port = listener.getsockname()[1]
            self.store = TCPStore(
                bind, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
            )
        else:
            self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.address = address_of(host, self.store.port)
        self._endpoint = endpoint
        self._used = endpoint
        self._met: Callable[[], bool] = lambda: False
        self._members: Callable[[], Iterable[str]] = tuple
        self._silent_since: float | None = None
        self._told_s = 0.0  # of how long a silence was told last
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="holdfast standby", daemon=True)

    def start(self, *, met: Callable[[], bool], members: Callable[[], Iterable[str]]) -> None:
        """Begins to watch. `met`: whether the job is together; `members`: the addresses of the others."""
        self._met, self._members = met, members
        self.use(self._endpoint)
        self._thread.start()

    def use(self, address: str) -> None:
        """This launcher uses the store there from now on, and tells whoever asks."""
        self._used, self._silent_since, self._told_s = address, None, 0.0
        self.store.set(USES, address)

    def close(self) -> None:
        """The watch ends."""
        self._ended.set()
        self._thread.join(DIAL_S + KNOCK_S)

    def _watch(self) -> None:
        dialler = Dialler()
        while not self._ended.wait(LOOK_S):
            try:
                if self._used == self.address:
                    self._look_around(dialler)
                else:
                    self._listen(dialler, time.monotonic())
            except Exception:  # the top of the thread: the next look is a new one
                logger.exception("the watch over the rendezvous store failed")

    def _look_around(self, dialler: Dialler) -> None:
        """We host: whoever went elsewhere is brought here, or we go there."""
        others = dialler.ask(address for address in (self._endpoint, *self._members()) if address != self.address)
        for answer, store in others.values():
            yields = host_yields(answer, self.address, met=self._met())
            try:
                if yields:
                    self.store.set(USES, answer.address)
                elif yields is False:
                    store.set(USES, self.address)
            except DistError as error:
                logger.info("%s went away: %s", answer.address, error)

    def _listen(self, dialler: Dialler, now: float) -> None:
        """Another one hosts: if it is silent for too long, whoever of us waits for it is woken."""
        used = self._used
        if used in dialler.ask([used]):
            self._silent_since, self._told_s = None, 0.0
            return
        self._silent_since = self._silent_since or now
        if now - self._silent_since > DEAF_S and used == self._used:
            if now - self._silent_since > 2 * self._told_s:  # it may last for minutes
                self._told_s = now - self._silent_since
                logger.warning("the rendezvous store at %s has been silent for %.0f s", used, self._told_s)
            cut_connections(int(used.rpartition(":")[2]))


def address_of(host: str, port: int) -> str:
    """Return how launchers name a store to each other: HOST:PORT, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def uses(store: Store) -> str:
    """Return which address the owner of the store uses, as it says there."""
    return store.get(USES).decode() if store.check([USES]) else ""


def cut_connections(port: int) -> None:
    """Shuts down the connections of this process to a store there; waiting calls raise."""
    for fd, _ in own_sockets():
        try:
            with socket.socket(fileno=socket.dup(fd)) as link:
                if link.family in (socket.AF_INET, socket.AF_INET6) and link.getpeername()[1] == port:
                    link.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed meanwhile, or not connected


def _dial(address: str, found: dict[str, tuple[float, Answer, TCPStore]]) -> None:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        socket.create_connection((host, int(port)), KNOCK_S).close()
        store = TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CALL_TIMEOUT_S)
        )
        answer = Answer(address, uses(store))
        found[address] = (time.monotonic(), answer, store)
    except (OSError, DistError, ValueError) as error:
        logger.debug("%s does not answer: %s", address, error)

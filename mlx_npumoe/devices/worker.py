"""Threads of a device: a serial worker that runs calls one after another, and a team that shares one call's parts.

Knows no programs. All threads are daemons: a call that hangs never keeps the process alive.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from ..errors import DeviceError

T = TypeVar("T")
S = TypeVar("S")


class SerialWorker:
    """Runs jobs in order on a daemon thread of its own. `submit` never blocks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closing = threading.Event()  # set by close; a job that waits for long should watch it
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"{name}-device", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue `job`. Whatever it raises reaches the future as DeviceError."""
        future: Future[T] = Future()
        with self._lock:
            if not self.closing.is_set():
                self._jobs.put(lambda: self._run(job, future))
                return future
        future.set_exception(DeviceError(f"the {self.name} device is closed"))
        return future

    def _run(self, job: Callable[[], T], future: Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self.closing.is_set():
            future.set_exception(DeviceError(f"the {self.name} device is closed"))
            return
        try:
            result = job()
        except DeviceError as error:
            future.set_exception(error)
        except Exception as error:
            wrapped = DeviceError(f"the {self.name} device failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            future.set_exception(wrapped)
        else:
            future.set_result(result)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # an idle thread must not keep the last call's surfaces alive

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread after the job it is at; waiting jobs fail. A hung job is left behind after `timeout_s`."""
        with self._lock:
            if self.closing.is_set():
                return
            self.closing.set()
        self._jobs.put(None)
        self._thread.join(timeout_s)
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                job()
        self._jobs.put(None)  # for a thread that was left behind and comes back


class Team(Generic[S]):
    """A fixed number of workers, the caller among them, that share tasks. Each worker has its own state."""

    def __init__(self, states: Sequence[S], name: str) -> None:
        self.states = list(states)
        self._lock = threading.Lock()
        self._closed = False
        self._inboxes: list[queue.SimpleQueue[_Round[S] | None]] = []
        for i, state in enumerate(self.states[1:], 1):
            inbox: queue.SimpleQueue[_Round[S] | None] = queue.SimpleQueue()
            self._inboxes.append(inbox)
            threading.Thread(target=_help, args=(inbox, state), name=f"{name}-helper-{i}", daemon=True).start()

    def run(self, tasks: Sequence[Callable[[S], None]]) -> None:
        """Run all tasks, longest first if so ordered, and return when all are done. Raises the first error met."""
        helpers = self._inboxes[: max(0, len(tasks) - 1)]
        work = _Round(deque(tasks), len(helpers))
        with self._lock:
            if self._closed:
                raise DeviceError("the device is closed")
            for inbox in helpers:
                inbox.put(work)
        work.take_part(self.states[0])
        for _ in helpers:
            work.done.acquire()
        if work.errors:
            raise work.errors[0]

    def close(self) -> None:
        """End the helpers after the round they are at."""
        with self._lock:
            self._closed = True
            for inbox in self._inboxes:
                inbox.put(None)


class _Round(Generic[S]):
    """One `Team.run`: what is left to do and who has finished."""

    def __init__(self, tasks: deque[Callable[[S], None]], helpers: int) -> None:
        self.tasks = tasks
        self.errors: list[BaseException] = []
        self.done = threading.Semaphore(0)

    def take_part(self, state: S) -> None:
        while not self.errors:
            try:
                task = self.tasks.popleft()
            except IndexError:
                return
            try:
                task(state)
            except BaseException as error:
                self.errors.append(error)


def _help(inbox: queue.SimpleQueue[_Round[S] | None], state: S) -> None:
    while (work := inbox.get()) is not None:
        work.take_part(state)
        work.done.release()
        del work

"""One backend out of several, each in a process of its own: when one process cannot keep all servers busy.

The prompts are handed out by the process that asks, which also gets all results, so there is still one writer.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from data_gen.backend import Backend, SamplingSettings, Work, WorkResult
from data_gen.openai.options import EngineError, OpenAIOptions
from scheduler_core.errors import InputError

_BATCH = 64


def openai_backend(options: OpenAIOptions) -> Backend:
    """The backend for servers of the OpenAI API, in as many processes as `options` says."""
    if options.processes == 1:
        return _openai_backend(options)
    shares = split_servers(options)
    look_ahead = max(share.look_ahead for share in shares)
    return ProcessesBackend([partial(_openai_backend, share) for share in shares], look_ahead)


def _openai_backend(options: OpenAIOptions) -> Backend:
    from data_gen.openai.backend import OpenAIBackend

    return OpenAIBackend(options)


def split_servers(options: OpenAIOptions) -> list[OpenAIOptions]:
    """Options for each of the processes: a share of the servers, or of what one server gets at a time.

    Raises:
        InputError: If there are fewer requests in flight than processes.
    """
    urls, processes = options.base_urls, options.processes
    if processes <= len(urls):
        parts = [urls[number::processes] for number in range(processes)]
        return [replace(options, base_urls=part, processes=1) for part in parts]
    shares = []
    for number in range(processes):
        place, here = divmod(number, len(urls))
        sharers = len(range(here, processes, len(urls)))
        concurrency = options.concurrency // sharers + (place < options.concurrency % sharers)
        if concurrency < 1:
            raise InputError("processes", processes, f"at most {options.concurrency} for each server")
        shares.append(replace(options, base_urls=(urls[here],), concurrency=concurrency, processes=1))
    return shares


@dataclass(slots=True, eq=False)
class _Worker:
    process: BaseProcess
    pipe: Connection
    owed: int = 0
    counters: dict[str, int] = field(default_factory=dict)


class ProcessesBackend:
    """Backends that share the work; to be used like any one of them.

    Args:
        makers: Makes the backend of each process, there; must be picklable. They all serve the same model.
        look_ahead: Samples that each process is given before it has to give one back; at least as many as its
            backend takes before it yields.
    """

    def __init__(self, makers: Sequence[Callable[[], Backend]], look_ahead: int) -> None:
        if not makers:
            raise InputError("makers", len(makers), "at least one")
        self._makers = list(makers)
        self._look_ahead = look_ahead
        self._workers: list[_Worker] = []
        self._identity: tuple[str, str, str, bool] | None = None
        self._gone: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self._identified()[0]

    @property
    def version(self) -> str:
        """Version of the engine."""
        return self._identified()[1]

    @property
    def served_model(self) -> str:
        """Name of the model that answers."""
        return self._identified()[2]

    @property
    def seeded(self) -> bool:
        """See `Backend.seeded`."""
        return self._identified()[3]

    @property
    def counters(self) -> dict[str, int]:
        """Sum of what the backends counted, as of the end of the last iterator."""
        total = Counter(self._gone)
        for worker in self._workers:
            total.update(worker.counters)
        return dict(total)

    def sample(self, work: Iterable[Work], settings: SamplingSettings) -> Iterator[WorkResult]:
        """See `Backend.sample`; a process that dies ends the run with an `EngineError`."""
        self._identified()
        if not self._workers:
            self._start()
        finished = False
        try:
            for worker in self._workers:
                worker.owed = 0
                worker.pipe.send(settings)
            yield from self._exchange(iter(work))
            finished = True
        finally:
            if not finished:
                self.close()

    def _exchange(self, source: Iterator[Work]) -> Iterator[WorkResult]:
        more = True
        busy = list(self._workers)
        while busy:
            while more:
                worker = min(busy, key=lambda one: one.owed)
                if worker.owed >= self._look_ahead:
                    break
                more = self._hand_out(source, worker)
                if not more:
                    # At once: a backend that waits for more work does not give its results back.
                    for each in busy:
                        self._send(each, None)
            ready = multiprocessing.connection.wait([worker.pipe for worker in busy])
            for worker in [one for one in busy if one.pipe in ready]:
                message = self._receive(worker)
                if isinstance(message, WorkResult):
                    worker.owed -= len(message.answers) + len(message.failures)
                    yield message
                else:
                    worker.counters = message
                    busy.remove(worker)

    def _hand_out(self, source: Iterator[Work], worker: _Worker) -> bool:
        """Gives a process some work; False at the end of the source."""
        batch: list[Work] = []
        room = min(_BATCH, self._look_ahead - worker.owed)
        more = True
        while room > 0:
            item = next(source, None)
            if item is None:
                more = False
                break
            batch.append(item)
            room -= len(item.indices)
            worker.owed += len(item.indices)
        if batch:
            self._send(worker, batch)
        return more

    def _send(self, worker: _Worker, message: object) -> None:
        try:
            worker.pipe.send(message)
        except OSError:
            # What it had to say last is the reason.
            self._receive(worker)
            raise

    def _receive(self, worker: _Worker) -> Any:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError) as error:
            worker.process.join(1.0)
            raise EngineError(f"a sampling process died (exit code {worker.process.exitcode})") from error
        if isinstance(message, BaseException):
            raise message
        return message

    def _identified(self) -> tuple[str, str, str, bool]:
        if self._identity is None:
            self._start()
        assert self._identity is not None
        return self._identity

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        try:
            for maker in self._makers:
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(maker, theirs), daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours))
            identities = [self._receive(worker) for worker in self._workers]
            for identity in identities:
                if identity != (self._identity or identities[0]):
                    raise InputError(
                        "processes", identity, f"the same engine and model in all: {identities[0]}"
                    )
        except BaseException:
            self.close()
            raise
        self._identity = identities[0]

    def close(self) -> None:
        """Ends all processes."""
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
            self._gone.update(worker.counters)
        self._workers = []


def _work(maker: Callable[[], Backend], pipe: Connection) -> None:
    """What each process does: settings, then batches of work, then None for the end; over and over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        # Without the process that asks there is nobody to sample for.
        with contextlib.suppress(EOFError, OSError):
            while True:
                inbox.put(pipe.recv())
        os._exit(1)

    def source() -> Iterator[Work]:
        while (batch := inbox.get()) is not None:
            yield from batch

    backend = None
    try:
        backend = maker()
        pipe.send((backend.name, backend.version, backend.served_model, backend.seeded))
        threading.Thread(target=receive, daemon=True).start()
        while True:
            for result in backend.sample(source(), inbox.get()):
                pipe.send(result)
            pipe.send(dict(getattr(backend, "counters", {})))
    except Exception as error:
        pipe.send(error)
    finally:
        if backend is not None:
            backend.close()

"""The blocking client, for programs without an event loop."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import grpc

from predictors.client.errors import PredictorError
from predictors.client.messages import (
    all_failed,
    batch_results,
    call_failed,
    call_metadata,
    channel_credentials,
    channel_options,
    checked_address,
    chunks,
    failure,
    length_prediction,
    request_message,
    succeeded,
)
from predictors.client.pool import LeastBusy
from predictors.client.retrying import Clock, Result, RetryPolicy, Send
from predictors.client.settings import ClientSettings, checked_timeout
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto import predictor_v1_pb2_grpc
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest


class SyncPredictor:
    """Blocking client with the same limits and errors; may be shared by threads.

    It uses gRPC's blocking interface and no event loop, so it works in a process that runs loops of its own. The
    requests of one `predict` share calls; requests of different threads do not. Of the settings it does not use `coalesce`
    and `transport`.

    Args:
        address: "host:port" or "unix:PATH".
        settings: Limits.
        clock: Monotonic seconds.
        rng: Randomness of the waits between tries; default: seeded by the operating system.
        sleep: Waits that many seconds.
    """

    def __init__(
        self,
        address: str,
        settings: ClientSettings | None = None,
        *,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.address = checked_address(address)
        self.settings = settings or ClientSettings()
        self._clock = clock
        self._sleep = sleep
        self.policy = RetryPolicy.of(
            self.address, self.settings.retries, self.settings.breaker, clock, rng or random.Random()
        )
        self._lock = threading.Lock()
        self._channels: list[grpc.Channel] = []
        self._pool: LeastBusy[Any] | None = None

    def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[LengthPrediction]:
        """Predicted lengths in the order of `requests`; arguments and errors as of `GrpcPredictor.predict`."""
        found = self.responses(requests, timeout_s=timeout_s)
        return [length_prediction(response, self.address) for response in found]

    def responses(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None, capped: bool = False
    ) -> list[pb.PredictResponse]:
        """All that the service says, in the order of `requests`; arguments as of `GrpcPredictor.responses`."""
        seconds = self.settings.timeout_s if timeout_s is None else checked_timeout(timeout_s)
        messages = [request_message(request, capped=capped) for request in requests]
        pool = self._connected()
        deadline = self._clock() + seconds
        parts = list(chunks(messages, self.settings))
        if len(parts) <= 1:
            return succeeded([result for part in parts for result in self._deliver(pool, part, deadline)])
        with ThreadPoolExecutor(min(len(parts), self.settings.max_calls)) as threads:
            found = threads.map(lambda part: self._deliver(pool, part, deadline), parts)
            return succeeded([result for results in found for result in results])

    def metadata(self) -> pb.GetMetadataResponse:
        """What the service serves: artifact, limits, provider."""
        with self._connected().lease() as stub:
            try:
                response: pb.GetMetadataResponse = stub.GetMetadata(
                    pb.GetMetadataRequest(),
                    timeout=self.settings.timeout_s,
                    metadata=call_metadata(self.settings),
                )
            except grpc.RpcError as error:
                code = error.code().name
                details = error.details()
                raise PredictorError(f"predictor {self.address}: {code}: {details}", code) from error
        return response

    def close(self) -> None:
        """Ends the connections; the client can be used again and then opens new ones."""
        with self._lock:
            channels, self._channels, self._pool = self._channels, [], None
        for channel in channels:
            channel.close()

    def __enter__(self) -> SyncPredictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> LeastBusy[Any]:
        with self._lock:
            if self._pool is None:
                self._channels = [
                    _channel(self.address, self.settings) for _ in range(self.settings.num_connections)
                ]
                stub: Any = predictor_v1_pb2_grpc.PredictorStub
                self._pool = LeastBusy([stub(channel) for channel in self._channels])
            return self._pool

    def _deliver(
        self, pool: LeastBusy[Any], messages: Sequence[pb.PredictRequest], deadline: float
    ) -> Sequence[Result]:
        """One call with all its tries."""
        steps = self.policy.attempts(messages, deadline)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Send):
                    step = steps.send(self._send(pool, step))
                else:
                    self._sleep(step.seconds)
                    step = next(steps)
        except StopIteration as done:
            found: list[Result] = done.value
            return found
        finally:
            steps.close()

    def _send(self, pool: LeastBusy[Any], step: Send) -> Sequence[Result]:
        """One try, and its hedge if there is to be one."""
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        hedge_s = self.settings.hedge_after_s
        with contextlib.ExitStack() as calls:
            num_running = 1
            self._start(pool, step.messages, step.timeout_s, ended, calls)
            wait_s = None if hedge_s is None or hedge_s >= step.timeout_s else hedge_s
            while True:
                try:
                    results = self._results(ended.get(timeout=wait_s), step.messages)
                except queue.Empty:
                    assert wait_s is not None
                    if self.policy.budget.take():
                        self._start(pool, step.messages, step.timeout_s - wait_s, ended, calls)
                        num_running += 1
                    wait_s = None
                    continue
                num_running -= 1
                if not num_running or not all_failed(results):
                    return results

    def _start(
        self,
        pool: LeastBusy[Any],
        messages: Sequence[pb.PredictRequest],
        timeout_s: float,
        ended: queue.SimpleQueue[Any],
        calls: contextlib.ExitStack,
    ) -> None:
        """Begins a call that comes to `ended` when it is over, and that leaving `calls` cancels."""
        stub = calls.enter_context(pool.lease())
        batch = pb.PredictBatchRequest(requests=messages)
        call = stub.PredictBatch.future(batch, timeout=timeout_s, metadata=call_metadata(self.settings))
        calls.callback(call.cancel)
        call.add_done_callback(ended.put)

    def _results(self, call: Any, messages: Sequence[pb.PredictRequest]) -> Sequence[Result]:
        try:
            return batch_results(call.result(), messages, self.address)
        except grpc.RpcError as error:
            return call_failed(error, messages, self.address)
        except grpc.FutureCancelledError:
            return [
                failure(message, "CANCELLED", "the client was closed", self.address) for message in messages
            ]


def _channel(address: str, settings: ClientSettings) -> grpc.Channel:
    options = channel_options(settings)
    if settings.tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(settings.tls), options=options)

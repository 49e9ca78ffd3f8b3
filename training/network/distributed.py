"""Distributed training: one process per device, on one or more machines that run the same command."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from scheduler_core.errors import InputError, TailcastError
from training.network.config import TrainConfig

# Timeout of collective operations; long, because all processes wait while the first computes the features of stage 2.
TIMEOUT = timedelta(hours=4)


def node_rank(config: TrainConfig) -> int:
    """Rank of this machine from the environment variable NODE_RANK; InputError if it is missing or out of range."""
    rank = os.environ.get("NODE_RANK", "") if config.num_nodes > 1 else "0"
    if not (rank.isascii() and rank.isdigit() and int(rank) < config.num_nodes):
        raise InputError("environment, NODE_RANK", rank, f"integers from 0 to {config.num_nodes - 1}")
    return int(rank)


def launch(function: Callable[..., None], config: TrainConfig, device: torch.device, *arguments: Any) -> None:
    """Calls `function(device, *arguments)` in this process, or in one process per device in a joint process group.

    InputError if MASTER_ADDR or MASTER_PORT is missing on one of several machines; TailcastError if a process failed.
    """
    if config.devices * config.num_nodes == 1:
        return function(device, *arguments)
    if config.num_nodes == 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
    else:
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        if address.startswith(":") or address.endswith(":"):
            raise InputError("num_nodes needs MASTER_ADDR and MASTER_PORT in the environment")
    level = logging.getLogger().getEffectiveLevel()
    try:
        spawn(_worker, (function, config, device.type, address, level, arguments), nprocs=config.devices)  # type: ignore[no-untyped-call]
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise TailcastError(str(error).strip().splitlines()[-1]) from error
    return None


def _worker(
    local_rank: int,
    function: Callable[..., None],
    config: TrainConfig,
    kind: str,
    address: str,
    level: int,
    arguments: tuple[Any, ...],
) -> None:
    rank = node_rank(config) * config.devices + local_rank
    if rank == 0:
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    os.environ["LOCAL_RANK"] = str(local_rank)
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // config.devices))
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=config.devices * config.num_nodes,
        timeout=TIMEOUT,
    )
    try:
        function(torch.device(f"{kind}:{local_rank}" if kind == "cuda" else kind), *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def is_first_process() -> bool:
    """Whether this process has rank 0, or is the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def wait_for_others() -> None:
    """Blocks until all processes have called this function."""
    if dist.is_initialized():
        dist.barrier()

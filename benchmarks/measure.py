"""What every benchmark shares: time, peak memory, floating-point operations, one table, one JSON file.

Knows nothing about drafters.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import dspark_exp
from dspark_exp.tasks.provenance import code_revision


def seconds(work: Callable[[], object], repeats: int, warmup: int = 1) -> float:
    """Median wall-clock seconds of ``work``, the device included."""
    for _ in range(warmup):
        work()
    return statistics.median(_once(work) for _ in range(repeats))


def alternated(works: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1) -> dict[str, float]:
    """Median seconds of each, measured in turn, so that a slow minute of the machine hits all of them."""
    for work in works.values():
        for _ in range(warmup):
            work()
    samples: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            samples[name].append(_once(work))
    return {name: statistics.median(times) for name, times in samples.items()}


def _once(work: Callable[[], object]) -> float:
    _synchronise()
    started = time.perf_counter()
    work()
    _synchronise()
    return time.perf_counter() - started


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(work: Callable[[], object], device: torch.device, kept: Callable[[], set[int]] = set) -> int:
    """Largest number of bytes that ``work`` holds beyond what is held before it.

    Args:
        kept: addresses, after ``work``, of results that do not count (gradients); on a CPU they are left out from the
            moment they are allocated, on a GPU they are subtracted from the peak.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False) as record:
        work()
    return _peak_of(_allocations(record.profiler.kineto_results.experimental_event_tree()), kept())


def _allocations(events: Any) -> list[tuple[int, int, int]]:
    """(time, address, bytes) of every allocation and, with negative bytes, every release."""
    found, waiting = [], list(events)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        fields = event.extra_fields
        if hasattr(fields, "alloc_size"):
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return sorted(found)


def _peak_of(allocations: Sequence[tuple[int, int, int]], kept: set[int]) -> int:
    last = {address: moment for moment, address, size in allocations if size > 0}
    held, peak = 0, 0
    for moment, address, size in allocations:
        if size > 0 and address in kept and last[address] == moment:
            continue  # this allocation became a result
        held += size
        peak = max(peak, held)
    return peak


def flops(work: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products that ``work`` runs."""
    missing = {torch.ops.aten.addmm_: _addmm_flops}  # formulas that the counter does not have
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        missing[torch.ops.mkldnn._linear_pointwise] = _linear_flops
    with FlopCounterMode(display=False, custom_mapping=missing) as counter:
        work()
    return counter.get_total_flops()


def _addmm_flops(_into: Any, left: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _linear_flops(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(rows) * weight[0]


def matmul_rate(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """FLOP/s of a large matrix product: what the machine can do."""
    size = 4096 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / seconds(lambda: a @ b, repeats=5)


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "code": code_revision() or dspark_exp.__version__,
    }


def report(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    keys: Mapping[str, float],
    device: torch.device,
    path: str | None,
) -> None:
    """Print the table and the named ratios; write both as JSON where ``--json`` was given."""
    console = Console()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(_cell(row.get(name, "")) for name in columns))
    console.print(table)
    for name, value in keys.items():
        console.print(f"{name} = {value:.3f}")
    if path is not None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": title, **keys, "rows": list(rows), "machine": machine(device)}
        target.write_text(json.dumps(content, indent=1) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

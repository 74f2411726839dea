"""Freed memory is kept: large blocks come back without a page fault for each page."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_CODE = """
import resource, torch
from dspark_exp.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(16_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
faults()
default = faults()
assert keep_freed_memory()
for _ in range(10):
    faults()  # until the heap has grown to what the loop needs
print(default, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's own")
def test_large_blocks_are_reused_without_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    default, kept = map(int, done.stdout.split())
    assert default > 10 * max(1, kept)

"""Compiled kernels on a device: loaded from disk they run, on any stream and for any row count, compiled once."""

from __future__ import annotations

import time

import pytest
import torch

from cute_kernels import launch, reference, target
from cute_kernels.hopper.device_table import device_table
from cute_kernels.hopper.rowwise import group_offsets, grouped_dbias

pytestmark = pytest.mark.gpu("sm_90a")


def test_disk_entry_runs(tmp_path, monkeypatch):
    """Compiled on this machine, stored, forgotten, loaded, run."""
    monkeypatch.setattr(target, "cache_dir", lambda: tmp_path)
    sizes = torch.tensor([3, 0, 5], device="cuda")
    launch.forget()
    before = launch.compile_count()
    want = reference.group_offsets(sizes, 100)
    assert group_offsets(sizes, 100).equal(want)
    launch.forget()
    with launch.no_compile():
        assert group_offsets(sizes, 100).equal(want)
    assert launch.compile_count() == before + 1
    assert len(list(tmp_path.glob("*.o"))) == 1
    launch.forget()


def test_rows_groups_and_streams_share_one_kernel():
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32, device="cuda")
    grouped_dbias(torch.ones(9, 64, dtype=torch.bfloat16, device="cuda"), offsets)
    stream = torch.cuda.Stream()
    with launch.no_compile():
        for rows, width in ((9, 64), (1000, 128), (10, 8)):
            dy = torch.ones(rows, width, dtype=torch.bfloat16, device="cuda")
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                sums = grouped_dbias(dy, offsets)
            stream.synchronize()
            assert sums.tolist() == [[4.0] * width, [5.0] * width]


def test_kernel_runs_on_the_stream_it_is_given():
    """A long wait on one stream must not delay, or be overtaken by, work given to it."""
    sizes = torch.zeros(4, dtype=torch.int64, device="cuda")
    group_offsets(sizes, 100)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        sizes.fill_(5)
        offsets = group_offsets(sizes, 100)
    stream.synchronize()
    assert offsets.tolist() == [0, 5, 10, 15, 20]


def test_tables():
    device = torch.device("cuda", torch.cuda.current_device())
    stream = launch.current_stream(device)
    for count in (1, 128, 129, 1000):
        values = tuple(3 * i - (1 << 40) for i in range(count))
        table = device_table(values, device, stream, "sm_90a")
        assert table.tolist() == list(values)
        assert device_table(values, device, stream, "sm_90a") is table
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = device_table(values, device, launch.current_stream(device), "sm_90a")
    assert captured is not table
    captured.zero_()
    graph.replay()
    assert captured.tolist() == list(values)


def test_a_launch_costs_little_host_time():
    sizes = torch.ones(128, dtype=torch.int64, device="cuda")
    for _ in range(20):
        group_offsets(sizes, 1000)
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(100):
            group_offsets(sizes, 1000)
        best = min(best, (time.perf_counter() - began) / 100)
        torch.cuda.synchronize()
    assert best < 50e-6, f"one call takes {best * 1e6:.1f} us of host time"

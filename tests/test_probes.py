"""Probes against folders and files that stand in for a machine, and the table of failure lines."""

import os
import subprocess
import sys
import time

import pytest

import probes

SMI = ('{"gpu": 0, "ecc": {"total_correctable_count": 3, "total_uncorrectable_count": %d, '
       '"total_deferred_count": 9}, "temperature": {"edge": {"value": 40, "unit": "C"}, '
       '"hotspot": {"value": 61, "unit": "C"}, "mem": "N/A"}}')
ROCM_SMI = """GPU[0]		: Temperature (Sensor junction) (C): 58.0
GPU[0]		: Temperature (Sensor memory) (C): 66.0
GPU[0]: 	RAS INFO
       Block     Status  Correctable Error  Uncorrectable Error
         UMC    ENABLED                  4                    1
         GFX    ENABLED                  2                    0
         MMHUB  DISABLED
"""


def test_nic_errors_sums_error_counters_by_card_and_nothing_else(tmp_path):
    for path, value in {"class/infiniband/mlx5_0/ports/1/counters/symbol_error": 4,
                        "class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": 10**12,
                        "class/infiniband/mlx5_0/ports/1/hw_counters/local_ack_timeout_err": 3,
                        "class/infiniband/bnxt1/ports/1/counters/link_downed": 1,
                        "class/net/eth0/statistics/rx_errors": 5,
                        "class/net/eth0/statistics/rx_dropped": 700,
                        "class/net/eth0/statistics/tx_errors": "nonsense"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{value}\n")
    assert probes.nic_errors(tmp_path) == {"mlx5_0": 7, "bnxt1": 1, "eth0": 5}
    assert probes.nic_errors(tmp_path / "none") == {}


def test_memory_left_is_what_is_available(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    250 kB\n")
    assert probes.memory_left(tmp_path / "meminfo") == 0.25


@pytest.mark.parametrize("text, expected", [
    (f"[{SMI % 2}, {SMI % 5}]", (6, 7, 61)),
    ('{"gpu_data": [%s]}' % (SMI % 2), (3, 2, 61)),
    (ROCM_SMI, (6, 1, 58.0)),
    ("[]", (0, 0, 0)),
    ("ERROR: no device", (0, 0, 0)),
])
def test_smi_output_is_read_in_each_of_its_forms(text, expected):
    assert probes.read_smi(text) == expected


def test_smi_command_prefers_amd_smi_and_is_none_without_a_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probes.smi_command() is None
    for tool in ("rocm-smi", "amd-smi"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
        assert probes.smi_command()[0] == tool


RECORDED = [
    ("OSError: [Errno 28] No space left on device", "disk full", "fatal"),
    ("kernel: Out of memory: Killed process 4242 (python) total-vm:9kB", "out of memory", "transient"),
    ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 3 has", "out of memory",
     "transient"),
    ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
     "out of memory", "transient"),
    ("amdgpu 0000:c1:00.0: amdgpu: 3 uncorrectable hardware errors detected in umc block",
     "uncorrectable memory error", "node"),
    ("[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx_0.0.0 timeout, signaled seq=5, emitted seq=7",
     "gpu reset", "node"),
    ("amdgpu 0000:67:00.0: GPU reset begin!", "gpu reset", "node"),
    ("Memory access fault by GPU node-2 (Agent handle: 0x5640) on address 0x7fee. Reason: Page not present",
     "gpu memory fault", "transient"),
    ("RuntimeError: HIP error: no kernel image is available for execution on the device",
     "kernels for another gpu", "fatal"),
    ("RuntimeError: No HIP GPUs are available", "no gpu", "node"),
    ("mce: [Hardware Error]: Machine check events logged", "machine check", "node"),
    ("OSError: [Errno 116] Stale file handle: 'runs/001'", "storage error", "transient"),
]
SURVIVORS = [
    ("node7: NCCL WARN NET/IB : Got completion from peer 10.0.0.2 with status=12 error", "network error"),
    ("[rank3]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=ALLREDUCE)",
     "collective timed out"),
    ("RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:37280",
     "peer lost"),
]


@pytest.mark.parametrize("line, what, kind", RECORDED)
def test_recorded_lines_are_recognised(line, what, kind):
    fault = probes.recognise(["step 10 loss 2.3", line, "more"], probes.LINES)
    assert (fault.what, fault.kind, fault.evidence) == (what, kind, line)


@pytest.mark.parametrize("line, what", SURVIVORS)
def test_what_survivors_say_is_a_symptom_and_no_cause(line, what):
    assert probes.recognise([line], probes.LINES) is None
    assert probes.recognise([line], probes.SYMPTOMS).what == what


def test_every_row_of_the_tables_has_a_recorded_line_or_a_remark():
    seen = {what for _, what, _ in RECORDED} | {what for _, what in SURVIVORS}
    assert {row[1] for row in probes.LINES + probes.SYMPTOMS} == seen


@pytest.mark.parametrize("line", [
    "step   400 loss 2.352 val 2.521 (1.369 bits/byte) lr 0.0059 norm 0.24 374 ms 10945 tok/s mfu n/a "
    "load 1.576",
    "saving step 200", "FutureWarning: `broadcast_buffers` is deprecated.",
    "amdgpu 0000:44:00.0: amdgpu: ring gfx_0.0.0 uses VM inv eng 0 on hub 0",
    "kernel: eth0: link up, 100Gbps",
])
def test_ordinary_lines_mean_nothing(line):
    assert probes.recognise([line], probes.LINES + probes.SYMPTOMS + probes.REMARKS) is None


def test_damaged_checkpoints_are_told_apart(tmp_path):
    base = "checkpoint runs/1/checkpoints/step_00000500 is passed over: "
    name = lambda text: probes.recognise([base + text], probes.REMARKS).what
    assert name("__0_0.distcp has 900 bytes instead of 1000") == "checkpoint truncated"
    assert name("the checksum of __0_0.distcp differs") == "checkpoint damaged"


def test_tail_gives_whole_lines_once_from_where_it_is_told(tmp_path):
    file = tmp_path / "log"
    file.write_text("old\n")
    new, all_of_it = probes.Tail(file), probes.Tail(file, 0)
    with open(file, "a") as stream:
        stream.write("a\nhal")
        stream.flush()
        assert new.lines() == ["a"] and all_of_it.lines() == ["old", "a"] and new.offset() == 6
        stream.write("f\n")
    assert new.lines() == ["half"] and new.lines() == [] and probes.Tail(tmp_path / "none").lines() == []


def test_family_finds_marked_processes_of_other_sessions_and_no_zombies(tmp_path):
    env = {**os.environ, "AEGIS_HEARTBEAT": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env,
                             start_new_session=True)
    try:
        time.sleep(0.1)
        assert probes.family(tmp_path) == [child.pid] and probes.process(child.pid)[0] in "RS"
        assert probes.family(tmp_path / "other") == []
    finally:
        child.kill()
    deadline = time.monotonic() + 5
    while probes.process(child.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert probes.process(child.pid) is None and probes.family(tmp_path) == [], "a zombie is no process"
    child.wait()

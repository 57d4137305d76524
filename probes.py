"""What can be seen from outside a run: processes, memory, network cards, GPUs, the lines that failures
print.

Each probe reads one thing and returns numbers; where to read is a parameter, so that a folder or a file can
stand in for the machine:

    process, family     /proc: is it alive, which processes belong to this run
    memory_left         /proc/meminfo
    nic_errors          /sys/class/infiniband/*/ports/*/counters and hw_counters, /sys/class/net/*/statistics
    read_smi            what amd-smi or rocm-smi print of ECC errors and temperatures
    Tail                new lines of a log or of /dev/kmsg
    recognise           what a line means, by the tables LINES, SYMPTOMS and REMARKS

The tables are the place to add what your cluster says: pattern, name, class, what to do. The classes are
those of aegis.py. A line is only as good as its software's version: those of ROCm, RCCL and the kernel were
taken from reports and documentation, those of PyTorch on a CPU were seen here; none on AMD's hardware.

`python probes.py` shows what this machine says.
"""

import json
import os
import re
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

# What a failing run or its kernel says: (pattern, name of the fault, class, what to do). Order is priority.
LINES = [
    (r"No space left on device|Disk quota exceeded", "disk full", "fatal",
     "free space on the run's disk (or fewer --keep), then start Aegis again: the last checkpoint is whole"),
    (r"Out of memory: Killed process|oom-kill:", "out of memory", "transient", "the kernel killed a process"),
    (r"(HIP|CUDA) out of memory|OutOfMemoryError|can't allocate memory|MemoryError|hipErrorOutOfMemory",
     "out of memory", "transient", "if it comes again: smaller --micro-tokens, or --recompute"),
    (r"amdgpu.*(uncorrectable hardware error|RAS.*poison)|HSA_STATUS_ERROR_MEMORY_FAULT.*ECC|Uncorrected ECC",
     "uncorrectable memory error", "node", "the card needs service"),
    (r"amdgpu.*(GPU reset begin|ring .* timeout|device lost|wedged)|HSA_STATUS_ERROR_OUT_OF_RESOURCES",
     "gpu reset", "node", "the card hung; a second time on the same node means service"),
    (r"Memory access fault by GPU|hipErrorIllegalAddress|illegal memory access", "gpu memory fault",
     "transient", "a kernel's bug, or memory; again at the same step: --kernels plain"),
    (r"hipErrorNoBinaryForGpu|no kernel image is available", "kernels for another gpu", "fatal",
     "set PYTORCH_ROCM_ARCH to this card's gfx name and build again"),
    (r"hipErrorNoDevice|No HIP GPUs are available|Unable to open /dev/kfd", "no gpu", "node",
     "the driver does not show the card: dmesg, groups video and render"),
    (r"mce: \[Hardware Error\]|EDAC .* UE ", "machine check", "node",
     "host memory or processor needs service"),
    (r"Stale file handle|Input/output error|Remote I/O error", "storage error", "transient", "shared disk?"),
]
# Read only when nothing above and no exit code explains the end: what the survivors of another's death say.
SYMPTOMS = [
    (r"(NCCL|RCCL).*(IBV_WC_RETRY_EXC_ERR|ibv_poll_cq|Got completion .* error|NET/IB.*error)|link down",
     "network error", "transient", "a link flapped; if NIC counters rise on a node, it is that node"),
    (r"Watchdog caught collective operation timeout|ncclRemoteError|ncclSystemError|Timed out waiting",
     "collective timed out", "transient", "a rank elsewhere hung or died"),
    (r"Connection (closed by peer|reset by peer|refused)|Broken pipe|RendezvousConnectionError|EOFError",
     "peer lost", "transient", "a rank or node elsewhere died"),
]
# Read while the run lives: no end of it, but to be known.
REMARKS = [
    (r"checkpoint .* is passed over: .* bytes instead of", "checkpoint truncated", "transient",
     "the checkpoint before it was taken"),
    (r"checkpoint .* is passed over: ", "checkpoint damaged", "transient",
     "the checkpoint before it was taken"),
]


@dataclass
class Fault:
    """what: its name; kind: transient, data, node or fatal; evidence: what was seen; advice: for people."""
    what: str
    kind: str
    evidence: str
    advice: str = ""
    rank: int | None = None
    since: float | None = None      # time.monotonic() of the last sign of life
    broken: bool = True             # the group is dead, or must be ended


def process(pid):
    """(state letter, start time) of a living process, None for one that is gone or a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else (state, rest[18])


def awake(pid):
    """Whether any thread of a process runs or waits for a disk. The first thread's state alone would not do:
    it sleeps while one that writes a checkpoint holds the interpreter."""
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            if file.read_text().rpartition(")")[2].split()[0] in "RD":
                return True
        except OSError:
            pass
    return False


def family(marker):
    """Pids of the living processes that carry this heartbeat folder in their environment, wherever they
    moved: torchrun gives each worker a session of its own, and its death does not end them."""
    found, wanted = [], f"AEGIS_HEARTBEAT={marker}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0") and process(folder.name):
                found.append(int(folder.name))
        except OSError:
            pass
    return found


def memory_left(meminfo="/proc/meminfo"):
    """Share of the machine's memory that is available."""
    numbers = dict(re.findall(r"^(\w+):\s+(\d+)", Path(meminfo).read_text(), re.M))
    return int(numbers["MemAvailable"]) / int(numbers["MemTotal"])


def nic_errors(sys_root="/sys"):
    """{interface: sum of its error counters}; empty where sysfs shows none."""
    errors = defaultdict(int)
    for pattern, names in (
        ("class/infiniband/*/ports/*/counters/*",
         "symbol_error link_error_recovery link_downed port_rcv_errors "
         "local_link_integrity_errors excessive_buffer_overrun_errors VL15_dropped"),
        ("class/infiniband/*/ports/*/hw_counters/*", "local_ack_timeout_err packet_seq_err out_of_sequence"),
        ("class/net/*/statistics/*", "rx_errors tx_errors rx_crc_errors tx_carrier_errors"),
    ):
        for file in Path(sys_root).glob(pattern):
            if file.name in names.split():
                try:
                    errors[file.relative_to(sys_root).parts[2]] += int(file.read_text())
                except (OSError, ValueError):
                    pass            # a port without this counter says EINVAL
    return dict(errors)


def smi_command():
    """The command that shows ECC counters and temperatures on this machine, None where there is no tool."""
    for command in ("amd-smi metric --ecc --temperature --json", "rocm-smi --showtemp --showrasinfo"):
        if shutil.which(command.split()[0]):
            return command.split()


def read_smi(text):
    """(correctable, uncorrectable) ECC errors of all cards and the hottest degrees, from either tool's
    output. Zeros where it says nothing."""
    try:
        pairs = list(leaves(json.loads(text)))
    except ValueError:
        # rocm-smi: rows "UMC  ENABLED  3  0", "Temperature (Sensor junction) (C): 45"
        blocks = re.findall(r"ENABLED\s+(\d+)\s+(\d+)", text)
        pairs = [(f"total_{kind}_count", int(block[i])) for block in blocks
                 for i, kind in enumerate(("correctable", "uncorrectable"))]
        pairs += [("hotspot", float(t)) for t in re.findall(r"\((?:Sensor )?junction\).*?:\s*([\d.]+)", text)]
    total = lambda name: int(sum(value for key, value in pairs if key == f"total_{name}_count"))
    heat = max((value for key, value in pairs if key == "hotspot"), default=0.0)
    return total("correctable"), total("uncorrectable"), heat


def leaves(node, key=""):
    """(key in lower case, number) of a nested structure; {"value": 45, "unit": "C"} counts under its own
    name."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from leaves(value, key if name == "value" else name.lower())
    elif isinstance(node, list):
        for value in node:
            yield from leaves(value, key)
    elif isinstance(node, (int, float)):
        yield key, node


class Tail:
    """New lines of a file that grows: a log, or /dev/kmsg. Nothing where it cannot be read."""

    def __init__(self, file, offset=None):
        """offset: where to begin; None: at the present end."""
        self.rest, self.handle = b"", None
        try:
            self.handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self.handle, offset or 0, os.SEEK_END if offset is None else os.SEEK_SET)
        except OSError:
            pass

    def offset(self):
        return os.lseek(self.handle, 0, os.SEEK_CUR) - len(self.rest)

    def lines(self):
        found = []
        while self.handle is not None:
            try:
                block = os.read(self.handle, 1 << 16)
            except OSError:             # kmsg: nothing new, or records lost
                break
            if not block:
                break
            *whole, self.rest = (self.rest + block).split(b"\n")
            found += whole
        return [line.decode(errors="replace") for line in found]


def recognise(lines, table):
    """The first fault of `table`, in the table's order, that a line shows: Fault or None."""
    for pattern, what, kind, advice in table:
        for line in lines:
            if re.search(pattern, line):
                return Fault(what, kind, line.strip()[:300], advice)
    return None


if __name__ == "__main__":
    print(f"memory   {memory_left():.1%} left")
    print(f"network  errors by card: {nic_errors() or 'no counters in /sys'}")
    print(f"gpus     {' '.join(smi_command() or ['no amd-smi, no rocm-smi on PATH'])}")
    for text in ("RuntimeError: HIP out of memory.", "amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!"):
        print(f"line     {text!r} is: {recognise([text], LINES)}")

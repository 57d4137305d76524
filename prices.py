"""What a training step costs on the machine at hand, operation by operation.

    step time = sum over the operations of one step of (measured seconds + overhead of Python and autograd)

`measure_operations` times every distinct operation of some steps once on real tensors. An operation that was
not measured takes the time of its nearest measured relative, scaled by its work (operations.py). So one
measured shape serves to predict others: `predict`.

Left out: what operations of one step do to each other's caches. On a shared machine repeat a measurement that
looks odd. Run: `python prices.py`.
"""

import collections
import math
import time

import torch
from torch.utils._pytree import tree_map

from model import ZAYAConfig
from operations import Spec, real_step, step_operations


def seconds(work, device="cpu", least=0.002, repeats=5):
    """Seconds of one call of `work`: the least of `repeats` rounds of at least `least` seconds, as other
    processes only ever add."""
    wait = torch.cuda.synchronize if str(device).startswith("cuda") else lambda: None
    work()
    wait()
    count, rounds = 1, []
    while len(rounds) < repeats:
        start = time.perf_counter()
        for _ in range(count):
            work()
        wait()
        spent = time.perf_counter() - start
        if spent < least and count < 10_000:
            count, rounds = max(2 * count, int(count * least / max(spent, 1e-9))), []
        else:
            rounds.append(spent / count)
    return min(rounds)


def real(spec, device):
    """A tensor like spec: floats from 0.5 to 1.5 (no denormals, no overflow), integers 0, masks true."""
    length = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride)) if 0 not in spec.shape else 0
    flat = torch.empty(length, dtype=spec.dtype, device=device)
    flat.uniform_(0.5, 1.5) if spec.dtype.is_floating_point else flat.fill_(spec.dtype == torch.bool)
    return flat.as_strided(spec.shape, spec.stride)


@torch.no_grad()
def time_operation(op, device="cpu"):
    """Seconds of one call of this operation on real tensors."""
    args, kwargs = tree_map(lambda x: real(x, device) if isinstance(x, Spec) else x, (op.args, op.kwargs))
    if op.name == "grouped_product":        # tokens spread evenly over the experts
        offsets = args[2]
        rows = args[0].shape[0] if args[1].dim() == 3 else args[0].shape[1]
        offsets.copy_(torch.arange(1, len(offsets) + 1) * rows // len(offsets))
    return seconds(lambda: KEPT.keep(op.function(*args, **kwargs)), device)


class Kept:
    """Holds the last results, as autograd does in a step: each new one then lands in memory that no cache
    holds. Timed without this, element-wise operations on a CPU look twice as fast as they are."""

    def __init__(self, limit=2**25):
        self.limit, self.bytes, self.held = limit, 0, collections.deque()

    def keep(self, result):
        size = result.nbytes if isinstance(result, torch.Tensor) else 0
        self.held.append((size, result))
        self.bytes += size
        while self.bytes > self.limit or len(self.held) > 1000:
            self.bytes -= self.held.popleft()[0]


KEPT = Kept()


def overhead(dtype=torch.float32, device="cpu"):
    """Seconds of Python and autograd for each operation, views too, beyond the operation itself.

    It is what a step of one sequence of two tokens, with hardly any work, takes beyond its operations.
    """
    config = ZAYAConfig.preset("tiny")
    counts, views = step_operations(config, 1, 2, "muon", dtype, device)
    priced = sum(n * time_operation(op, device) for (_, op), n in counts.items())
    step = seconds(real_step(config, 1, 2, "muon", dtype, device), device, least=0.2)
    return max(step - priced, 0) / (sum(counts.values()) + views)


def measure_operations(shapes, device="cpu", dtype=torch.float32):
    """Time each distinct operation of the steps in shapes, each (config, batch, seq_len, optimizer).

    -> rows of a machine file: dicts of name, signature, dims, work, seconds.
    """
    operations = {}
    for config, batch, seq_len, optimizer in shapes:
        counts, _ = step_operations(config, batch, seq_len, optimizer, dtype, device)
        operations.update((op.signature, op) for _, op in counts)
    print(f"timing {len(operations)} operations of the model's step")
    return [dict(name=op.name, signature=signature, dims=op.dims, work=op.work,
                 seconds=time_operation(op, device)) for signature, op in operations.items()]


class Prices:
    """Measured seconds by operation, or by the nearest relative's. rows: as measure_operations gives them."""

    def __init__(self, rows):
        self.exact = {row["signature"]: row["seconds"] for row in rows}
        self.relatives = collections.defaultdict(list)
        for row in rows:
            self.relatives[row["name"]].append(row)
        self.floor = {name: min(r["seconds"] for r in rows) for name, rows in self.relatives.items()}
        self.any = [row for row in rows if not row["dims"]]

    def __call__(self, op):
        if op.signature in self.exact:
            return self.exact[op.signature]
        rows = self.relatives.get(op.name) or self.any
        near = min(rows, key=lambda row: distance(op, row))
        floor, ratio = self.floor.get(op.name, 0), op.work / max(near["work"], 1)
        if near["seconds"] > floor:         # a fixed cost and one by work
            return floor + (near["seconds"] - floor) * ratio
        return floor * max(ratio, 1)


def distance(op, row):
    """How unlike two operations are: in the logarithms of a product's M, N, K and batch, or of the bytes."""
    if op.dims and row["dims"]:
        return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(op.dims, row["dims"]))
    return abs(math.log(max(op.work, 1) / max(row["work"], 1)))


def predict(machine, config, batch, seq_len, optimizer="muon"):
    """Seconds of one training step of batch x seq_len tokens, from a measured machine, by kind: products and
    elementwise of forward and backward, newton_schulz (the optimizer's products), optimizer (the rest of it),
    and their sum, step."""
    counts, views = step_operations(config, batch, seq_len, optimizer, getattr(torch, machine["dtype"]),
                                    machine["kind"])
    price, times = Prices(machine["operations"]), collections.Counter(elementwise=views * machine["overhead"])
    for (phase, op), n in counts.items():
        product = bool(op.dims) or "scaled_dot" in op.name
        kind = ("elementwise", "products") if phase != "optimizer" else ("optimizer", "newton_schulz")
        times[kind[product]] += n * (price(op) + machine["overhead"])
    times["step"] = sum(times.values())
    return dict(times)


def demonstrate():
    """A step of the tiny preset, predicted from its operations one by one, and measured as a whole."""
    config = ZAYAConfig.preset("tiny")
    rows = measure_operations([(config, 4, 64, "muon")])
    machine = dict(dtype="float32", kind="cpu", overhead=overhead(), operations=rows)
    for kind, spent in predict(machine, config, 4, 64).items():
        print(f"  {kind:14} {spent * 1e3:6.2f} ms")
    print(f"measured         {seconds(real_step(config, 4, 64), least=0.2) * 1e3:6.2f} ms")


if __name__ == "__main__":
    demonstrate()

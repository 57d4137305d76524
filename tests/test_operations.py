"""The operations of a step: which they are, and their sizes."""

import torch

from model import ZAYA, ZAYAConfig
from operations import Recorder, product_dims, step_operations
from test_sheet import ODD


def test_product_dims_of_every_kind():
    for name, shapes, dims in [
            ("mm", [(3, 5), (5, 7)], (1, 3, 7, 5)), ("addmm", [(7,), (3, 5), (5, 7)], (1, 3, 7, 5)),
            ("bmm", [(2, 3, 5), (2, 5, 7)], (2, 3, 7, 5)), ("add", [(3, 5), (3, 5)], ()),
            ("baddbmm", [(1,), (2, 3, 5), (2, 5, 7)], (2, 3, 7, 5)),
            ("grouped_product", [(9, 5), (4, 5, 7), (4,)], (1, 9, 7, 5)),
            ("grouped_product", [(5, 9), (9, 7), (4,)], (1, 5, 7, 9))]:
        assert product_dims(name, shapes) == dims, name


def test_recorded_operations_are_those_of_a_real_step():
    """The same operations, as often, on fake tensors as on real ones: forward and backward."""
    config = ZAYAConfig(**ODD)
    model, tokens = ZAYA(config), torch.zeros(2, 16, dtype=torch.int64)
    with Recorder() as recorder:
        loss = model(tokens, tokens)[1]
        recorder.phase = "backward"
        loss.backward()
    fake, _ = step_operations(config, 2, 16)
    names = lambda counts: {phase: sum(n for (ph, op), n in counts.items() if ph == phase and op.dims)
                            for phase in ("forward", "backward")}
    assert names(recorder.counts) == names(fake)
    work = lambda counts: sum(n * op.work for (phase, op), n in counts.items()
                              if phase != "optimizer" and op.dims)
    assert work(recorder.counts) == work(fake)

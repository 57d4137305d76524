"""GPUs: what their makers say of them, or what plan.py --measure found on the machine at hand.

Rates are of dense bfloat16 products. For MI300X the ZAYA1 paper (arXiv 2511.17127) measures what a copy and a
link reach, and from which size a product does; that stands here in place of the datasheet's figures. A card
that is not in CARDS is refused, for its peak would be a guess: measure it.

Run: `python cards.py`.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from model import require


@dataclass
class Card:
    """One GPU, from its maker's datasheet unless said otherwise; bytes, seconds, FLOP/s. None: unknown here.

    link: to each other GPU of the node where `mesh` (an MI300X reaches all 7 with 7 links), else to the
    switch, one direction. saturating: FLOPs of a product from which it reaches its peak rate.
    """
    peak: float
    memory: float
    bandwidth: float
    watts: float
    link: float | None
    mesh: bool = False
    units: int | None = None
    saturating: float | None = None


# MI300X: bandwidth is the copy measured in the paper (datasheet: 5.3 TB/s), links and saturation are its too.
CARDS = {
    "MI300X": Card(1307e12, 192e9, 4.33e12, 750, 64e9, True, 304, 200e9),
    "MI325X": Card(1307e12, 256e9, 6.0e12, 1000, 64e9, True, 304, 200e9),
    "MI250X": Card(383e12, 128e9, 3.2e12, 560, None, True, 208),
    "H200": Card(989e12, 141e9, 4.8e12, 700, 450e9, False, 132),
    "H100": Card(989e12, 80e9, 3.35e12, 700, 450e9, False, 132),
    "A100": Card(312e12, 80e9, 2.0e12, 400, 300e9, False, 108),
}


def card_of(name, machine=None, watts=None):
    """The card of this name from CARDS, or what --measure wrote to the file `machine` (peak: best product).

    watts: of a measured card that CARDS does not know.
    """
    if not machine:
        return CARDS[name]
    found = read_machine(machine)
    known = next((card for name, card in CARDS.items() if name in found["device"].upper()), None)
    return Card(found["peak"], found["memory"], found["bandwidth"], known.watts if known else watts,
                found["link"], False, known and known.units, known and known.saturating)


@functools.lru_cache(maxsize=None)
def read_machine(path):
    """The file that --measure wrote. FileNotFoundError or ValueError say how to make one."""
    if not Path(path).exists():
        raise FileNotFoundError(f"--machine {path} does not exist: make it with python plan.py --measure "
                                f"--machine {path}")
    try:
        found = json.loads(Path(path).read_text())
        missing = {"device", "kind", "dtype", "peak", "memory", "bandwidth", "link", "overhead",
                   "operations"} - found.keys()
    except (json.JSONDecodeError, AttributeError):
        missing = {"JSON"}
    require(not missing, f"--machine {path} is no file of plan.py --measure: it lacks "
                         f"{', '.join(sorted(missing))}")
    return found


if __name__ == "__main__":
    print("card       TFLOP/s   GB    GB/s     W  link GB/s  FLOPs to a byte of memory")
    for name, c in CARDS.items():
        link = f"{c.link / 1e9:11.0f}" if c.link else "    unknown"
        print(f"{name:9}{c.peak / 1e12:9,.0f}{c.memory / 1e9:5.0f}{c.bandwidth / 1e9:8,.0f}{c.watts:6.0f}"
              f"{link}{c.peak / c.bandwidth:10.0f}")

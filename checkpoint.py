"""Checkpoints: written in the background, every rank its part, complete or absent.

    saver = Checkpointer("out/checkpoints")           # every rank; clears up after a killed run
    meta = load(latest("out/checkpoints"), state)     # every rank; latest() on one, then broadcast
    saver.save(step, {"model": model.state_dict(), "optimizer": ..., "seen": 17}, meta)    # every rank
    saver.wait()                                      # before leaving

As in ZAYA1's training system (arXiv 2511.17127, checkpointing) a checkpoint counts only when the parts of all
ranks are there. `torch.distributed.checkpoint` (DCP) plans and writes; this file decides when a folder
counts, which to keep and which to trust:

    FOLDER/step_00000500/__0_0.distcp, __1_0.distcp, ...  one file a rank: tensors, each by torch.save
                         .metadata                        DCP's index: name -> shape, dtype, file, offset
                         meta.json                        step and whatever the caller adds
                         COMPLETE                         the marker: size and SHA-256 of every file

All is written under step_00000500.tmp and fsynced, the marker last, then renamed. A folder without marker is
nothing and the next Checkpointer removes it; with a marker it is whole, under either name. "Newest" is the
one written last: a run that went back to an earlier step is not overruled by the future it left. FOLDER must
be one that all ranks see, with room for keep + 1 checkpoints and the best.

Names: nested dicts become "model/blocks.0.x", without "_orig_mod." (torch.compile) and "module." (DDP), in
saving and loading. A plain leaf (number, text, bool, None, lists of these) is kept as JSON in a uint8 tensor,
where DCP would pickle it. "model/..." is the same on all ranks: rank r of W copies and writes every W-th
tensor. All else may live on some ranks only (ZeRO-1); what several hold DCP writes once. Entries whose
top-level key starts with "rank" ("rank3": random states) belong to one rank and may lack or be left over.

Safety: `.metadata` is a pickle that DCP opens with `pickle.load`, which runs whatever the file asks for. Here
an unpickler admits DCP's own records only, and tensors go through torch.load(weights_only=True). With
strangers exchange the plain .pt of `export`. Checksums find damage, not forgery. Left out: tensors split over
ranks (FSDP).
"""

import hashlib
import json
import os
import pickle
import re
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

import config

MARKER = "COMPLETE"
STEP = re.compile(r"step_\d+(\.tmp)?")
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is normal here


# ----------------------------------------------------------------------------------------------------- saving
class Checkpointer:
    """Saves into `folder`, keeps the newest `keep` checkpoints and the best. Every rank makes one.

    A save's collectives run in a thread; a gloo group of their own keeps them apart from those of training.
    Call `wait()` before `destroy_process_group()`.
    """

    def __init__(self, folder, keep=2):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest checkpoint must be kept")
        self.folder, self.keep, self._running, self._copies = Path(folder), keep, None, {}
        self.rank, self.world = _rank_world()
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        if self.rank == 0:
            _clean(self.folder)

    def save(self, step, state, meta, best=False):
        """Starts a save and returns when `state` is copied; waits for the save before this one first.

        state: nested dict, see the header. meta: dict for meta.json (rank 0's counts). best: keep it until a
        later best. Raises OSError if the save before failed, ValueError if a leaf cannot be stored.
        """
        self.wait()
        tensors = {name: _as_tensor(name, owner[key]) for name, (owner, key) in _flatten(state).items()}
        weights = [name for name in tensors if name.startswith("model/")]
        weights.sort(key=lambda name: (-tensors[name].numel(), name))
        for name in set(weights) - set(weights[self.rank::self.world]):
            del tensors[name]
        self._copy(tensors)
        writer = _Writer(self.folder, step, {"step": step, **meta}, best, self.keep)
        self._running = step, dcp.async_save(self._copies, storage_writer=writer, process_group=self.group,
                                             planner=DefaultSavePlanner(flatten_state_dict=False))

    def _copy(self, tensors):
        """Into memory that one save takes over from the other (pinned where it comes from a GPU)."""
        before, self._copies = self._copies, {}
        for name, tensor in tensors.items():
            copy = before.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[name] = copy.copy_(tensor, non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()  # the copies must be there before training changes the tensors

    def wait(self):
        """Returns when no save is running. Raises OSError, on every rank, if the last one failed."""
        if self._running is None:
            return
        step, future = self._running
        try:
            future.result()  # Ctrl-C here leaves _running as it is: one can wait again
        except (Exception, CheckpointException) as error:  # DCP's is a BaseException
            self._running = None
            if self.rank == 0:  # gives a full disk its space back
                shutil.rmtree(self.folder / f"step_{step:08d}.tmp", ignore_errors=True)
            failures = getattr(error, "failures", {self.rank: (error, None)}).items()
            reasons = "; ".join(f"rank {rank}: {reason}".splitlines()[0] for rank, (reason, _) in failures)
            raise OSError(f"saving step {step} to {self.folder} failed ({reasons}); "
                          "the checkpoints before it are untouched") from None
        self._running = None


class _Writer(dcp.FileSystemWriter):
    """DCP's writer (one fsynced file a rank) into a folder that is published only when it is whole."""

    def __init__(self, folder, step, meta, best, keep):
        self.final = folder / f"step_{step:08d}"
        super().__init__(self.final.with_suffix(".tmp"), per_thread_copy_ahead=0)
        self.meta, self.marker, self.keep = json.dumps(meta, indent=1), {"step": step, "best": best}, keep

    def stage(self, state):
        return state  # Checkpointer has copied it

    def storage_meta(self):
        return None  # it would put the folder's absolute path into the checkpoint

    def prepare_global_plan(self, plans):
        """Rank 0, after the ranks made the folder and before they write: empties it."""
        shutil.rmtree(self.path)
        self.path.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner):
        """Every rank. A last result carries its file's size and checksum to rank 0."""
        try:
            results = super().write_data(plan, planner).wait()
        except Exception as error:  # torch hides "no space left" behind "PytorchStreamWriter failed"
            while error.__context__ and not isinstance(error, OSError):
                error = error.__context__
            raise error from None
        file = self.path / f"{plan.storage_data.prefix}0.distcp"
        future = torch.futures.Future()
        future.set_result(results + [WriteResult(MetadataIndex(file.name), *_stamp(file))])
        return future

    def finish(self, metadata, results):
        """Rank 0, when all have written: index, meta.json, marker, rename, prune. The order is the safety."""
        files = {rank[-1].index.fqn: (rank[-1].size_in_bytes, rank[-1].storage_data) for rank in results}
        super().finish(metadata, [rank[:-1] for rank in results])
        (self.path / "meta.json").write_text(self.meta)
        files |= {name: _stamp(self.path / name) for name in (".metadata", "meta.json")}
        folder = self.final.parent
        number = 1 + max((marker["number"] for marker, _ in _checkpoints(folder) if marker), default=0)
        text = json.dumps({**self.marker, "number": number, "files": files})
        _fsync(self.path / "meta.json", self.path)
        (self.path / MARKER).write_text(text + "\n" + hashlib.sha256(text.encode()).hexdigest())
        _fsync(self.path / MARKER, self.path)
        _remove(self.final)  # the same step, saved before; if we die here, the .tmp is whole and counts
        self.path.rename(self.final)
        _fsync(folder)
        done = [(marker["best"], path) for marker, path in _checkpoints(folder) if marker]
        kept = done[-self.keep:] + [pair for pair in done if pair[0]][-1:]
        for pair in done:
            if pair not in kept:
                _remove(pair[1])


# ---------------------------------------------------------------------------------------------------- loading
def latest(folder, log=print):
    """The newest undamaged checkpoint in `folder` (every byte is read) or None.

    `log` gets a line for each one passed over. No collective: of several ranks one calls it and broadcasts.
    """
    for _, path in reversed(_checkpoints(folder)):
        if not (damage := _damage(path)):
            return path
        log(f"checkpoint {path} is passed over: {damage}")
    return None


def load(path, state):
    """Fills the tensors of `state` in place, replaces its other leaves, returns meta. Every rank calls it.

    path: a checkpoint, or a folder of them for the newest. Raises FileNotFoundError, or ValueError (on all
    ranks, `state` untouched) if it is damaged or entries lack, are surplus, or differ in shape or dtype.
    """
    path = _resolve(path)
    if path.is_file():
        raise ValueError(f"{path} holds weights only: no optimizer, data position or random state to resume. "
                         f"Start a new run from it with a fresh optimizer: python train.py --init {path}")
    for damage in filter(None, _gather(_damage(path, *_rank_world()))):  # each rank checks its share of files
        raise ValueError(f"checkpoint {path} is damaged: {damage}; --resume auto takes the one before")
    index, entries, tensors, problems = _index(path), _flatten(state), {}, set()
    for name, (owner, key) in entries.items():
        if name in index:
            plain = not isinstance(owner[key], torch.Tensor)
            tensors[name] = _empty(index[name]) if plain else owner[key].detach()
            there, here = ((tuple(t.shape), t.dtype) for t in (_empty(index[name], "meta"), tensors[name]))
            if there != here:
                problems.add("{} is {} {} in the checkpoint, {} {} here".format(name, *there, *here))
        elif not name.startswith("rank"):
            problems.add(f"{name} is missing in the checkpoint")
    everyone = _gather((problems, set(entries)))
    problems = set().union(*(theirs for theirs, _ in everyone))
    surplus = set(index).difference(*(names for _, names in everyone))  # under ZeRO-1: what no rank expects
    problems |= {f"{name} is not expected here" for name in surplus if not name.startswith("rank")}
    if problems:
        raise ValueError(f"checkpoint {path} does not fit: " + "; ".join(sorted(problems)))
    _read(path, tensors)
    for name in tensors:
        owner, key = entries[name]
        if not isinstance(owner[key], torch.Tensor):
            owner[key] = json.loads(bytes(tensors[name].tolist()))
    return json.loads((path / "meta.json").read_text())


def load_weights(path):
    """(meta, {name: tensor on the CPU}): the model's part, without a process group.

    path: a checkpoint, a folder of them, a run, or an exported .pt. Raises FileNotFoundError or ValueError.
    """
    path = _resolve(path)
    if path.is_file():
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            return content["meta"], content["model"]
        except OSError:
            raise
        except Exception:                   # what an unpickler stumbles over in a foreign file is endless
            raise ValueError(f"{path} is damaged or not made by: checkpoint.py RUN --export FILE") from None
    if damage := _damage(path):
        raise ValueError(f"checkpoint {path} is damaged: {damage}")
    tensors = {name: _empty(entry) for name, entry in _index(path).items() if name.startswith("model/")}
    _read(path, tensors)
    weights = {name.removeprefix("model/"): tensor for name, tensor in tensors.items()}
    return json.loads((path / "meta.json").read_text()), weights


def export(path, file):
    """Writes {"model": {name: tensor}, "meta": dict} to one file for torch.load(file, weights_only=True)."""
    meta, weights = load_weights(path)
    temporary = Path(f"{file}.tmp")
    try:
        with open(temporary, "wb") as stream:       # given a path, torch would hide why it cannot be written
            torch.save({"model": weights, "meta": meta}, stream)
        _fsync(temporary)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------- folders
def _fsync(*paths):
    """Of a file the content; of a folder the names, or a power failure may undo a rename."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _stamp(file):
    """(bytes, SHA-256) of a file."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
        return stream.tell(), digest.hexdigest()


def _marker(path):
    """The marker's dict; None where it is absent or damaged."""
    try:
        text, digest = (path / MARKER).read_text().split("\n")
        return json.loads(text) if hashlib.sha256(text.encode()).hexdigest() == digest else None
    except (OSError, ValueError):
        return None


def _checkpoints(folder):
    """[(marker or None where it is damaged, path)] in the order of writing, the damaged last."""
    paths = sorted(path for path in Path(folder).glob("step_*") if STEP.fullmatch(path.name))
    pairs = [(_marker(path), path) for path in paths if (path / MARKER).exists()]
    pairs = [(marker, path) for marker, path in pairs if marker or not path.suffix]  # killed in writing it
    return sorted(pairs, key=lambda pair: pair[0]["number"] if pair[0] else float("inf"))


def _damage(path, rank=0, world=1):
    """In words what is wrong with a checkpoint (looking at every `world`-th file), or None."""
    if (marker := _marker(path)) is None:
        return f"its marker {MARKER} is missing or damaged"
    for name, (size, digest) in list(marker["files"].items())[rank::world]:
        try:
            size_here, digest_here = _stamp(path / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if size_here != size:
            return f"{name} has {size_here} bytes instead of {size}"
        if digest_here != digest:
            return f"the checksum of {name} differs"
    return None


def _remove(path):
    (path / MARKER).unlink(missing_ok=True)  # first: never a marker on half a checkpoint
    shutil.rmtree(path, ignore_errors=True)


def _clean(folder):
    """Removes what killed saves and removals left; a whole checkpoint that lacks only its rename gets it."""
    for path in filter(lambda path: STEP.fullmatch(path.name), folder.glob("step_*")):
        if path.suffix and _marker(path):
            _remove(path.with_suffix(""))
            path.rename(path.with_suffix(""))
        elif path.suffix or not (path / MARKER).exists():
            _remove(path)


def _resolve(path):
    """The checkpoint's folder, or the exported file, that a user's path stands for."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: name a run, a checkpoint in it, or an exported .pt")
    if path.is_file() or STEP.fullmatch(path.name) or (path / MARKER).exists():
        return path
    if found := latest(path / "checkpoints") or latest(path):
        return found
    raise FileNotFoundError(f"{path} holds no undamaged checkpoint; its list: python checkpoint.py {path}")


# ---------------------------------------------------------------------------------------------------- tensors
def _rank_world():
    on = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if on else (0, 1)


def _gather(thing):
    """[rank 0's, rank 1's, ...]"""
    things = [thing] * _rank_world()[1]
    if len(things) > 1:
        dist.all_gather_object(things, thing)
    return things


def _flatten(state, prefix=""):
    """{name: (dict, key)} of all leaves."""
    entries = {}
    for key, value in state.items():
        name = prefix + re.sub(r"^(module\.)+", "", str(key).replace("_orig_mod.", ""))
        inner = _flatten(value, name + "/") if isinstance(value, dict) else {name: (state, key)}
        if clash := entries.keys() & inner.keys():
            raise ValueError(f"two entries of the state are called {clash.pop()}")
        entries |= inner
    return entries


def _as_tensor(name, value):
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    except TypeError as error:
        raise ValueError(f"{name} cannot be saved, it is no tensor and not plain: {error}") from None


def _empty(entry, device="cpu"):
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


class _Unpickler(pickle.Unpickler):
    """Admits the records of DCP's index and nothing that could act."""

    RECORDS = {
        "torch.distributed.checkpoint.metadata": (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "_MEM_FORMAT_ENCODING"),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        "torch": ("Size",)}

    def find_class(self, module, name):
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in self.RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args, **kwargs):
        try:
            with open(self.path / ".metadata", "rb") as stream:
                return _Unpickler(stream).load()
        except pickle.UnpicklingError as error:
            raise ValueError(f"{self.path}/.metadata is refused, no index needs this: {error}") from None


def _index(path):
    """{name: DCP's record of size and dtype}"""
    return _Reader(path).read_metadata().state_dict_metadata


def _read(path, tensors):
    """Fills {name: tensor}. Without collectives: every rank reads what it needs."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(tensors, storage_reader=_Reader(path), planner=planner, no_dist=True)


# ----------------------------------------------------------------------------------------------- command line
def list_checkpoints(path):
    """One line for each checkpoint of a run: step, size, name, complete or damaged. Oldest first."""
    folder = next((f for f in (Path(path) / "checkpoints", Path(path)) if f.is_dir()), None)
    if folder is None:
        raise FileNotFoundError(f"{path} is not the folder of a run")
    lines, found = [], _checkpoints(folder)
    for marker, saved in found:
        size = sum(file.stat().st_size for file in saved.iterdir()) / 1e6
        state = f"DAMAGED: {damage}" if (damage := _damage(saved)) else "complete" + marker["best"] * ", best"
        lines.append(f"step {int(saved.stem[5:])}  {size:.1f} MB  {saved.name}  {state}")
    unfinished = sorted(set(folder.glob("step_*")) - {saved for _, saved in found})
    return lines + [f"{half.name}  unfinished" for half in unfinished] or [f"{folder} holds no checkpoint"]


def demo():
    """Saves while "training" goes on, then cuts the newest short."""
    with tempfile.TemporaryDirectory() as folder:
        saver, state = Checkpointer(folder), {"model": {"w": torch.zeros(1000, 1000)}, "seen": 0}
        for step in range(1, 5):
            state["model"]["w"] += 1
            state["seen"] += 64
            start = time.perf_counter()
            saver.save(step, state, {"note": "a demonstration"}, best=step == 1)
            print(f"step {step}: training stood still for {1e3 * (time.perf_counter() - start):.1f} ms")
            saver.wait()
        os.truncate(latest(folder) / "__0_0.distcp", 1_000_000)
        print("kept are the best and the newest two; the last has just been damaged:")
        print(*list_checkpoints(folder), sep="\n")
        meta = load(latest(folder), state)
        print(f"loaded {meta}: w is {state['model']['w'].unique().tolist()}, seen is {state['seen']}")


def main(argv):
    parser = config.Parser(description="Lists or exports a run's checkpoints; alone, shows itself.")
    parser.add_argument("run", nargs="?", help="a run's folder (for --export also one checkpoint)")
    parser.add_argument("--export", metavar="FILE", help="write the newest weights as one plain .pt")
    args = parser.parse_args(argv)
    if args.export and args.run is None:
        raise ValueError("--export needs a run: python checkpoint.py RUN --export FILE")
    if args.run is None:
        return demo()
    if not args.export:
        return print(*list_checkpoints(args.run), sep="\n")
    export(args.run, args.export)
    print(f"{args.export}: {os.path.getsize(args.export) / 1e6:.1f} MB")


if __name__ == "__main__":
    config.run(main)

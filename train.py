"""Trains a ZAYA1: one process on a laptop, or torchrun over nodes of GPUs, the same loop.

    python train.py                                    the default run: about five minutes on two CPU cores
    python train.py --help                             every flag with its default
    python train.py --data book.txt --tokens 1e6       your own text
    python train.py --resume auto --out runs/mine      go on where that run stopped
    python train.py --recipe zaya1 --preset zaya1_8b --dry-run      the published recipe, on paper
    torchrun --nproc-per-node=8 train.py ...           data parallel

A recipe is a list of phases, each with its tokens, context, RoPE base and learning rates (ZAYA1, arXiv
2511.17127; 2605.05365). One optimizer step: accumulate micro-steps, guard, clip, Muon and AdamW,
balancing biases, log. Which samples a step reads depends on (seed, phase, sample index) alone, not on the
number of ranks, so a run may be resumed on another number.
"""

import dataclasses
import gc
import json
import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from tqdm import tqdm

import checkpoint
import config as command_line
import data
import guard
import kernels_hip
import optim
from log import Log, balance_columns, describe, flops_per_token, mfu, residual_columns
from model import PRESETS, ZAYAConfig, require
from prepare import (build_model, check_memory, complete, flag, open_sources, pick_device, resolve_compile,
                     run_folder, saved_config)
from recipe import PUBLISHED_RANKS, TrainConfig, micro_steps, plan, print_plan
from router import Balancer
from sample import generate
from speaker import read_run
from tokenizer import write_atomically


@torch.no_grad()
def evaluate(model, tokens, seq_len, limit, rank, world, autocast):
    """Mean validation loss in nats over up to `limit` tokens, spread evenly over the part; the ranks share
    the windows."""
    model.eval()
    device = model.embed_tokens.weight.device
    count = max(1, min(limit // seq_len, (len(tokens) - 1) // seq_len))
    starts = [i * (len(tokens) - 1 - seq_len) // max(count - 1, 1) for i in range(count)]
    total = torch.zeros(2, dtype=torch.float64, device=device)
    size = max(1, 4096 // seq_len)
    mine = starts[rank::world]
    for i in range(0, len(mine), size):
        windows = [torch.as_tensor(tokens[s:s + seq_len + 1].astype("int64")) for s in mine[i:i + size]]
        rows = torch.stack(windows).to(device)
        with autocast():
            loss = model(rows[:, :-1], rows[:, 1:])[1]
        total += torch.tensor([loss.item() * len(rows), len(rows)], dtype=torch.float64, device=device)
    if world > 1:
        dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


class Stop:
    """SIGTERM and Ctrl-C set a flag; the loop asks for it once a step, and the ranks agree."""

    def __init__(self, world):
        self.asked, self.world = False, world
        self.previous = {s: signal.signal(s, self.on_signal) for s in (signal.SIGTERM, signal.SIGINT)}

    def on_signal(self, number, frame):
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt         # the second Ctrl-C means now
        self.asked = True

    def agreed(self, device):
        if self.world > 1:
            flag = torch.tensor(int(self.asked), device=device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self.asked = bool(flag.item())
        return self.asked

    def restore(self):
        for number, handler in self.previous.items():
            signal.signal(number, handler)


class Run:
    """Everything a run consists of, made from its configuration: plan, data, model, optimizers, log,
    checkpoints."""

    def __init__(self, cfg, rank, world, local_rank):
        self.cfg, self.rank, self.world = cfg, rank, world
        self.heart = guard.Heartbeat(rank)
        self.heart.beat("start")
        self.phases = plan(cfg)
        self.steps = sum(steps for _, steps, _ in self.phases)
        for _, _, p in self.phases:
            micro_steps(p, world, cfg.micro_tokens)     # refuses what does not divide
        self.device, dtype = pick_device(cfg, local_rank)
        half = dtype == torch.bfloat16
        self.autocast = lambda: torch.autocast(self.device.type, dtype) if half else nullcontext()
        self.dataset, self.streams = open_sources(cfg, self.phases)
        cfg.model = complete(cfg, self.phases, self.dataset.tokenizer)
        check_memory(cfg.model, self.device)
        self.out = run_folder(cfg, rank, world)
        self.kernels = kernels_hip.select(cfg.kernels) or kernels_hip.status()
        self.model = build_model(cfg, self.device)
        self.optimizers = optim.build(self.model, cfg.optimizer, 1.0, cfg.weight_decay, ns_steps=cfg.ns_steps)
        self.balancer = Balancer(self.model, cfg.balance_lr)
        self.checkpoints = checkpoint.Checkpointer(self.out / "checkpoints", cfg.keep)
        self.progress = {"step": 0, "tokens": 0, "shift": 0, "best_val": 1e9, "guard": guard.new_memory()}
        self.new_best, self.loads = False, guard.Loads(cfg.model.num_experts)
        self.restore()
        if rank == 0:
            self.describe_itself()
        self.log = Log(self.out, rank, describe(cfg, self.device), self.progress["step"])
        self.compiled, why = resolve_compile(cfg, self.phases)
        self.ddp = self.model
        if world > 1:
            ids = [local_rank] if self.device.type == "cuda" else None
            # gradient_as_bucket_view: or each gradient exists twice.
            self.ddp = torch.nn.parallel.DistributedDataParallel(
                self.model, ids, broadcast_buffers=False, gradient_as_bucket_view=True)
        self.introduce(dtype, why)

    def describe_itself(self):
        """config.json and tokenizer.json, once all is known to fit: what is needed to go on or to sample."""
        spec = self.dataset.tokenizer.save(self.out / "tokenizer.json")
        saved = dataclasses.asdict(self.cfg)
        saved.update(out=str(self.out), tokenizer_file=spec.partition(":")[0])
        write_atomically(self.out / "config.json", json.dumps(saved, indent=1).encode())

    def introduce(self, dtype, compiled):
        say, model, first = self.log.say, self.model, self.phases[0][2]
        say(f"run     {self.out}: {self.steps} steps of {first.batch_tokens:,} tokens, {len(self.phases)} "
            f"phases, {self.world} process" + "es" * (self.world > 1))
        say(f"data    {self.dataset.name}: {len(self.dataset.train):,} + {len(self.dataset.val):,} tokens, "
            f"{self.dataset.bytes_per_token:.2f} bytes a token")
        total, active = model.num_parameters(), model.num_parameters(active=True)
        say(f"model   {total:,} parameters, {active:,} active for a token")
        say(f"path    {self.device}, {dtype}, compile {compiled}; {self.kernels}")

    def state(self):
        """What a checkpoint holds: nested dict of tensors and numbers, by name."""
        names = {p: name for name, p in self.model.named_parameters()}
        names |= {router.balancing_biases: f"blocks.{i}.balancing_biases"
                  for i, router in enumerate(self.balancer.routers)}
        state = {"model": self.model.state_dict(), "progress": self.progress,
                 "balancer": optim.adam_state(self.balancer.optimizer, names)}
        for optimizer in self.optimizers:
            muon = isinstance(optimizer, optim.Muon)
            state["muon" if muon else "adamw"] = (optimizer.named_state() if muon
                                                  else optim.adam_state(optimizer, names))
        return state

    def newest(self):
        """The newest whole checkpoint, the same on all ranks, or None."""
        path = [checkpoint.latest(self.out / "checkpoints") if self.rank == 0 else None]
        if self.world > 1:
            dist.broadcast_object_list(path)
        return path[0]

    def restore(self):
        """With --resume auto: continue from the newest whole checkpoint, if there is one."""
        path = self.newest() if self.cfg.resume else None
        kept = self.cfg.resume and any((self.out / "checkpoints").glob("step_*[0-9]"))
        require(path or not kept, f"{self.out}: every checkpoint is damaged, so there is nothing to go on "
                                  "from; start anew with another --out")
        if path:
            saved = read_run(self.out)["tokenizer_file"]
            before = data.get_tokenizer(f"{saved}:{self.out / 'tokenizer.json'}")
            require(before.digest() == self.dataset.tokenizer.digest(),
                    "the text now gives another tokenizer than the run has: "
                    f"--tokenizer {saved}:{self.out}/tokenizer.json")
            checkpoint.load(path, self.state())

    def save(self):
        """A checkpoint of now, marked best if the last validation was the lowest so far. Damaged weights are
        never saved."""
        if wrong := guard.damage(self.model, self.world):
            return self.tell("not_saved", wrong, "the checkpoints before stay")
        best, self.new_best = self.new_best, False
        meta = {"config": dataclasses.asdict(self.cfg), **self.progress, "guard": None}
        self.checkpoints.save(self.progress["step"], self.state(), meta, best)
        self.log.event("save", step=self.progress["step"], best=best)

    def phase(self, step):
        """(index, first step, steps, Phase) that `step` belongs to."""
        return next((i, *entry) for i, entry in reversed(list(enumerate(self.phases))) if entry[0] <= step)

    def gradients(self, step):
        """Accumulate one batch's gradients. Returns its mean loss on this rank, a tensor that nothing has
        waited for."""
        index, first, _, p = self.phase(step)
        count, size = micro_steps(p, self.world, self.cfg.micro_tokens)
        total = torch.zeros((), device=self.device)
        for micro in range(count):
            batch = step - first + self.progress["shift"]       # going back steps past data
            sample = batch * (p.batch_tokens // p.seq_len) + (micro * self.world + self.rank) * size
            samples = range(sample, sample + size)
            x, y = data.windows(self.streams[index], samples, p.seq_len, self.cfg.seed + index)
            self.ddp.require_backward_grad_sync = micro == count - 1        # DDP reads it in the forward
            with self.autocast():
                loss = self.ddp(x.to(self.device), y.to(self.device))[1] / count
            if micro == count - 1:
                self.heart.mark()       # in the last backward the ranks wait for each other
            loss.backward()
            total += loss.detach()
        return total

    def update(self, step, loss):
        """Guard, clip, optimizers, balancing. Returns (learning rate, loss over all ranks, gradient norm,
        loads (blocks, C), or None if skipped)."""
        _, first, steps, p = self.phase(step)
        lr = optim.lr_at((step - first + 1) / steps, p.lr, p.lr_end, p.warmup)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.grad_clip, foreach=True)
        # DDP has averaged the gradients, so loss and norm are the same on all ranks, and so is what follows.
        loss, norm = guard.share_mean(loss, norm, self.world)
        reason = guard.judge(self.progress["guard"], step, loss, norm, step - first >= p.warmup * steps)
        if reason:
            self.tell("bad_step", reason, "skip", step=step + 1)
        for optimizer in self.optimizers if not reason else ():
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        peak = self.phases[0][2].lr
        load = self.balancer.discard() if reason else self.balancer.step(self.cfg.balance_lr * lr / peak)
        self.model.zero_grad()
        return lr, loss, norm, load

    def tell(self, what, evidence, action, **facts):
        """What the guard found and does about it: an event and a line on the screen."""
        facts = {"step": self.progress["step"], **facts}
        self.log.event(what, **facts, evidence=evidence, **{"class": "data"}, action=action)
        self.log.say(f"guard   step {facts['step']}: {evidence}: {action}")

    def trouble(self, load, inspect):
        """(why to go back to a checkpoint, whether the data is to blame), or None. load: of this step.
        inspect: look at the weights and at the experts' loads too."""
        if load is not None:
            self.loads.add(load)
        bad = len(self.progress["guard"]["bad"])
        # Without a checkpoint going back means giving up: that takes longer.
        if bad >= guard.TROUBLE and (bad >= guard.RECENT or self.newest()):
            return f"{bad} bad steps of {guard.RECENT}", True
        if inspect and (wrong := guard.damage(self.model, self.world)):
            return wrong, False
        found, collapsed = self.loads.look() if inspect else ([], None)
        for what, evidence in found:
            self.tell(what, evidence, "told")
        return (collapsed, True) if collapsed else None

    def roll_back(self, reason, past_data):
        """To the newest whole checkpoint; with past_data also past all data read since. Raises GaveUp."""
        self.checkpoints.wait()
        here, shift, memory, path = *(self.progress[k] for k in ("step", "shift", "guard")), self.newest()
        if path is None or memory["roll_backs"] >= guard.MAX_ROLL_BACKS:
            why = "going back did not help" if path else "there is no checkpoint to go back to"
            self.tell("gave_up", reason, why)
            raise guard.GaveUp(f"{reason} at step {here}, and {why}: lower --lr, or look at the data; the "
                               f"checkpoints in {self.out} are from before")
        counts = {"roll_backs": memory["roll_backs"] + 1, "bad": [],
                  "furthest": max(memory["furthest"], here)}
        checkpoint.load(path, self.state())
        self.progress["guard"].update(counts)
        self.progress["shift"] = shift + (here - self.progress["step"]) * past_data
        self.loads = guard.Loads(self.cfg.model.num_experts)
        self.log.rewind(self.progress["step"])
        self.tell("roll_back", reason, f"back from step {here}" + ", past the data since" * past_data)

    def enter_phase(self, step, announce):
        """The phase of `step`; at its first step, or when the run starts inside it, RoPE is set and the log
        says so."""
        _, first, steps, p = self.phase(step)
        if step == first:
            self.progress["guard"].update(loss=[], norm=[])     # another context has another loss
        if step == first or announce:
            self.model.config.rope_theta = p.rope_theta
            self.model.compile_blocks(p.seq_len in self.compiled)
            self.log.event("phase", step=step, name=p.name, seq_len=p.seq_len, rope_theta=p.rope_theta)
            self.log.say(f"phase   {p.name}: context {p.seq_len}, RoPE base {p.rope_theta:g}, "
                         f"to step {first + steps}")
        return p

    def report(self, p, lr, loss, norm, load, val, seconds):
        """One line on the screen and the same row in log.csv."""
        rate, config = p.batch_tokens / seconds, self.cfg.model
        load = torch.zeros(config.num_blocks, config.num_classes) if load is None else load.cpu()
        one_row = torch.as_tensor(self.dataset.val[:p.seq_len].astype("int64"), device=self.device)[None]
        with self.autocast():
            residual = residual_columns(self.model, one_row)
        row = {
            "step": self.progress["step"], "tokens": self.progress["tokens"], "phase": p.name,
            "lr": f"{lr:.6g}", "train_loss": f"{loss:.5f}", "val_loss": "" if val is None else f"{val:.5f}",
            "val_bits_per_byte": "" if val is None else f"{self.bits_per_byte(val):.5f}",
            "grad_norm": f"{norm:.4g}", "step_ms": f"{seconds * 1e3:.1f}", "tokens_per_s": f"{rate:.0f}",
            "mfu": mfu(rate * flops_per_token(self.model, p.seq_len), self.device, self.world),
            **balance_columns(load, config.num_experts), **residual,
        }
        self.log.row(row)
        shown = f" val {val:.3f} ({self.bits_per_byte(val):.3f} bits/byte)" if val is not None else ""
        self.log.say(f"step {row['step']:5d} loss {loss:.3f}{shown} lr {lr:.2g} norm {norm:.2f} "
                     f"{seconds * 1e3:.0f} ms {rate:.0f} tok/s mfu {row['mfu']} load {row['load_max']} "
                     f"skip {row['skip_share']}")

    def bits_per_byte(self, nats_per_token):
        return nats_per_token / math.log(2) / self.dataset.bytes_per_token

    def finish(self, loss, val, stopped):
        """The last checkpoint, a sample (not after a stop), the result. loss None: there was nothing left to
        do."""
        val = None if stopped else val          # a stop may fall on a step that was validated
        self.heart.beat("save")
        if loss is not None:
            self.save()
            self.checkpoints.wait()
        elif not stopped:
            val = self.evaluate(4 * self.cfg.eval_tokens)
        step, tokens = self.progress["step"], self.progress["tokens"]
        self.log.event("stopped" if stopped else "done", step=step, val_loss=val)
        if stopped:
            again = f"python train.py --resume auto --out {self.out}"
            self.log.say(f"stopped at step {step}; go on with: {again}")
        else:
            self.heart.beat("sample")
            self.sample()
            self.log.say(f"done    {step} steps, {tokens:,} tokens, validation {val:.4f} nats a token, "
                         f"{self.bits_per_byte(val):.4f} bits a byte")
        return {"step": step, "train_loss": loss, "val_loss": val, "tokens": tokens, "out": str(self.out)}

    def evaluate(self, limit):
        """Validation loss at the context of the phase just trained, in nats a token."""
        _, _, _, p = self.phase(max(self.progress["step"] - 1, 0))
        val = evaluate(self.model, self.dataset.val, p.seq_len, limit, self.rank, self.world, self.autocast)
        self.new_best = self.new_best or val < self.progress["best_val"]
        self.progress["best_val"] = min(val, self.progress["best_val"])
        return val

    def sample(self):
        """A few lines that the model writes now; rank 0 alone, without any collective."""
        if self.rank == 0:
            tokenizer = self.dataset.tokenizer
            prompt = tokenizer.encode("def ")[: max(1, self.cfg.model.max_seq_len - 1)]
            with self.autocast():
                new = generate(self.model, [prompt], 120, temperature=0.7, top_k=50, seed=self.cfg.seed)[0]
            self.log.say("-" * 40 + "\ndef " + tokenizer.decode(new) + "\n" + "-" * 40)


def train(cfg):
    """One run, start to end. cfg: TrainConfig. Returns dict(step, train_loss, val_loss (nats a token),
    tokens, out).

    Raises ValueError for a configuration or data that cannot be trained; guard.GaveUp when steps keep going
    bad.
    """
    rank, world, local_rank = (int(os.environ.get(name, default)) for name, default in
                               (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if world > 1:
        # The optimizers import this. Imported while a process group exists it keeps the group for ever, and
        # gloo's threads, still alive when the interpreter ends, abort it about every twentieth time.
        import torch._dynamo  # noqa: F401
        # the long time-out: a short break of the network should not kill a run of weeks
        dist.init_process_group("nccl" if torch.cuda.is_available() and cfg.device != "cpu" else "gloo",
                                timeout=timedelta(minutes=30))
    try:
        return loop(Run(cfg, rank, world, local_rank))
    finally:
        if world > 1:
            gc.collect()        # DDP holds the group too, and the run it belongs to is a cycle
            dist.destroy_process_group()


def loop(run):
    """accumulate, guard, clip, optimizers, balancing - evaluate, log, save, sample, stop? - until the plan is
    done."""
    cfg, progress, beat = run.cfg, run.progress, run.heart.beat
    stop, loss, val, entered = Stop(run.world), None, None, None
    run.log.event("start", step=progress["step"], steps=run.steps, world=run.world)
    bar = tqdm(total=run.steps, initial=progress["step"], unit="step",
               disable=run.rank > 0 or not sys.stderr.isatty())
    due = lambda every: bool(every) and progress["step"] % every == 0
    try:
        while progress["step"] < run.steps and not stop.agreed(run.device):
            phase = run.enter_phase(progress["step"], announce=entered is None)
            if entered is None or phase is not entered[0]:
                entered = phase, progress["step"]
            # the first steps of a phase compile; a watcher shall wait for them
            beat("compile" if progress["step"] < entered[1] + 3 else "step", progress["step"])
            started = time.perf_counter()
            loss = run.gradients(progress["step"])
            lr, loss, norm, load = run.update(progress["step"], loss)
            progress.update(step=progress["step"] + 1, tokens=progress["tokens"] + phase.batch_tokens)
            seconds = time.perf_counter() - started
            last = progress["step"] == run.steps
            if wrong := run.trouble(load, last or due(cfg.save_every) or due(guard.CHECK_EVERY)):
                beat("save", progress["step"])
                run.roll_back(*wrong)
                entered = None
                continue
            if last or due(cfg.eval_every):
                beat("evaluate", progress["step"])
                val = run.evaluate(cfg.eval_tokens * (4 if last else 1))
            else:
                val = None
            if due(cfg.log_every) or val is not None:
                run.report(phase, lr, loss, norm, load, val, seconds)
            if due(cfg.save_every) and not last and load is not None:
                beat("save", progress["step"])
                run.save()
            if due(cfg.sample_every) and not last:
                beat("sample", progress["step"])
                run.sample()
            bar.update(progress["step"] - bar.n)
        bar.close()
        result = run.finish(loss, val, progress["step"] < run.steps)
        beat("end")
        return result
    except BaseException:
        beat("failed", progress["step"])
        raise
    finally:
        bar.close()
        stop.restore()      # not before the last checkpoint is there: a second signal would cost it


def main(argv):
    """The command line. With --resume, the run's own configuration takes the place of the defaults."""
    saved = saved_config(argv)
    model = saved.pop("model", None) or PRESETS.get(flag(argv, "--preset") or "laptop", {})
    decided = ("vocab_size", "max_seq_len", "rope_theta")       # by data and phases
    cfg, cfg.model = command_line.parse("train.py", __doc__, argv, TrainConfig, ZAYAConfig, without=decided,
                                        **{**saved, **model})
    if cfg.dry_run:
        cfg.model = dataclasses.replace(cfg.model, max_seq_len=max(p.seq_len for _, _, p in plan(cfg)))
        ranks = os.environ.get("WORLD_SIZE", PUBLISHED_RANKS if cfg.recipe == "zaya1" else 1)
        return print_plan(cfg, plan(cfg), int(ranks))
    try:
        result = train(cfg)
    except guard.GaveUp as error:
        print(f"train.py: GaveUp: {error}", file=sys.stderr)
        sys.exit(guard.GAVE_UP)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"next: python sample.py --run {result['out']} --prompt 'class '")


if __name__ == "__main__":
    command_line.run(main)

"""The ZAYA1 router: it decides which expert each token goes to, and keeps the experts evenly loaded.

Per token and block b, x the normalised input of the MoE sublayer, r_prev the router state of block b - 1:

  (1)  r = W_down x + b_down + gamma * r_prev            "EDA"; gamma a learned vector; block 0 has no r_prev
  (2)  p = softmax(W_3 gelu(W_2 gelu(W_1 norm(r) + b_1) + b_2))       E experts and a skip class, float32
  (3)  e = argmax(p + bias)                              the bias takes part in the choice only
  (4)  y = p[e] Expert_e(x)                              p[e] is not renormalised; the skip class gives p[e] x

Only p[e] in (4) carries the loss's gradient to the router, so it must stay: renormalised over one expert it
would be 1 and the router would never learn. r, before its norm, goes on to the next block ("exponential depth
averaging").

  (5)  bias <- AdamW(bias, gradient = share - 1/E)       once a step; share: of the tokens, those sent to e

There is no auxiliary loss. Equation (5), which the papers call PID-inspired, lowers the bias of busy experts
and raises that of idle ones. The skip class is left out: it starts at -1, and every released checkpoint holds
exactly -1 there.

Papers: ZAYA1, arXiv 2511.17127 (router and balancing); 2605.05365 (balancing over the global
batch, as here).

Glossary: down_proj W_down, router_states_scale gamma, fc1, fc2, out_proj W_1, W_2, W_3, balancing_biases
bias. Dimensions are in the names: N tokens, D hidden, R router hidden, E experts (C = E + 1 classes), K
experts per token.

Departures. Balancing's learning rate and betas are not published; the defaults are those of AMD's port (1e-3,
(0.9, 0.999), no decay). top_k > 1 is general, ZAYA1 uses 1. router="linear" is the papers' comparison: logits
= W x, no EDA.
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn


class Router(nn.Module):
    """Equations (1) to (3). config: model.ZAYAConfig; block: index of the block (block 0 has no EDA).

    forward(x_ND, r_prev_NR) -> p_NK float32 (of the chosen), experts_NK int64 (E is the skip class), r_NR
    float32.
    """

    def __init__(self, config, block=0):
        super().__init__()
        D, R, classes = config.hidden_size, config.router_hidden_size, config.num_classes
        self.top_k, self.linear = config.top_k, config.router == "linear"
        if self.linear:
            self.out_proj = nn.Linear(D, classes, bias=False)
        else:
            self.down_proj = nn.Linear(D, R)
            self.router_states_scale = nn.Parameter(torch.ones(R)) if config.eda and block > 0 else None
            self.norm = nn.RMSNorm(R, eps=config.norm_eps)
            self.fc1, self.fc2 = nn.Linear(R, R), nn.Linear(R, R)
            self.out_proj = nn.Linear(R, classes, bias=False)
        self.register_buffer("balancing_biases", initial_biases(config))
        # Slots sent to each class since the last balancing step. No part of a checkpoint: a save falls
        # between two steps.
        self.register_buffer("load", torch.zeros(classes, dtype=torch.int64), persistent=False)

    def _apply(self, fn, recurse=True):
        """Moves and casts like any module, but the biases stay float32: model.bfloat16() would round away
        steps of 1e-3."""
        biases = self.balancing_biases
        super()._apply(fn, recurse)
        if self.balancing_biases.dtype != torch.float32:
            self.balancing_biases = biases.to(self.balancing_biases.device)
        return self

    def states(self, x_ND, r_prev_NR):
        """Equation (1), summed in float32: 40 blocks' worth of states add up in r."""
        r_NR = self.down_proj(x_ND).float()
        if self.router_states_scale is not None and r_prev_NR is not None:
            r_NR = r_NR + self.router_states_scale.float() * r_prev_NR
        return r_NR

    def probabilities(self, x_ND, r_prev_NR):
        """Equations (1) and (2): p over all classes, float32, and r (None for the linear router)."""
        if self.linear:
            return self.out_proj(x_ND).float().softmax(-1), None
        r_NR = self.states(x_ND, r_prev_NR)
        h_NR = self.norm(r_NR.to(self.norm.weight.dtype))
        h_NR = F.gelu(self.fc2(F.gelu(self.fc1(h_NR))))         # exact (erf) GELU
        return self.out_proj(h_NR).float().softmax(-1), r_NR

    def forward(self, x_ND, r_prev_NR=None):
        p_NC, r_NR = self.probabilities(x_ND, r_prev_NR)
        experts_NK = choose(p_NC.detach() + self.balancing_biases, self.top_k)
        return p_NC.gather(1, experts_NK), experts_NK, r_NR


def initial_biases(config):
    """Zeros; -1 for the skip class, which thereby loses to every expert until training has a reason to choose
    it."""
    biases = torch.zeros(config.num_classes, dtype=torch.float32)
    if config.skip_expert != "off":
        biases[-1] = -1.0
    return biases


def choose(score_NC, top_k):
    """Equation (3): the top_k classes of each token, best first; of equal scores the lower index, so that
    runs repeat."""
    if top_k == 1:
        return score_NC.argmax(dim=1, keepdim=True)
    return score_NC.sort(dim=1, descending=True, stable=True).indices[:, :top_k].contiguous()


def count(experts_NK, num_classes, keep_N=None):
    """Slots sent to each class, (C,) int64, before any index is rewritten. keep_N: False for padding, which
    is no load."""
    if keep_N is not None:
        experts_NK = experts_NK[keep_N]
    return torch.bincount(experts_NK.flatten(), minlength=num_classes)


class Balancer:
    """Equation (5) for all routers of a model: torch's AdamW on the biases, with share - 1/E as their
    gradient.

    step() consumes the loads that the training forwards of one optimizer step have counted, all micro-steps
    together; with torch.distributed running they are summed over the ranks first, so every rank makes the
    same move. Nothing else touches the biases: not evaluation, not generation, not recomputation.
    """

    def __init__(self, model, lr=1e-3, betas=(0.9, 0.999)):
        self.routers = [block.mlp.gate for block in model.blocks]
        self.num_experts = model.config.num_experts
        self.optimizer = torch.optim.AdamW([r.balancing_biases for r in self.routers], lr=lr, betas=betas,
                                           weight_decay=0.0)

    @torch.no_grad()
    def step(self, lr=None):
        """Move every bias once and reset the loads. Returns the loads of the step, (blocks, C) int64. lr: new
        learning rate."""
        load = torch.stack([r.load for r in self.routers])                          # (blocks, C)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(load)
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] if lr is None else lr
        share = load / load.sum(1, keepdim=True).clamp(min=1)
        gradient = share - 1 / self.num_experts
        gradient[:, self.num_experts:] = 0  # the skip class keeps its bias
        if load.sum() > 0:
            for router, g in zip(self.routers, gradient):
                router.balancing_biases.grad = g.to(torch.float32)
            self.optimizer.step()
        for router in self.routers:
            router.balancing_biases.grad = None
        self.discard()
        return load

    def discard(self):
        """Forget the loads counted so far: the step they belong to is not taken."""
        for router in self.routers:
            router.load.zero_()


def balance_health(load_LC, num_experts):
    """How even the experts of each block are. load_LC: slots by block and class. Returns float64 tensors, one
    value a block: load_max (busiest expert over the mean: 1 is even, E is collapse), entropy (of the shares
    over log E: 1 is even), skip (share of all slots that went to the skip class).
    """
    load_LE = load_LC[:, :num_experts].double()
    share_LE = load_LE / load_LE.sum(1, keepdim=True).clamp(min=1)
    entropy = torch.special.entr(share_LE).sum(1) / math.log(max(num_experts, 2))
    skip = load_LC[:, num_experts:].sum(1) / load_LC.sum(1).clamp(min=1)
    return {"load_max": share_LE.amax(1) * num_experts, "entropy": entropy, "skip": skip.double()}


def demonstrate():
    """Balancing at work: a router that prefers two of eight experts, and what the biases do about it."""
    from model import ZAYA, ZAYAConfig
    torch.manual_seed(0)
    model = ZAYA(ZAYAConfig.preset("laptop", num_blocks=1))
    router, balancer = model.blocks[0].mlp.gate, Balancer(model, lr=0.02)
    nn.init.normal_(router.out_proj.weight, std=2.0)
    x_ND = torch.randn(4096, 192) + 0.3
    print("step  tokens of each expert, skip class last            max/mean  entropy")
    for step in range(41):
        p_NK, experts_NK, _ = router(x_ND)
        router.load += count(experts_NK, 9)
        load = balancer.step()
        if step % 10 == 0:
            health = balance_health(load, 8)
            counts = " ".join(f"{n:5d}" for n in load[0].tolist())
            print(f"{step:4d}  {counts}   {health['load_max'].item():6.2f}   {health['entropy'].item():6.3f}")
    print(
        "the weights never changed: the biases alone moved tokens, and p, which the loss sees, is as it was"
    )


if __name__ == "__main__":
    if sys.argv[1:]:                        # python router.py RUN --text FILE
        import config
        import watch
        config.run(watch.main)
    demonstrate()

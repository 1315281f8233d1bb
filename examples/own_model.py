"""A small MoE of your own: traced, chunked, scheduled, and proven equal to plain PyTorch.

    python examples/own_model.py                                        # one process, one rank
    python examples/own_model.py --loopback 4                           # one process for four ranks
    torchrun --nproc_per_node=2 examples/own_model.py                   # two ranks over gloo
    python examples/own_model.py --loopback 2 --device cuda --capture   # one GPU, one CUDA graph

Legend: B sequences, S tokens a sequence, T = B * S, D hidden, F expert hidden, V vocabulary,
E experts, e experts of this rank, K experts a token, R rows sorted by expert.
"""

import argparse
import os
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import interlace
from interlace import Chunking, Step, ep

SEQUENCES, S, D, HIDDEN, V, E, K, LAYERS = 8, 16, 32, 64, 97, 8, 2, 2


class MoE(nn.Module):
    """Routes each token to K of E experts, of which this rank holds E / ranks."""

    def __init__(self, exchange: ep.Exchange) -> None:
        super().__init__()
        self.exchange, e = exchange, exchange.num_local_experts(E)
        self.router = nn.Linear(D, E, bias=False)
        self.up = nn.Parameter(torch.empty(e, D, HIDDEN))
        self.down = nn.Parameter(torch.empty(e, HIDDEN, D))

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        scores_TK, ids_TK = self.router(x_TD.float()).softmax(-1).topk(K)
        plan = ep.plan(ids_TK, E, self.exchange)  # the ranks agree on who sends what
        rows_RD = ep.dispatch(x_TD, plan)  # rows for my experts, sorted by expert
        rows_RF = F.silu(interlace.grouped_mm(rows_RD, self.up, plan.offsets[1:]))
        rows_RD = interlace.grouped_mm(rows_RF, self.down, plan.offsets[1:])
        return ep.combine(rows_RD, scores_TK, plan).view_as(x_BSD)


class Block(nn.Module):
    """A token sees the one before it, then goes to its experts."""

    def __init__(self, exchange: ep.Exchange) -> None:
        super().__init__()
        self.norm, self.mix, self.moe = nn.RMSNorm(D), nn.Linear(2 * D, D), MoE(exchange)

    def forward(self, x_BSD):
        before_BSD = F.pad(x_BSD, (0, 0, 1, -1))
        x_BSD = x_BSD + self.mix(torch.cat((x_BSD, before_BSD), dim=-1))
        return x_BSD + self.moe(self.norm(x_BSD))


class Model(nn.Module):
    def __init__(self, exchange: ep.Exchange) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.Sequential(*(Block(exchange) for _ in range(LAYERS)))
        self.head = nn.Linear(D, V)
        generator = torch.Generator().manual_seed(0)
        for weight in self.parameters():  # the same values, however the experts are spread
            shape = (E, *weight.shape[1:]) if weight.dim() == 3 else weight.shape
            first = exchange.rank * len(weight) if weight.dim() == 3 else 0
            values = torch.randn(shape, generator=generator) * D**-0.5
            weight.data.copy_(values[first : first + len(weight)])

    def forward(self, tokens_BS):
        return self.head(self.layers(self.embedding(tokens_BS)))


def loss_fn(model, tokens_BS, labels_BS, num_labels):
    """This rank's share of the mean over the labels of all ranks; further outputs by name."""
    logits_TV, labels_T = model(tokens_BS).flatten(0, 1).float(), labels_BS.flatten()
    loss = F.cross_entropy(logits_TV, labels_T, reduction="sum") / num_labels
    return loss, {"right": (logits_TV.argmax(-1) == labels_T).sum()}


def connect(loopback: int, padded: bool) -> ep.Exchange:
    """Names the ranks that exchange tokens, and says what carries the tokens."""
    group = ep.Group("experts", loopback, 0, "loopback" if loopback > 1 else "single")
    if (size := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        dist.init_process_group()
        rank, rows, counts = dist.get_rank(), dist.new_group(), dist.new_group()
        group = ep.Group("experts", size, rank, "process", rows, counts)
    ep.register_group(group)
    return ep.Exchange(group.name, group.size, group.rank, padded=padded)


def check(name, result, reference, rank: int) -> None:
    """Bitwise, never within a tolerance."""
    same = torch.equal(result.loss, reference.loss)
    same &= all(torch.equal(g, reference.grads[n]) for n, g in result.grads.items())
    if not same:
        raise SystemExit(f"{name} differs from its reference")
    if rank == 0:
        print(f"{name}: loss and {len(result.grads)} gradients bitwise equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--loopback", type=int, default=1, help="ranks that one process stands for")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--capture", action="store_true", help="record the step as a CUDA graph")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    exchange = connect(args.loopback, padded=args.capture)
    rank, processes = exchange.rank, dist.get_world_size() if dist.is_initialized() else 1

    model = Model(exchange).to(args.device)
    tokens = torch.randint(V, (SEQUENCES, S + 1), generator=torch.Generator().manual_seed(1))
    mine = tokens.tensor_split(processes)[rank].to(args.device)
    num_labels = torch.tensor(float(SEQUENCES * S), device=args.device)
    batch = (mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), num_labels)

    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32  # of the arithmetic
    step = Step(model, loss_fn, compute_dtype=dtype, keep=lambda name: "router" in name)
    params, buffers = step.state()
    control = interlace.trace_step(step, batch)
    result = control(params, buffers, batch)  # result.loss, result.grads, result.extra
    plain = interlace.run_eager(step, params, buffers, batch)  # the same bits, without a graph
    check(f"traced, {len(control.gm.graph.nodes)} nodes", result, plain, rank)

    chunking = Chunking("layers.*", num_chunks=2)
    overlapped = interlace.trace_overlapped(step, batch, chunking)
    interlace.agree_on_order(overlapped.gm)  # ranks that launch in another order would hang
    chunked = interlace.run_eager(replace(step, chunking=chunking), params, buffers, batch)
    name = f"chunked and scheduled, {len(overlapped.gm.graph.nodes)} nodes"
    check(name, overlapped(params, buffers, batch), chunked, rank)

    run = lambda batch: overlapped(params, buffers, batch)  # noqa: E731
    if args.capture:
        run = interlace.capture_step(run, batch, state=lambda: params | buffers)
        check("captured", run(batch), chunked, rank)
    for n in range(20):
        result = run(batch)
        grads = {name: grad.float() for name, grad in result.grads.items()}
        if processes > 1:  # experts' gradients are whole already: their rows came from all ranks
            for tensor in (result.loss, *(g for n, g in grads.items() if params[n].dim() < 3)):
                dist.all_reduce(tensor)
        with torch.no_grad():
            for name, grad in grads.items():
                params[name] -= 0.3 * grad
        if rank == 0 and n in (0, 19):
            print(f"step {n + 1}: loss {result.loss.item():.6f}")
    if args.capture:
        run.close()
    if processes > 1:
        ep.drop_group("experts")  # lets go of its process groups, which end below
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

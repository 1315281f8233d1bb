"""A pass of your own: changes the graph of a step, and is proven to have changed no bit.

    python examples/own_pass.py

`share_twins` computes equal things once.  `note_cover` changes nothing: it returns lines for the
user, here how many operators stand between each launch and its wait.  `lose_a_wait` is wrong on
purpose: the driver refuses it and names it.
"""

import torch
from own_model import SEQUENCES, Model, S, V, loss_fn
from torch import fx

import interlace
from interlace import Pass, Step, ep
from interlace.graph import comm_of, has_effect, is_wait, tag_of


def share_twins(gm: fx.GraphModule) -> None:
    """Two operators with the same arguments and no effect become one.

    Enough for a step that writes to nothing; between a read and a read lies no write.
    """
    seen: dict = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or has_effect(node):
            continue
        key = (node.target, str(node.args), str(node.kwargs))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            gm.graph.erase_node(node)
        else:
            seen[key] = node


def note_cover(gm: fx.GraphModule) -> list[str]:
    """One line a launch: where it belongs, and what the order leaves to run under it."""
    nodes = list(gm.graph.nodes)
    notes = []
    for place, node in enumerate(nodes):
        if spec := comm_of(node):  # asks the registry: no name of a backend is known here
            items = [user for user in node.users if user.users]
            wait = next(u for item in items for u in item.users if is_wait(u))
            between = nodes.index(wait) - place - 1 - len(items)
            notes.append(f"{tag_of(node)}: {spec.name}, {between} operators under it")
    return notes


def schedule(gm: fx.GraphModule) -> None:
    """The library's own; what a pass returns are notes, so its edges are dropped here."""
    interlace.schedule_graph(gm)


def lose_a_wait(gm: fx.GraphModule) -> None:
    """What a careless clean-up could do."""
    wait = next(node for node in gm.graph.nodes if is_wait(node))
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)


def main() -> None:
    tokens = torch.randint(V, (SEQUENCES, S + 1), generator=torch.Generator().manual_seed(1))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.tensor(128.0))
    step = Step(Model(ep.Exchange()), loss_fn)
    params, buffers = step.state()
    own = [Pass("share_twins", share_twins), Pass("note_cover", note_cover)]
    passes = [*own, Pass("schedule", schedule), Pass("note_cover again", note_cover)]
    traced = interlace.trace_step(step, batch, passes)
    for report in traced.reports:
        print(f"{report.name}: {report.nodes_before} -> {report.nodes_after} nodes")
        for note in report.notes:
            print(f"  {note}")
    result = traced(params, buffers, batch)
    plain = interlace.run_eager(step, params, buffers, batch)
    if not all(torch.equal(g, plain.grads[name]) for name, g in result.grads.items()):
        raise SystemExit("the passes changed a gradient")
    print(f"{len(result.grads)} gradients bitwise equal to plain PyTorch")
    try:
        interlace.trace_step(step, batch, [Pass("lose_a_wait", lose_a_wait)])
    except ValueError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()

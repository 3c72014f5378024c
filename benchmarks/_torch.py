"""The benchmarks' ResNet50 and GPT-2 medium in PyTorch, and what its partitioner does with them.

The joint graph of the loss and its gradient is traced with fake tensors (nothing is allocated) and
cut by the min-cut partitioner that `torch.compile` uses, with `activation_memory_budget` set. What
it then keeps and runs again is read off the two graphs, and their nodes are laid out in order: a
tensor lives from its node to its last reader; views take nothing; arguments, and gradients once
they are made, live throughout. Neither fusion nor the allocator is in that.
"""

import copy
import math
import sys

import torch
import torch._inductor.lowering  # its decompositions look into it
import torch.nn.functional as F
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch import nn
from torch._functorch import config
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from benchmarks._gpu import seconds

aten = torch.ops.aten


# ---- networks


class Block(nn.Module):
    """The bottleneck of examples/resnet50."""

    def __init__(self, inside, features, stride):
        super().__init__()
        sizes = [(inside, features, 1, 1), (features, features, 3, stride)]
        sizes += [(features, 4 * features, 1, 1)]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False) for a, b, kernel, step in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        self.shortcut = nn.Identity()
        if stride > 1 or inside != 4 * features:
            conv = nn.Conv2d(inside, 4 * features, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(4 * features))

    def forward(self, x):
        y = x
        for conv, norm in zip(self.convs[:2], self.norms[:2], strict=True):
            y = F.relu(norm(conv(y)))
        return F.relu(self.shortcut(x) + self.norms[2](self.convs[2](y)))


def resnet50(batch: int, sizes=(3, 4, 6, 3), side: int = 224):
    """A loss and its arguments, of which those in the first tuple are differentiated."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for stage, blocks in enumerate(sizes):
        for index in range(blocks):
            layers.append(Block(inside, 64 << stage, 2 if stage and not index else 1))
            inside = 256 << stage
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))
    names = [name for name, _ in net.named_parameters()]
    buffers = dict(net.named_buffers())

    def loss(params, image, label, *state):
        whole = dict(zip([*names, *buffers], [*params, *state], strict=True))
        return F.cross_entropy(torch.func.functional_call(net, whole, image), label)

    image, label = torch.empty(batch, 3, side, side), torch.empty(batch, dtype=torch.long)
    return loss, (tuple(net.parameters()), image, label, *buffers.values())


def gpt2_medium(batch: int, width=1024, depth=24, heads=16, context=1024, vocabulary=50304):
    """`_gpt.GPT` with fp32 parameters and bf16 compute, as planner_gpt.py has it."""

    def norm(x, scale):
        wide = x.float()
        return (wide * torch.rsqrt((wide**2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * scale

    def block(x, later, norm1, norm2, qkv, out, up, down):
        mixed = (norm(x, norm1) @ qkv).unflatten(-1, (3, heads, -1))
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(width // heads)
        masked = scores.masked_fill(later, -1e30).softmax(-1).to(x.dtype)
        x = x + (masked @ v).transpose(1, 2).flatten(2) @ out
        return x + F.gelu(norm(x, norm2) @ up, approximate="tanh") @ down

    def loss(params, tokens, labels):
        embed, places, scale, head, *layers = params
        x = (embed[tokens] + places).to(torch.bfloat16)
        later = torch.ones(context, context, dtype=torch.bool, device=x.device).triu(1)
        half = [leaf.to(torch.bfloat16) for leaf in (scale, head, *layers)]
        for start in range(2, len(half), 6):
            x = block(x, later, *half[start : start + 6])
        logits = (norm(x, half[0]) @ half[1]).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    shapes = [(vocabulary, width), (context, width), (width,), (width, vocabulary)]
    shapes += [
        *((width,), (width,), (width, 3 * width), (width, width)),
        *((width, 4 * width), (4 * width, width)),
    ] * depth
    params = tuple(torch.empty(shape, requires_grad=True) for shape in shapes)
    tokens = torch.empty(batch, context, dtype=torch.long)
    return loss, (params, tokens, tokens)


# ---- what the partitioner does


def partitioned(make, budgets):
    """For each budget: bytes that cross from the forward to the backward graph, the simulated peak,
    and the FLOPs of matmuls and convolutions of both graphs."""
    found = {}

    def cut(joint, inputs, **options):
        for budget in budgets:
            with config.patch(activation_memory_budget=budget):
                parts = min_cut_rematerialization_partition(copy.deepcopy(joint), inputs, **options)
            found[budget] = _costs(*(part.graph for part in parts))
            print(f"torch, budget {budget}: {found[budget]}", file=sys.stderr, flush=True)
        return parts

    def unchanged(graph, _):
        return graph

    with FakeTensorMode(allow_non_fake_inputs=True):
        loss, args = make()
        decompositions = select_decomp_table()
        aot_function(loss, unchanged, unchanged, cut, decompositions)(*args)
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    tensor_bytes = sum(leaf.nbytes for leaf in tensors)
    return {budget: row | {"peak": row["peak"] + tensor_bytes} for budget, row in found.items()}


def _costs(forward, backward) -> dict[str, int]:
    roots = _roots(forward)
    results = [node for node in forward.output_node().args[0] if node in roots]
    saved = {roots[node] for node in results if roots[node].op != "placeholder"}
    return {
        "saved": sum(map(_bytes, saved)),
        "peak": max(_peak(forward), _peak(backward)),  # beside the arguments
        "flops": sum(_flops(node) for graph in (forward, backward) for node in graph.nodes),
    }


def _bytes(node) -> int:
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return 0  # its parts count
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def _roots(graph) -> dict:
    """For each node that makes a tensor, the node whose memory it is in."""
    roots = {}
    for node in graph.nodes:
        views = isinstance(node.target, torch._ops.OpOverload) and any(
            returned.alias_info for returned in node.target._schema.returns
        )
        source = node.args[0] if node.args else None
        same = views or node.target in (aten._unsafe_view.default, aten.view.default)
        if node.op == "call_function" and same and source in roots:
            roots[node] = roots[source]
        elif node.op != "output":
            roots[node] = node
    return roots


def _is_argument(node) -> bool:
    return node.op == "placeholder" and node.name.startswith("primals")


def _peak(graph) -> int:
    """The most bytes alive beside the function's arguments."""
    roots, last = _roots(graph), {}
    nodes = list(graph.nodes)
    for index, node in enumerate(nodes):
        for read in node.all_input_nodes:
            last[roots[read]] = index
    # The placeholders of the backward graph that are not the function's own arguments ("primals")
    # are what was saved, and the cotangent.
    given = [node for node in nodes if node.op == "placeholder" and not _is_argument(node)]
    live = most = sum(map(_bytes, given))
    for index, node in enumerate(nodes):
        if node.op == "call_function" and roots[node] is node:
            live += _bytes(node)
            most = max(most, live)
        for root in {roots[read] for read in node.all_input_nodes if read in roots}:
            if last[root] == index and not _is_argument(root) and node.op != "output":
                live -= _bytes(root)
    return most


def _flops(node) -> int:
    packet = getattr(node.target, "_overloadpacket", None)
    if node.op != "call_function" or packet not in flop_registry:
        return 0

    def value(part):
        return part.meta["val"] if isinstance(part, torch.fx.Node) else part

    args = pytree.tree_map(value, node.args, is_leaf=lambda part: isinstance(part, torch.fx.Node))
    return flop_registry[packet](*args, **node.kwargs, out_val=node.meta["val"])


def measured(make, budget: float) -> tuple[int, float]:
    """The allocator's peak and the seconds of value and gradient, compiled, on the attached GPU."""
    with config.patch(activation_memory_budget=budget), torch.device("cuda"):
        loss, (params, *others) = make()
        for leaf in others:
            leaf.zero_()
        run = torch.compile(loss)

        def step():
            run(params, *others).backward()
            for leaf in params:
                leaf.grad = None
            torch.cuda.synchronize()

        step()  # compiles, and chooses kernels
        torch.cuda.reset_peak_memory_stats()
        taken = seconds(step)
        return torch.cuda.max_memory_allocated(), taken

"""What attention of a decode step costs between the products around it: in one launch, or norms, rotary embedding and
write, attention and combination one by one.

    python benchmarks/gpu/decode.py --shapes qwen3-0.6b --batches 1x144 8x144 64x144

Layers of a model with weights and caches of their own are captured in a graph: product of queries, keys and values,
attention, output product. Microseconds a layer; "products" are these two alone, so that the difference is attention's
share, what overlaps left out. --tiles: block sizes from a list instead of those that the backend takes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from attention_cases import Case, make_batch

from llmkit.hookspecs.attention import AttentionBackend, AttentionLayer, Rotation
from llmkit.hookspecs.kernels import HeadNorms
from llmkit.jit.rehearsal import Rehearsal
from llmkit_attention.triton_backend import TritonAttention
from llmkit_attention.triton_decode_launch import DecodeTile
from llmkit_cli.bench.shapes import SHAPES
from llmkit_kernels.triton_table import TritonKernels

DEVICE, DTYPE = "cuda", torch.bfloat16
KERNELS = TritonKernels()
LAYERS = 28
TILES = {
    "128+64": DecodeTile(128, 64, 64),
    "128+64 not asked for": DecodeTile(128, 64, 64, asks=False),
    "128+64 half as many": DecodeTile(128, 64, 64, programs_per_processor=1),
    "128+64 four times": DecodeTile(128, 64, 64, programs_per_processor=4),
    "128+64 8 warps": DecodeTile(128, 64, 64, num_warps=8),
    "64+64": DecodeTile(64, 64, 64, num_stages=2, least_span=128),
    "64": DecodeTile(64, 0, 64, num_stages=2, least_span=128),
}


@dataclass
class Stack:
    """The weights of layers, and what their queries and keys go through; positions are those of a batch."""

    layer: AttentionLayer
    rotation: Rotation
    qkv: list[torch.Tensor]
    out: list[torch.Tensor]
    norm: torch.Tensor

    @classmethod
    def of_shape(cls, name: str) -> Stack:
        shape = SHAPES[name]
        heads, kv_heads, hidden = (
            shape[key] for key in ("num_attention_heads", "num_key_value_heads", "hidden_size")
        )  # fmt: skip
        size = shape.get("head_dim") or hidden // heads

        def draw(*dims: int) -> torch.Tensor:
            return torch.empty(dims, dtype=DTYPE, device=DEVICE).normal_(0, dims[-1] ** -0.5)

        norms = HeadNorms(*(torch.ones(size, dtype=DTYPE, device=DEVICE) for _ in range(2)), 1e-6)
        table = torch.rand(4097, size, device=DEVICE)
        rotation = Rotation(torch.zeros(0), table, norms if "0.6b" in name else None)
        return cls(
            AttentionLayer(0, heads, kv_heads, size, size**-0.5),
            rotation,
            [draw((heads + 2 * kv_heads) * size, hidden) for _ in range(LAYERS)],
            [draw(hidden, heads * size) for _ in range(LAYERS)],
            torch.ones(hidden, dtype=DTYPE, device=DEVICE),
        )


class Bench:
    """One batch of a stack."""

    def __init__(self, stack: Stack, rows: int, length: int) -> None:
        self.stack = stack
        case = Case((length,) * rows, (1,) * rows)
        self.batch, (cache,), *_ = make_batch(case, stack.layer, DTYPE)
        cache = cache.nan_to_num_(0.0)
        self.caches = [cache.clone() for _ in range(LAYERS)]
        self.batch.max_seq_len = 1024 if length <= 1024 else 4096
        self.batch.seq_lens_np = self.batch.seq_lens_np * 0 + self.batch.max_seq_len
        self.rotation = Rotation(self.batch.seq_lens.long() - 1, stack.rotation.cos_sin, stack.rotation.norms)
        hidden = stack.norm.shape[0]
        self.x = torch.randn(rows, hidden, dtype=DTYPE, device=DEVICE)
        self.attended = torch.randn(rows, stack.layer.num_heads * stack.layer.head_size, dtype=DTYPE, device=DEVICE)

    def step(self, attention: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        stack, x, residual = self.stack, self.x.clone(), self.x.clone()
        for qkv, out, cache in zip(stack.qkv, stack.out, self.caches, strict=True):
            both = KERNELS.add_rms_norm_linear(x, residual, stack.norm, 1e-6, qkv)
            if both is None:
                normed, residual = KERNELS.add_rms_norm(x, residual, stack.norm, 1e-6)
                projected = KERNELS.linear(normed, qkv)
            else:
                projected, residual = both
            attended = attention(projected, cache)
            parts = KERNELS.linear_in_parts(attended, out)
            x = KERNELS.linear(attended, out) if parts is None else parts
        return KERNELS.add_rms_norm(x, residual, stack.norm, 1e-6)[0]

    def parts(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layer = self.stack.layer
        sizes = [layer.num_heads * layer.head_size, *[layer.num_kv_heads * layer.head_size] * 2]
        return projected.split(sizes, dim=1)

    def apart(self, backend: AttentionBackend) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        plan, layer, rotation = backend.plan(self.batch), self.stack.layer, self.rotation

        def attention(projected: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            parts = self.parts(projected)
            KERNELS.rotary_and_write(
                rotation.positions, *parts, rotation.cos_sin, rotation.norms, cache, self.batch.slot_mapping
            )  # fmt: skip
            query = parts[0].view(len(projected), layer.num_heads, layer.head_size)
            return backend.attend(layer, query, cache, plan).view(len(projected), -1)

        return attention

    def together(self, backend: AttentionBackend) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        plan, layer = backend.plan(self.batch), self.stack.layer

        def attention(projected: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            output = backend.attend_projected(layer, *self.parts(projected), self.rotation, cache, plan)
            assert output is not None, "it was not taken"
            return output.view(len(projected), -1)

        return attention

    def products(self, _projected: torch.Tensor, _cache: torch.Tensor) -> torch.Tensor:
        return self.attended


def timed(call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """(microseconds a layer, what comes out) of a step in a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / LAYERS)
    return statistics.median(times[2:]), output.clone()


def measure(bench: Bench, title: str, tiles: Iterable[tuple[str, DecodeTile | None]]) -> None:
    apart = bench.apart(TritonAttention())
    ways = {"products": bench.products, "apart": apart}
    for name, tile in tiles:
        backend = TritonAttention() if tile is None else TritonAttention(choose_decode_tile=lambda *_, t=tile: t)
        ways[name] = bench.together(backend)
    with Rehearsal(torch.device(DEVICE)):
        for way in ways.values():
            bench.step(way)
    expected = None
    for name, way in ways.items():
        try:
            torch.cuda.synchronize()
            spent, output = timed(lambda way=way: bench.step(way))
        except Exception as error:
            print(f"  {title:24} {name:28} FAILED {str(error)[:200]}", flush=True)
            continue
        if name == "apart":
            expected = output.float()
        off = "" if expected is None else f"{(output.float() - expected).norm() / expected.norm():.4f}"
        print(f"  {title:24} {name:28} {spent:8.2f}  {off}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-0.6b"])
    parser.add_argument("--batches", nargs="+", default=["1x144", "8x144", "64x144"], help="rows x tokens")
    parser.add_argument("--tiles", nargs="*", choices=list(TILES), help="none: all of them")
    arguments = parser.parse_args()
    chosen: list[tuple[str, DecodeTile | None]] = [("together", None)]
    if arguments.tiles is not None:
        chosen = [(name, TILES[name]) for name in arguments.tiles or TILES]
    for shape in arguments.shapes:
        stack = Stack.of_shape(shape)
        for batch in arguments.batches:
            rows, length = map(int, batch.split("x"))
            measure(Bench(stack, rows, length), f"{shape} {batch}", chosen)


if __name__ == "__main__":
    main()

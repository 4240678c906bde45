"""Argument checks of the public operations: one message each, naming the argument, what was expected and what came."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .layout import NUM_COEFFICIENTS

if TYPE_CHECKING:
    from .edge import EdgeList

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...], like: Tensor | None = None) -> None:
    """Check a floating-point tensor's shape (None fits any size), type, and that it lies beside `like`."""
    wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor {wanted}, got {type(tensor).__name__}")
    if tensor.dtype not in FLOAT_TYPES:
        raise TypeError(f"{name}: expected a floating-point tensor, got {tensor.dtype}")
    if tensor.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, tensor.shape, strict=True)):
        raise ValueError(f"{name}: expected shape {wanted}, got {list(tensor.shape)}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, got {tensor.device}")
    if like is not None and (tensor.dtype == torch.float64) != (like.dtype == torch.float64):
        raise TypeError(f"{name}: expected {like.dtype} like the other arguments, got {tensor.dtype}")


def check_edges(x: Tensor | None, vectors: Tensor, edges: EdgeList) -> None:
    """Check node features, edge vectors and edge indices against each other."""
    check_shape("vectors", vectors, (None, 3))
    if not edges.whole:
        raise ValueError(f"edges: expected the edges of all {edges.num_nodes} atoms, got a part of them")
    num_edges, num_nodes = vectors.shape[0], edges.num_nodes
    if x is not None:
        check_shape("x", x, (num_nodes, NUM_COEFFICIENTS, None), vectors)
    for name, index, size in (
        ("source", edges.source, num_edges),
        ("target", edges.target, num_edges),
        ("by_source", edges.by_source, num_edges),
        ("target_start", edges.target_start, num_nodes + 1),
        ("source_start", edges.source_start, num_nodes + 1),
    ):
        if index.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"edges.{name}: expected int32 or int64, got {index.dtype}")
        if index.shape != (size,):
            raise ValueError(f"edges.{name}: expected shape [{size}], got {list(index.shape)}")
        if index.device != vectors.device:
            raise ValueError(f"edges.{name}: expected device {vectors.device}, got {index.device}")

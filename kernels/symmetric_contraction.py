"""Symmetric contraction of MACE: weighted equivariant polynomials of a node's features, channel by channel.

Formula (:func:`.reference.symmetric_contraction`), for node n of species z, channel c and the polynomials t of
:mod:`._couplings`::

    out[n, c, L m] = sum over t of degree L: w[z, t, c] * x_0^p (((x_l1 x_l2)_M x_l3)_L)_m        p = 0, 1, 2

The weights are folded in as early as a tree allows: with A_M = (x_l1 x_l2)_M made once for all, cubic trees that end in
one coupling share it, out_L += (Q x_l3)_L with Q = sum over t of w_t A_M; quadratic trees join Q as u x_M, where
u = w + w' x_0; and trees in x_0 and x_L alone are one number times x_L. That is :class:`_Polynomials`. All the rest is
differentiated from it as straight-line programs (:mod:`._straightline`) and written out as kernels:

    out(x, w)                                   one lane a (node, channel), all in registers
    grad x (x, w, g)                            the same
    double: gradients of <h, grad x> with respect to x and g, of (x, w, g, h)        the same, of 0e+1o+2e with spills
    grad w (x, g), and the gradient of <h, grad x> with respect to w                 summed from node to node
    both gradients of <g, out>                                                       in one such pass

A lane reads its own weights by species. Nodes are grouped by species for gradients of weights alone (:mod:`._species`),
by some programs of the forward pass, and nothing waits for the host. Kernels are generated once for a set of irreps and
a layout, and compiled by Triton once for a width and a type.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from numpy.linalg import norm
from torch import Tensor

from . import reference
from ._check import check_shape
from ._compile import Kernel, kernel
from ._couplings import Contraction, Term, contraction, coupling
from ._device import wait_for_previous
from ._launch import cdiv, next_power_of_2, processors, runs_kernels
from ._species import (
    MAX_ORDERED,
    MAX_SPECIES,
    ORDERED,
    empty_groups,
    nodes_by_species,
    order_tile,
    order_tiles,
    sums_of_species,
)
from ._straightline import Program

LAYOUTS = ("mul_ir", "ir_mul")
CHANNELS = 32
"""Channels of a program, but for the forward pass. Programs of one block of channels run together, so that its weights,
128 bytes for a species and polynomial, stay in the first-level cache: 63 kB for 10 species and 49 polynomials."""


class Programs(NamedTuple):
    """Programs of a kernel without sums over nodes.

    Attributes:
        lanes: of a program, of one (node, channel) each, 32 a warp.
        channels: of a program at most.
        registers: of a lane in float32 at most; None for as many as it takes.
    """

    lanes: int
    channels: int
    registers: int | None = None


def programs_of_nodes(name: str, terms: int) -> Programs:
    """Programs of a kernel by its name and the number of polynomials: the fastest of a sweep on an H200 (NOTES.md)."""
    if name == "forward":  # some of its programs group nodes instead, each as large as the others: wide ones are few
        return Programs(128, 128)
    if name == "double" and terms <= 32:
        return Programs(128, CHANNELS)
    if name == "double":  # 49 polynomials do not fit 255 registers either: fewer spill more, but let more warps run
        return Programs(32, CHANNELS, 168)
    return Programs(32, CHANNELS)


# --- The polynomials as a straight-line program ---


class _Polynomials:
    """Writes out(x, w) of one node and channel into a program."""

    def __init__(self, program: Program, spec: Contraction, x: Sequence[int], w: Sequence[int]) -> None:
        self._program, self._spec, self._x0 = program, spec, x[0]
        self._x = [x[d * d : (d + 1) ** 2] for d in range(spec.lmax + 1)]
        self._weight = dict(zip(spec.terms, w, strict=True))
        self._pairs: dict[tuple[int, int, int], list[int | None]] = {}

    def outputs(self) -> list[int | None]:
        """out, all degrees."""
        return [value for degree in self._spec.degrees for value in self._of_degree(degree)]

    def _pair(self, l1: int, l2: int, degree: int) -> list[int | None]:
        """A = (x_l1 x_l2)_L, made once."""
        if (l1, l2, degree) not in self._pairs:
            summands = self._program.couple(coupling(l1, l2, degree, l1 == l2), self._x[l1], self._x[l2])
            self._pairs[l1, l2, degree] = [self._program.sum(s) for s in summands]
        return self._pairs[l1, l2, degree]

    def _in_scalar(self, degree: int, tree: tuple[int, ...]) -> int | None:
        """w + x_0 (w' + x_0 w'') of a tree with up to two further factors x_0."""
        value: int | None = None
        for n in (2, 1, 0):
            if (term := Term(degree, tree, n)) in self._weight:
                value = self._program.sum([(1.0, self._weight[term]), (1.0, self._x0, value)])
        return value

    def _of_degree(self, degree: int) -> list[int | None]:
        program, weight = self._program, self._weight
        trees = list(dict.fromkeys(term.tree for term in self._spec.terms_of(degree)))
        channels: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for tree in trees:
            if len(tree) == 4:
                channels.setdefault((tree[2], tree[3]), []).append(tree)
        out: list[list[tuple]] = [[] for _ in range(2 * degree + 1)]

        # Trees that end in x_L: one number times x_L.
        if degree <= self._spec.lmax:
            inner = [(1.0, weight[Term(degree, t)], self._pair(*t[:3])[0]) for t in channels.pop((0, degree), [])]
            factor = program.sum([*inner, (1.0, self._in_scalar(degree, (degree,)))])
            for summands, x in zip(out, self._x[degree], strict=True):
                summands.append((1.0, factor, x))

        # Quadratic trees: u x_M into the Q of a coupling that is made anyhow, else u A.
        folded: dict[tuple[int, int], int | None] = {}
        for tree in (t for t in trees if len(t) == 2):
            factor = self._in_scalar(degree, tree)
            channel = next((c for c in (tree, tree[::-1]) if c in channels), None)
            if channel is None:
                for summands, a in zip(out, self._pair(*tree, degree), strict=True):
                    summands.append((1.0, factor, a))
            else:
                # The weight belongs to the tree's coefficients, whose scale is another where both factors are one x_l.
                scale = norm(coupling(*tree, degree, tree[0] == tree[1])) / norm(coupling(*tree, degree))
                folded[channel] = program.sum([(float(scale), factor)])

        # The other cubic trees: (Q x_l3)_L with Q = sum of w A.
        for (middle, last), members in channels.items():
            q = []
            for m, x in enumerate(self._x[middle]):
                summands = [(1.0, weight[Term(degree, t)], self._pair(*t[:3])[m]) for t in members]
                q.append(program.sum([*summands, (1.0, folded.get((middle, last)), x)]))
            for summands, more in zip(
                out, program.couple(coupling(middle, last, degree), q, self._x[last]), strict=True
            ):
                summands += more
        return [program.sum(summands) for summands in out]


# --- Kernels: parts that stand here, and the text around the program ---


@triton.jit
def _load_four(at, mask, LANES: tl.constexpr):
    """Four consecutive numbers a lane, as one wide load."""
    tile = tl.load(at[:, None] + tl.arange(0, 4)[None, :], mask=mask[:, None], other=0.0)  # [LANES, 4]
    even, odd = tl.split(tl.reshape(tile, [LANES, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@kernel(do_not_specialize=["num_nodes", "walk"])
def _sum_walks_kernel(
    partial,
    groups,
    out,
    num_nodes,
    walk,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of the weights of one species: the sum of what walks have left of it, in a fixed order."""
    wait_for_previous()
    i_species = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_columns = columns < WIDTH
    first, last = sums_of_species(groups, i_species, num_nodes, walk)
    total = tl.zeros([ROWS, BLOCK], dtype=out.dtype.element_ty)
    for i in range(first, last, ROWS):
        rows = i + tl.arange(0, ROWS)
        at = partial + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        total += tl.load(at, mask=(rows < last)[:, None] & m_columns[None, :], other=0.0)
    tl.store(out + i_species.to(tl.int64) * WIDTH + columns, tl.sum(total, axis=0), mask=m_columns)


def walk_registers(terms: int) -> int:
    """Most registers a lane of a walk in float32, by polynomials: for as many warps at once as do without spills."""
    return 96 if terms <= 16 else 168 if terms <= 32 else 255


def warps_at_once(registers: int) -> int:
    """Warps of so many registers a lane that run at once on a multiprocessor, in its four parts of 16384 registers."""
    return 4 * (512 // (cdiv(registers, 8) * 8))


class _Rows(NamedTuple):
    """An array with one row of coefficients a node and channel, as blocks of irreps.

    A block of b coefficients is stored (channel, b) in layout mul_ir and (b, channel) in ir_mul.
    """

    name: str
    blocks: tuple[int, ...]


def _addresses(rows: _Rows, layout: str) -> list[tuple[int, str]]:
    """For each block its size and the address of its first coefficient, as text."""
    found, first = [], 0
    for size in rows.blocks:
        inner = f"channel * {size}" if layout == "mul_ir" else "channel"
        found.append((size, f"{rows.name} + node * ({sum(rows.blocks)} * C) + {first} * C + {inner}"))
        first += size
    return found


def _load_rows(rows: _Rows, layout: str) -> list[str]:
    """Statements that load name0, name1, ..."""
    lines, n = [], 0
    for size, address in _addresses(rows, layout):
        names = [f"{rows.name}{i}" for i in range(n, n + size)]
        lines.append(f"at = {address}")
        if layout == "mul_ir" and size % 4 == 0:
            for i in range(0, size, 4):
                lines.append(f"{', '.join(names[i : i + 4])} = _load_four(at + {i}, mask, LANES)")
        else:
            step = "" if layout == "mul_ir" else " * C"
            lines += [f"{name} = tl.load(at + {i}{step}, mask=mask, other=0.0)" for i, name in enumerate(names)]
        n += size
    return lines


def _joined(values: list[str]) -> str:
    """A tile of 2^n values a lane, [LANES, 2, ..., 2], as text."""
    return values[0] if len(values) == 1 else f"tl.join({_joined(values[::2])}, {_joined(values[1::2])})"


def _store_rows(rows: _Rows, values: list[str], layout: str, whole: bool) -> list[str]:
    """Statements that store values in the order of their coefficients, four at a time or, with `whole`, a block.

    Rows of neighbouring lanes lie side by side: as one tile, whole lines are written at once, where four numbers a lane
    write each sector in two halves. Lanes exchange numbers through shared memory then, which pays in some kernels.
    """
    lines, n = [], 0
    for size, address in _addresses(rows, layout):
        block = values[n : n + size]
        lines.append(f"at = {address}")
        if layout == "mul_ir" and size in (4, 16):
            width = size if whole else 4
            for i in range(0, size, width):
                tile = f"tl.reshape({_joined(block[i : i + width])}, [LANES, {width}])"
                lines.append(
                    f"tl.store(at[:, None] + {i} + tl.arange(0, {width})[None, :], {tile}, mask=mask[:, None])"
                )
        else:
            step = "" if layout == "mul_ir" else " * C"
            lines += [f"tl.store(at + {i}{step}, {value}, mask=mask)" for i, value in enumerate(block)]
        n += size
    return lines


def _constants(constants: dict[str, float], values: list[str]) -> list[str]:
    """Statements that make constants in the type of the data: a bare number would be rounded to float32."""
    lines = [f"{name} = tl.full([LANES], {value!r}, T)" for name, value in constants.items()]
    return lines + (["zero = tl.zeros([LANES], T)"] if "zero" in values else [])


def _compiled(name: str, arguments: list[str], lines: list[str]) -> Kernel:
    """A Triton kernel from its statements; sizes and the alignment of nothing but arrays lead to new compilations."""
    sizes = [a for a in arguments if a in ("num_nodes", "num_species", "walk", "missing")]
    text = f"def {name}({', '.join(arguments)}):\n    wait_for_previous()\n"
    text += "".join(f"    {line}\n" for line in lines)
    file = f"<ase_fastuma generated {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # Triton reads sources by file
    scope = {"tl": tl, "__name__": __name__, "wait_for_previous": wait_for_previous}
    scope |= {"_load_four": _load_four, "order_tile": order_tile}
    exec(compile(text, file, "exec"), scope)
    return kernel(do_not_specialize=sizes)(scope[name])


class _Kernels:
    """The kernels of one contraction in one layout, each generated when it is first used."""

    def __init__(self, spec: Contraction, layout: str) -> None:
        self.spec, self.layout = spec, layout
        self._name = f"l{spec.lmax}_{''.join(map(str, spec.degrees))}_nu{spec.correlation}_{layout}"
        program = self._program = Program()
        self._x = program.inputs("x", spec.size_in)
        self._w = program.inputs("w", len(spec.terms))
        self._g = program.inputs("g", spec.size_out)
        self._h = program.inputs("h", spec.size_in)
        self._out = _Polynomials(program, spec, self._x, self._w).outputs()

    def shape_in(self, nodes: int, channels: int) -> tuple[int, ...]:
        """Shape of x and of its gradients."""
        return (nodes, channels, self.spec.size_in) if self.layout == "mul_ir" else (nodes, self.spec.size_in, channels)

    def shape_out(self, nodes: int, channels: int) -> tuple[int, ...]:
        """Shape of the output and of its gradients."""
        size = self.spec.size_out
        return (nodes, channels * size) if self.layout == "mul_ir" else (nodes, size, channels)

    def _rows(self, name: str) -> _Rows:
        like_x = name in ("x", "h", "grad_x")
        return _Rows(name, (self.spec.size_in,) if like_x else tuple(2 * d + 1 for d in self.spec.degrees))

    def _gradient(self, wanted: Sequence[int]) -> list[int | None]:
        """Gradients of <g, out>."""
        seeds = {v: [(1.0, g)] for v, g in zip(self._out, self._g, strict=True) if v is not None}
        return self._program.gradient(seeds, wanted)

    def _gradient_of_gradient(self, wanted: Sequence[int]) -> list[int | None]:
        """Gradients of <h, grad x>."""
        seeds: dict[int, list[tuple]] = {}
        for v, h in zip(self._gradient(self._x), self._h, strict=True):
            if v is not None:
                seeds.setdefault(v, []).append((1.0, h))
        return self._program.gradient(seeds, wanted)

    def operations(self) -> dict[str, int]:
        """Multiply-add-type instructions a node and channel."""
        return {
            "forward": self._program.operations(self._out),
            "backward x": self._program.operations(self._gradient(self._x)),
            "double": self._program.operations(self._gradient_of_gradient(self._x + self._g)),
        }

    def _load_weights(self, used: set[str]) -> list[str]:
        """Statements that load the weights of species z, those in use."""
        return [
            f"w_at = w + z * ({len(self._w)} * C) + channel",
            "w_mask = mask & (z >= 0) & (z < num_species)",
            *(
                f"w{k} = tl.load(w_at + {k} * C, mask=w_mask, other=missing)"
                for k in range(len(self._w))
                if f"w{k}" in used
            ),
        ]

    def _of_nodes(
        self,
        name: str,
        writes: dict[str, list[int | None]],
        reads: list[str],
        first_programs: Sequence[str] = (),
        whole: bool = False,
    ) -> Any:
        """A kernel from rows and weights to rows, one lane a node and channel; for `whole` see `_store_rows`."""
        outputs = [v for values in writes.values() for v in values]
        used = self._program.used(outputs)
        constants, body = self._program.code(outputs, self._w)
        values = self._program.names(outputs)
        lines = [
            "T: tl.constexpr = x.dtype.element_ty",
            "lane = tl.arange(0, LANES)",
            "block, i_channels = tl.program_id(0), tl.program_id(1)",
            *first_programs,
            "node = block.to(tl.int64) * (LANES // BLOCK_C) + lane // BLOCK_C",
            "channel = i_channels * BLOCK_C + lane % BLOCK_C",
            "mask = (node < num_nodes) & (channel < C)",
            "z = tl.load(species + node, mask=node < num_nodes, other=0).to(tl.int64)",
            *_constants(constants, values),
        ]
        lines += [line for read in reads for line in _load_rows(self._rows(read), self.layout)]
        lines += self._load_weights(used) + body
        for write in writes:
            rows = self._rows(write)
            lines += _store_rows(rows, values[: sum(rows.blocks)], self.layout, whole)
            del values[: sum(rows.blocks)]
        sizes = ["num_nodes", "num_species", "missing"]
        sizes += [f"{size}: tl.constexpr" for size in ("C", "LANES", "BLOCK_C")]
        return _compiled(f"{name}_{self._name}", [*reads, "species", "w", *writes, "groups", *sizes], lines)

    def _of_walks(
        self, name: str, gradients: list[int | None], reads: list[str], writes: dict[str, list[int | None]]
    ) -> Any:
        """A kernel from rows to gradients of the weights, summed along walks (:mod:`._species`), and to further rows.

        One lane a channel, whose sums stay in registers. Warps wait for rows in turn: with the next node's on their way
        beside those of one, fewer of them would fit.
        """
        outputs = gradients + [v for values in writes.values() for v in values]
        used = self._program.used(outputs) & {f"w{k}" for k in range(len(self._w))}
        sums = [f"sum{k}" for k in range(len(gradients))]
        constants, body = self._program.code(outputs, self._w, dict(zip(sums, gradients, strict=True)))
        values = self._program.names(outputs)[len(sums) :]
        loop = [
            "node = tl.load(groups + i).to(tl.int64)",
            "own = tl.load(groups + num_nodes + i)",
            "following = tl.load(groups + num_nodes + i + 1)",  # of no node beyond the last
            "z = own + tl.zeros([LANES], tl.int64)",
            *(line for read in reads for line in _load_rows(self._rows(read), self.layout)),
            *(self._load_weights(used) if used else []),
            *body,
        ]
        for write in writes:
            size = sum(self._rows(write).blocks)
            loop += _store_rows(self._rows(write), values[:size], self.layout, whole=True)  # of one warp
            del values[:size]
        loop += [
            "if (following != own) | (i + 1 == last):",
            f"    at = partial + (i_walk + own).to(tl.int64) * ({len(sums)} * C) + channel",
            *(f"    tl.store(at + {k} * C, {total}, mask=mask)" for k, total in enumerate(sums)),
            *(f"    {total} = tl.zeros([LANES], T)" for total in sums),
        ]
        lines = [
            "T: tl.constexpr = x.dtype.element_ty",
            "LANES: tl.constexpr = BLOCK_C",
            "i_walk = tl.program_id(0)",
            "channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)",
            "mask = channel < C",
            "first = i_walk * walk",
            "last = tl.minimum(first + walk, num_nodes)",
            *_constants(constants, self._program.names(outputs)),
            *(f"{total} = tl.zeros([LANES], T)" for total in sums),
            "for i in range(first, last):",
            *(f"    {line}" for line in loop),
        ]
        sizes = ["num_nodes", "num_species", "walk", "missing", "C: tl.constexpr", "BLOCK_C: tl.constexpr"]
        return _compiled(f"{name}_{self._name}", [*reads, "groups", "w", "partial", *writes, *sizes], lines)

    @functools.cached_property
    def forward(self) -> Any:
        """out(x, w); given an array for them, nodes grouped by species too, for gradients of weights to come.

        The programs that do so come first and hide behind the others. A sort of its own before the backward pass would
        take as long as a short one itself.
        """
        tile = f"{ORDERED}, {MAX_ORDERED}, LANES"
        ordering = [
            "if groups is not None:",  # then programs are in one row
            f"    tiles = (num_nodes + num_species) // {ORDERED} + 1",
            "    if block < tiles:",
            f"        order_tile(species, groups, block, num_nodes, num_species, {tile})",
            "        return",
            "    blocks = tl.cdiv(num_nodes, LANES // BLOCK_C)",
            "    i_channels = (block - tiles) // blocks",
            "    block = (block - tiles) % blocks",
        ]
        return self._of_nodes("contraction", {"out": self._out}, ["x"], ordering)

    @functools.cached_property
    def grad_x(self) -> Any:
        """The gradient of <g, out> with respect to x."""
        writes, few = {"grad_x": self._gradient(self._x)}, self.spec.degrees == (0,)
        return self._of_nodes("contraction_grad_x", writes, ["x", "g"], whole=few)

    @functools.cached_property
    def double(self) -> Any:
        """The gradients of <h, grad x> with respect to x and g."""
        found = self._gradient_of_gradient(self._x + self._g)
        writes = {"grad_x": found[: len(self._x)], "grad_g": found[len(self._x) :]}
        return self._of_nodes("contraction_double", writes, ["x", "g", "h"])

    @functools.cached_property
    def grad_w(self) -> Any:
        """The gradient of <g, out> with respect to w."""
        return self._of_walks("contraction_grad_w", self._gradient(self._w), ["x", "g"], {})

    @functools.cached_property
    def grad_xw(self) -> Any:
        """Both gradients of <g, out>."""
        found = self._gradient(self._w + self._x)
        gradients, grad_x = found[: len(self._w)], found[len(self._w) :]
        return self._of_walks("contraction_grad_xw", gradients, ["x", "g"], {"grad_x": grad_x})

    @functools.cached_property
    def double_w(self) -> Any:
        """The gradient of <h, grad x> with respect to w."""
        return self._of_walks("contraction_double_w", self._gradient_of_gradient(self._w), ["x", "g", "h"], {})


@functools.cache
def _kernels(spec: Contraction, layout: str) -> _Kernels:
    return _Kernels(spec, layout)


# --- Launchers ---


def _launch_nodes(
    kernels: _Kernels,
    name: str,
    rows: Sequence[Tensor],
    species: Tensor,
    w: Tensor,
    out: Sequence[Tensor],
    groups: Tensor | None = None,
) -> None:
    """Launch the kernel of this name from rows and weights to rows; the forward pass writes groups, where given."""
    nodes, (num_species, terms, channels) = species.shape[0], w.shape
    if nodes == 0 or channels == 0:
        return
    lanes, most, registers = programs_of_nodes(name, terms)
    block = min(most, next_power_of_2(channels))
    grid = (cdiv(nodes, lanes // block), cdiv(channels, block))
    if groups is not None:
        grid = (order_tiles(nodes, num_species) + grid[0] * grid[1], 1)
    missing = float("nan")  # weights of a species that there is none of: the result shows it
    arguments = (*rows, species, w, *out, groups, nodes, num_species, missing)
    sizes = {"C": channels, "LANES": lanes, "BLOCK_C": block}
    options = {"num_warps": lanes // 32, "enable_fp_fusion": True}
    options["maxnreg"] = registers if w.dtype == torch.float32 else None
    getattr(kernels, name)[grid](*arguments, **sizes, **options)


def _launch_walks(
    kernels: _Kernels,
    name: str,
    rows: Sequence[Tensor],
    species: Tensor,
    w: Tensor,
    groups: Tensor,
    out: Sequence[Tensor] = (),
) -> Tensor:
    """Launch the kernel of this name to gradients of the weights, [E, K, C] as those, and the sum of its walks."""
    grad_w = w.new_empty(w.shape)
    num_nodes, (num_species, terms, channels) = species.shape[0], w.shape
    if num_nodes == 0 or grad_w.numel() == 0:
        return grad_w.zero_()
    if groups.numel() == 0:
        groups = nodes_by_species(species, num_species)
    block = min(CHANNELS, next_power_of_2(channels))
    blocks = cdiv(channels, block)
    registers = walk_registers(terms) if w.dtype == torch.float32 else 255
    at_once = processors(w.device) * warps_at_once(registers)
    walk = max(2, cdiv(num_nodes * blocks, at_once))
    walks = cdiv(num_nodes, walk)
    partial = w.new_empty(walks + num_species, terms, channels)
    arguments = (*rows, groups, w, partial, *out, num_nodes, num_species, walk, float("nan"))
    options = {"num_warps": 1, "enable_fp_fusion": True, "maxnreg": registers}
    getattr(kernels, name)[(walks, blocks)](*arguments, C=channels, BLOCK_C=block, **options)
    width = terms * channels
    # Few species have hundreds of rows each: many at once. Wide outputs have programs by the thousand, each of which
    # waits for the kernel before it: half as many are faster, though fewer rows are then on their way.
    loaded, columns = (32, 64) if terms <= 16 else (16, 128)
    sizes = {"WIDTH": width, "ROWS": loaded, "BLOCK": columns}
    grid = (num_species, cdiv(width, columns))
    _sum_walks_kernel[grid](partial, groups, grad_w, num_nodes, walk, **sizes, num_warps=2)
    return grad_w


# --- Autograd: functions that are each other's derivatives ---


def _batch(function: Any, info: Any, in_dims: tuple, args: tuple, of_nodes: bool) -> tuple:
    """Rules of torch.vmap: batches of nodes are more nodes; batches of weights or of their gradients run in turn.

    Hessians come this way: many upstream gradients for one x. Weights, where a function takes them, are argument 2.
    """
    if of_nodes and in_dims[2] is None:
        flat = []
        for i, (arg, dim) in enumerate(zip(args, in_dims, strict=True)):
            if isinstance(arg, Tensor) and i != 2:
                arg = arg.expand(info.batch_size, *arg.shape) if dim is None else arg.movedim(dim, 0)
                arg = arg.flatten(0, 1)
            flat.append(arg)
        found = function.apply(*flat)
        outputs = found if isinstance(found, tuple) else (found,)
        outputs = tuple(o.view(info.batch_size, o.shape[0] // info.batch_size, *o.shape[1:]) for o in outputs)
    else:
        runs = []
        for i in range(info.batch_size):
            chosen = (a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True))
            found = function.apply(*chosen)
            runs.append(found if isinstance(found, tuple) else (found,))
        outputs = tuple(torch.stack(o) for o in zip(*runs, strict=True))
    return (outputs, (0,) * len(outputs)) if isinstance(found, tuple) else (outputs[0], 0)


def _asked(ctx: Any, i: int) -> bool:
    """Whether this backward pass wants the gradient of tensor argument i.

    `needs_input_grad` says only that the argument takes gradients: forces of a model in training would pay for those of
    its weights too.
    """
    if not ctx.needs_input_grad[i]:
        return False
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[i][0])
    except RuntimeError:  # a leaf that torch.autograd.grad was asked for
        return True


def _no_groups(species: Tensor) -> Tensor:
    """An empty array of groups: whoever needs them makes them."""
    return species.new_empty(0, dtype=torch.int32)


class _Contract(torch.autograd.Function):
    """out(x, w), and the nodes grouped by species where `trained` asks for them and they are not too many."""

    @staticmethod
    def forward(x, species, w, trained, kernels):
        out = x.new_empty(kernels.shape_out(x.shape[0], w.shape[2]))
        few = x.shape[0] <= MAX_ORDERED and w.shape[0] <= MAX_SPECIES
        grouped = trained and few and out.numel() > 0
        groups = empty_groups(species, w.shape[0]) if grouped else _no_groups(species)
        _launch_nodes(kernels, "forward", [x.contiguous()], species, w, [out], groups if grouped else None)
        return out, groups

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, species, w, _, ctx.kernels = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, species, w, output[1])

    @staticmethod
    def backward(ctx, g, _):
        x, species, w, groups = ctx.saved_tensors
        asked_x, asked_w = (g is not None and _asked(ctx, i) for i in (0, 2))
        grad_x = grad_w = None
        if asked_x and asked_w:
            grad_x, grad_w = _GradXW.apply(x, species, w, groups, g, ctx.kernels)
        elif asked_x:
            grad_x = _GradX.apply(x, species, w, groups, g, ctx.kernels)
        elif asked_w:
            grad_w = _GradW.apply(x, species, w.detach(), groups, g, ctx.kernels)
        return grad_x, None, grad_w, None, None

    @staticmethod
    def vmap(info, in_dims, x, species, w, trained, kernels):
        # Groups would be those of the whole batch.
        return _batch(_Contract, info, in_dims, (x, species, w, False, kernels), of_nodes=True)


class _GradX(torch.autograd.Function):
    """The gradient of <g, out> with respect to x."""

    @staticmethod
    def forward(x, species, w, groups, g, kernels):
        grad_x = x.new_empty(kernels.shape_in(x.shape[0], w.shape[2]))
        _launch_nodes(kernels, "grad_x", [x.contiguous(), g.contiguous()], species, w, [grad_x])
        return grad_x

    @staticmethod
    def setup_context(ctx, inputs, output):
        *saved, ctx.kernels = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx, h):
        return *_through_grad_x(ctx, h), None

    @staticmethod
    def vmap(info, in_dims, x, species, w, groups, g, kernels):
        in_dims = (*in_dims[:3], None, *in_dims[4:])
        return _batch(_GradX, info, in_dims, (x, species, w, _no_groups(species), g, kernels), of_nodes=True)


def _through_grad_x(ctx: Any, h: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of <h, grad x> with respect to x, species, w, groups and g, those that are asked for."""
    x, species, w, groups, g = ctx.saved_tensors
    grad_x = grad_g = grad_w = None
    if _asked(ctx, 0) or _asked(ctx, 4):
        grad_x, grad_g = _Double.apply(x, species, w, g, h, ctx.kernels)
    if _asked(ctx, 2):
        grad_w = _DoubleW.apply(x, species, w.detach(), groups, g, h, ctx.kernels)
    return grad_x, None, grad_w, None, grad_g


def _through_grad_w(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of <u, grad w>, which is <g, out> with weights u: as out is linear in w, none with respect to w."""
    x, species, _, groups, g = ctx.saved_tensors
    u = u.contiguous()
    grad_x = _GradX.apply(x, species, u, groups, g, ctx.kernels) if _asked(ctx, 0) else None
    grad_g = _Contract.apply(x, species, u, False, ctx.kernels)[0] if _asked(ctx, 4) else None
    return grad_x, None, None, None, grad_g


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be none."""
    return b if a is None else a if b is None else a + b


class _GradXW(torch.autograd.Function):
    """Both gradients of <g, out>, in one pass."""

    @staticmethod
    def forward(x, species, w, groups, g, kernels):
        grad_x = x.new_empty(kernels.shape_in(x.shape[0], w.shape[2]))
        grad_w = _launch_walks(kernels, "grad_xw", [x.contiguous(), g.contiguous()], species, w, groups, [grad_x])
        return grad_x, grad_w

    @staticmethod
    def setup_context(ctx, inputs, output):
        *saved, ctx.kernels = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx, h, u):
        nothing = (None,) * 5
        through_x = nothing if h is None else _through_grad_x(ctx, h)
        through_w = nothing if u is None else _through_grad_w(ctx, u)
        return *map(_added, through_x, through_w), None

    @staticmethod
    def vmap(info, in_dims, *args):
        return _batch(_GradXW, info, in_dims, args, of_nodes=False)


class _GradW(torch.autograd.Function):
    """The gradient of <g, out> with respect to w, of whose values nothing depends."""

    @staticmethod
    def forward(x, species, w, groups, g, kernels):
        return _launch_walks(kernels, "grad_w", [x.contiguous(), g.contiguous()], species, w, groups)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *saved, ctx.kernels = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx, u):
        return *_through_grad_w(ctx, u), None

    @staticmethod
    def vmap(info, in_dims, *args):
        return _batch(_GradW, info, in_dims, args, of_nodes=False)


class _DoubleW(torch.autograd.Function):
    """The gradient of <h, grad x> with respect to w. <u, of this> is <h, grad x> with weights u."""

    @staticmethod
    def forward(x, species, w, groups, g, h, kernels):
        rows = [x.contiguous(), g.contiguous(), h.contiguous()]
        return _launch_walks(kernels, "double_w", rows, species, w, groups)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *saved, ctx.kernels = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx, u):
        x, species, _, groups, g, h = ctx.saved_tensors
        u = u.contiguous()
        grad_x, grad_g = _Double.apply(x, species, u, g, h, ctx.kernels)
        return grad_x, None, None, None, grad_g, _GradX.apply(x, species, u, groups, g, ctx.kernels), None

    @staticmethod
    def vmap(info, in_dims, *args):
        return _batch(_DoubleW, info, in_dims, args, of_nodes=False)


class _Double(torch.autograd.Function):
    """The gradients of <h, grad x> with respect to x and g. Third derivatives go through the reference, once."""

    @staticmethod
    def forward(x, species, w, g, h, kernels):
        grad_x = x.new_empty(kernels.shape_in(x.shape[0], w.shape[2]))
        grad_g = x.new_empty(kernels.shape_out(x.shape[0], w.shape[2]))
        rows = [x.contiguous(), g.contiguous(), h.contiguous()]
        _launch_nodes(kernels, "double", rows, species, w, [grad_x, grad_g])
        return grad_x, grad_g

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, species, w, g, h, ctx.kernels = inputs
        ctx.save_for_backward(x, species, w, g, h)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, a, b):
        species = ctx.saved_tensors[1]
        with torch.enable_grad():
            x, w, g, h = (t.detach().requires_grad_() for t in ctx.saved_tensors if t is not species)
            out = reference.symmetric_contraction(x, species, w, ctx.kernels.spec, ctx.kernels.layout)
            (grad,) = torch.autograd.grad(out, x, g, create_graph=True)
            first = torch.autograd.grad(grad, (x, g), h, create_graph=True, allow_unused=True)
            # Of one factor the gradient does not depend on x.
            given = [(out, u) for out, u in zip(first, (a, b), strict=True) if out is not None and out.requires_grad]
            outputs, upstream = zip(*given, strict=True)
            grad_x, grad_w, grad_g, grad_h = torch.autograd.grad(outputs, (x, w, g, h), upstream, allow_unused=True)
        return grad_x, None, grad_w, grad_g, grad_h, None

    @staticmethod
    def vmap(info, in_dims, *args):
        return _batch(_Double, info, in_dims, args, of_nodes=True)


def symmetric_contraction(
    x: Tensor,
    species: Tensor,
    weights: Tensor,
    irreps_out: str,
    *,
    irreps_in: str = "0e+1o+2e+3o",
    correlation: int = 3,
    layout: str = "mul_ir",
) -> Tensor:
    """Weighted equivariant polynomials of a node's features, of up to `correlation` factors, channel by channel.

    Args:
        x: features [N, C, D] in layout mul_ir, [N, D, C] in ir_mul; D = (lmax + 1)^2 coefficients of degrees
            0 ... lmax, in e3nn's basis; float32 or float64 (half types are computed in float32).
        species: [N], int32 or int64, which weights a node takes: 0 ... E - 1. Not looked at before the kernels run, so
            that nothing waits for the device; outside this range the output is NaN there (on a CPU: IndexError).
        weights: [E, K, C], one for each species, polynomial and channel; the polynomials are the terms of
            :func:`._couplings.contraction`.
        irreps_out: output irreps, some of 0e, 1o, 2e, 3o in this order, e.g. "0e+1o".
        irreps_in: input irreps, all degrees from 0e on.
        correlation: 1, 2 or 3.
        layout: "mul_ir" as in e3nn and MACE, or "ir_mul".

    Returns:
        mul_ir: [N, C * sum of (2 L + 1)], for each irrep (channel, m); ir_mul: [N, sum of (2 L + 1), C]. Differentiable
        in x and weights twice by kernels and once more by the reference; results repeat bitwise.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected 'mul_ir' or 'ir_mul', got {layout!r}")
    spec = contraction(irreps_in, irreps_out, correlation)
    check_shape("x", x, (None, None, spec.size_in) if layout == "mul_ir" else (None, spec.size_in, None))
    channels = x.shape[1] if layout == "mul_ir" else x.shape[2]
    check_shape("weights", weights, (None, len(spec.terms), channels), x)
    if not isinstance(species, Tensor) or species.dtype not in (torch.int32, torch.int64):
        got = species.dtype if isinstance(species, Tensor) else type(species).__name__
        raise TypeError(f"species: expected a tensor of int32 or int64, got {got}")
    if species.shape != x.shape[:1]:
        raise ValueError(f"species: expected shape [{x.shape[0]}], got {list(species.shape)}")
    if species.device != x.device:
        raise ValueError(f"species: expected device {x.device}, got {species.device}")
    if x.shape[0] and not weights.shape[0]:
        raise ValueError("weights: expected at least one species, got none")
    x = x.float() if x.element_size() < 4 else x
    weights = weights.float() if weights.element_size() < 4 else weights
    if not runs_kernels(x):
        outside = (species < 0) | (species >= weights.shape[0])
        if outside.any():
            raise IndexError(f"species: expected 0 to {weights.shape[0] - 1}, got {int(species[outside][0])}")
        return reference.symmetric_contraction(x, species, weights, spec, layout)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        trained = torch.is_grad_enabled() and weights.requires_grad
        return _Contract.apply(x, species.contiguous(), weights.contiguous(), trained, _kernels(spec, layout))[0]

"""Radial tables by pairs of elements: they grow, and begin anew past their limit."""

from __future__ import annotations

import itertools

import pytest
import torch
from ase_fastuma.kernels.linear import block_weights
from ase_fastuma.kernels.radial import NUM_KNOTS

from ase_fastuma import radials as module
from ase_fastuma.checkpoint import Checkpoint, load_checkpoint
from ase_fastuma.radials import Radials

PAIRS = list(itertools.product((1, 8), repeat=2))
SILVER = [(47, 47)]


@pytest.fixture
def make(standin):
    checkpoint: Checkpoint = load_checkpoint(standin)
    state = {name: weight for name, weight in checkpoint.state.items() if weight.is_floating_point()}
    arch = checkpoint.architecture

    def make_radials(tables: bool = True) -> Radials:
        return Radials(lambda: state, arch, torch.float32, lambda m, b: block_weights(m, b, "single"), tables)

    make_radials.bytes_of_a_pair = 4 * (arch.num_layers + 1) * (NUM_KNOTS - 1) * 4 * arch.edge_channels
    return make_radials


def values(found, pair):
    """All that the networks know of a pair."""
    rows, networks = found
    return [(radial.table.coefficients[rows[pair]], radial.pair_bias[rows[pair]]) for radial, _ in networks]


def test_a_pair_does_not_depend_on_others(make):
    """Bitwise: alone, among others, and however the tables grew."""
    growing = make()
    growing.of(SILVER)
    found = growing.of(PAIRS)
    assert found[0].keys() == {*SILVER, *PAIRS}
    for pair in (*SILVER, PAIRS[1]):
        for mine, other in zip(values(found, pair), values(make().of([pair]), pair), strict=True):
            assert torch.equal(mine[0], other[0])
            assert torch.equal(mine[1], other[1])
    assert not torch.equal(values(found, PAIRS[1])[0][0], values(found, PAIRS[2])[0][0])
    assert growing.of(SILVER)[1][0][0] is found[1][0][0]


def test_tables_grow_in_place(make):
    """What was given before stays as it was, and shares its memory with what comes later."""
    radials = make()
    radials.of(PAIRS[:2])
    _, before = radials.of(PAIRS[:3])  # in room for four
    kept = [radial.table.coefficients.clone() for radial, _ in before]
    _, after = radials.of(PAIRS)
    for (old, _), (new, _), copy in zip(before, after, kept, strict=True):
        assert old.table.coefficients.data_ptr() == new.table.coefficients.data_ptr()
        assert torch.equal(old.table.coefficients, copy)
        assert len(new.table.coefficients) == 4


def test_past_the_limit(make, monkeypatch):
    """Tables begin anew with what is wanted; where that alone is too much, the networks themselves run."""
    monkeypatch.setattr(module, "_TABLE_BYTES", 4 * make.bytes_of_a_pair)
    radials = make()
    radials.of(PAIRS)
    rows, networks = radials.of(SILVER)
    assert rows == {SILVER[0]: 0}
    assert len(networks[0][0].table.coefficients) == 1
    rows, networks = radials.of(PAIRS + SILVER)
    assert rows == {pair: i for i, pair in enumerate(PAIRS + SILVER)}
    assert networks[0][0].table is None
    assert len(networks[0][0].pair_bias) == 5
    assert radials.of(SILVER)[1][0][0].table is not None


def test_without_tables(make):
    rows, networks = make(tables=False).of(PAIRS)
    assert len(rows) == 4
    assert all(radial.table is None for radial, _ in networks)

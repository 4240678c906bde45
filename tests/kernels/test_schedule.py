"""Orders of straight-line programs: complete, possible, and with few values live at once."""

from __future__ import annotations

import pytest
from ase_fastuma.kernels._couplings import contraction
from ase_fastuma.kernels._schedule import few_live, most_live
from ase_fastuma.kernels._straightline import Program
from ase_fastuma.kernels.symmetric_contraction import _Kernels


def test_products_are_added_up_as_they_come():
    """Two sums over the same squares: one after the other all squares live; in turn, one of them and two sums."""
    values = {v: [(1.0, v - 10, v - 10)] for v in range(10, 18)}
    values |= {18: [(1.0, v) for v in range(10, 18)], 19: [(2.0, v) for v in range(10, 18)]}
    inputs, outputs = set(range(8)), {18, 19}
    by_sums = [(v, i) for v, value in values.items() for i in range(len(value))]
    assert most_live(values, by_sums, outputs, inputs) == 8 + 2
    assert most_live(values, few_live(values, outputs, inputs), outputs, inputs) == 2 + 2


def test_inputs_live_from_the_beginning_and_outputs_to_the_end():
    values = {2: [(1.0, 0)], 3: [(1.0, 1, 2)]}
    order = [(2, 0), (3, 0)]
    assert most_live(values, order) == 3
    assert most_live(values, order, on_demand={0, 1}) == 3
    assert most_live(values, order, outputs={2, 3}) == 3
    assert most_live({2: [(1.0, 0)], 3: [(1.0, 1)]}, order, outputs={2, 3}) == 3
    assert most_live({2: [(1.0, 0)], 3: [(1.0, 1)]}, order, on_demand={0, 1}) == 2


@pytest.mark.parametrize(("irreps_out", "forward", "backward", "double"), [("0e", 24, 46, 70), ("0e+1o", 40, 84, 120)])
def test_orders_of_a_contraction(irreps_out, forward, backward, double):
    """Each summand once, after what it is made of; sum by sum a quarter more values are live, or more than that."""
    kernels = _Kernels(contraction("0e+1o+2e+3o", irreps_out, 3), "mul_ir")
    gradients = kernels._gradient_of_gradient(kernels._x + kernels._g)
    for outputs, most in ((kernels._out, forward), (kernels._gradient(kernels._x), backward), (gradients, double)):
        values = kernels._program.sums(outputs)
        order = few_live(values, outputs, kernels._w)
        sum_by_sum = [(v, i) for v, value in values.items() for i in range(len(value))]
        assert sorted(order) == sorted(sum_by_sum)
        left = {v: len(value) for v, value in values.items()}
        for v, i in order:
            assert not any(left.get(a) for a in values[v][i][1:])
            left[v] -= 1
        live = most_live(values, order, outputs, kernels._w)
        by_sums = most_live(values, sum_by_sum, outputs, kernels._w)
        assert live <= most
        assert by_sums >= 1.25 * live


def test_code_in_this_order_computes_the_same():
    """A polynomial and its gradient, from the text, and sums to add to."""
    program = Program()
    a, b = program.inputs("x", 2)
    square = program.sum([(1.0, a, a), (-3.0, b)])
    out = program.sum([(0.5, square, b), (-1.0, square), (1.0, a)])
    outputs = [out, *program.gradient({out: [(1.0, a)]}, [a, b]), a]
    sums = {"s0": outputs[1], "s1": outputs[1], "s2": a, "s3": None}
    constants, lines = program.code(outputs, [], sums)
    scope = {"x0": 1.5, "x1": -0.25, "s0": 10.0, "s1": 20.0, "s2": 30.0, "s3": 40.0} | constants
    exec("\n".join(lines), scope)
    x, y = 1.5, -0.25
    # <x, out> with out = (x^2 - 3 y) (y / 2 - 1) + x, its factor x held constant
    want = [
        (x * x - 3 * y) * (y / 2 - 1) + x,
        x * (2 * x * (y / 2 - 1) + 1),
        x * (-3 * (y / 2 - 1) + (x * x - 3 * y) / 2),
    ]
    assert [scope[name] for name in program.names(outputs)] == pytest.approx([*want, x], abs=1e-14)
    assert [scope[f"s{k}"] for k in range(4)] == pytest.approx([10 + want[1], 20 + want[1], 30 + x, 40], abs=1e-14)

"""Differentiable operations of equivariant graph networks (lmax = mmax = 2), with Triton kernels and plain references.

Nothing here knows fairchem. Import operations from their own files, which is where they are documented::

    from ase_fastuma.kernels.atomwise import atomwise, atomwise_weights
    from ase_fastuma.kernels.balance import balanced_sum
    from ase_fastuma.kernels.edge import gather_rotate_scale, rotate_back_sum, sorted_edges
    from ase_fastuma.kernels.gate import gate
    from ase_fastuma.kernels.grouped_linear import grouped_linear
    from ase_fastuma.kernels.linear import block_linear, block_weights
    from ase_fastuma.kernels.many_neighbours import Systems, bins_of, neighbour_lists
    from ase_fastuma.kernels.neighbours import neighbour_list
    from ase_fastuma.kernels.norm import add_rms_norm
    from ase_fastuma.kernels.rotation import edge_rotation, rotate, rotate_back
    from ase_fastuma.kernels.symmetric_contraction import symmetric_contraction
"""

"""The nouns: meshes, placements and layouts. Frozen, interned values that print on one line and communicate nothing.

In the order of imports, which go down only:

    mesh       `Mesh`: named axes, sizes, ranks, sub-meshes, coordinates, fingerprint, slow axes, usable groups
    placement  `Shard`, `StridedShard`, `Replicate`, `Partial`
    dtypes     how dtypes are written, their extremes, the identities of reductions
    factor     `Factor`: how mesh axes shard a factor of a dim
    dims       how placements shard a dim, and which placements say so
    layout     `Layout`: the canonical, interned form; local shapes and offsets; `PerRank`: what differs from rank to rank
    from_placements  `make_layout`: a layout from the placements that a user gives
    text       `Form`: a layout without its sizes, as text
"""

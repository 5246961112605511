"""`DTensor`, and one operator call from its key to its result.

In the order of imports, which go down only:

    wrapping          how a DTensor is made around a local tensor
    toolbox           what a program on DTensors, in place of one operator, may use
    assignment        `x[index] = value`: the index and the value as torch's own assignment takes them
    draw              random DTensors: the numbers of the whole tensor, of which each rank makes its shard
    fallback          what serves an operator without a rule: its functional form, its decomposition, or a gather
    arguments         the arguments of one call: their key, and the `Call` that a rule reads
    dispatch          one operator call from locals to wrapped result, with no operator named in it
    placements_given  which layout the placements that a user gives stand for
    checkpoint        storing a DTensor: the boxes of it that lie in this process, and whose pickle it is
    dtensor           `DTensor` and its constructors
    gradients         `deferred_gradients`: several backwards whose gradients are reduced once
    distribute        `distribute_tensor`, `distribute_module`: plain tensors, spread over a mesh
    each_rank         `each_rank`: a function of local tensors, called on every rank
    relabel           `relabel`: the ranks of a mesh for which tensors move least
    factories         `zeros`, `ones`, `full`, `empty`, `rand`, `randn`, `randint`, `randperm`
"""

"""What a run leaves behind: digests of tensors, the manifest, and the folder that holds both.

digest    a tensor's 128 bits
leaves    the part of a digest that a GPU computes: `xxh3` in torch's operators, `xxh3_kernel` in one kernel
recorder  `observe` calls to rows
manifest  everything that can change a bit
store     rows and manifest to and from disk
value     one whole tensor to and from disk, for a divergence that has to be looked at
"""

"""What a run leaves behind: digests of tensors, the manifest, and the folder that holds both.

digest    a tensor's 128 bits
recorder  `observe` calls to rows
manifest  everything that can change a bit
store     rows and manifest to and from disk
value     one whole tensor to and from disk, for a divergence that has to be looked at
"""

"""Write a run's recording: digests of tensors, the manifest, and the folder of both.

digest           a tensor's 128 bits
leaves           the part of a digest that a GPU computes: `xxh3` in torch's operators, `xxh3_kernel` in Triton
recorder         `observe` calls to rows
manifest         everything that can change a bit
recording_files  rows and manifest to and from disk
value            a whole tensor to and from disk, to examine a divergence
"""

"""Write a run's recording: a folder with the digests of its tensors and a manifest.

digest           a tensor's 128 bits
leaves           the part of a digest that a GPU computes: `xxh3` in torch's operators, `xxh3_kernel` in Triton
recorder         turns `observe` calls into rows
manifest         everything that can change a bit
recording_files  writes rows and manifest to disk, and reads them
value            writes a whole tensor to disk and reads it, to examine a divergence
"""

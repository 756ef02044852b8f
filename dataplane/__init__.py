"""The data plane: what a version consists of, and how its bytes get from a trainer into engines. Knows no policy.

Rooms, in the order in which to read them (README.md follows one weight through them):

tensors      names, dtypes, shapes, shards, manifests and digest tables: pure data
digest       checksums of tensors, and those that SGLang gives of its own parameters
processes    sockets, deadlines, threads and process groups between processes
memory       memory that other processes open, and staging buffers
copy         strided copies and digests on one device
quantize     quantization schemes, and the kernels
reshard      load trace and shards make a plan, a plan a schedule; verification
transports   the interface, the registry, and a folder each: direct, sends, local, distributed, disk
errors       all errors, by what the caller can do about them
"""

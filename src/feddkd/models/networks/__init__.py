"""The networks of the paper and of the benchmarks, one file each."""
